"""Dashboard and alerts against the code: every series in them exists, with the labels they use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

families = pytest.importorskip("tessera_sglang.families", exc_type=ImportError)
yaml = pytest.importorskip("yaml")

DOCS = Path(__file__).parents[1] / "docs" / "observability"
# What SGLang puts on a scheduler's metrics, and what Prometheus adds when it scrapes.
COMMON = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"}
COMMON |= {"instance", "job"}
FUNCTIONS = {"sum", "rate", "increase", "scalar", "histogram_quantile"}
KEYWORDS = {"by", "and", "offset"}
LABELS = {family.name: set(family.labels) for family in families.FAMILIES}
KINDS = {family.name: family.kind for family in families.FAMILIES}
# In quotes or in brackets anything goes
LITERAL = re.compile(r'"[^"]*"|\[[^\]]*\]')
DURATION = re.compile(r"(\d+(ms|s|m|h|d|w|y))+|\$__rate_interval|\$__range")


def dashboard() -> Any:
    return json.loads((DOCS / "grafana.json").read_text())


def rules() -> list[Any]:
    (group,) = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]
    found: list[Any] = group["rules"]
    return found


def panels() -> list[Any]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def balanced(text: str) -> bool:
    pairs, stack = {")": "(", "}": "{", "]": "["}, []
    for char in re.sub(r'"[^"]*"', "", text):
        if char in pairs.values():
            stack.append(char)
        elif char in pairs and (not stack or stack.pop() != pairs[char]):
            return False
    return not stack and text.count('"') % 2 == 0


def wrong_with(expr: str) -> list[str]:
    """What an expression has that Prometheus or the code does not know."""
    found = [] if balanced(expr) else ["unbalanced"]
    found += [f"duration {d}" for d in re.findall(r"\[([^\]]*)\]", expr) if not duration(d)]
    found += [f"offset {d}" for d in re.findall(r"offset\s+(\S+?)\)", expr) if not duration(d)]
    for name, selector in re.findall(r"(tessera_\w+)(?:\{([^}]*)\})?", expr):
        if name not in LABELS:
            found.append(f"unknown {name}")
            continue
        used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
        found += [f"{name} has no {label}" for label in used - LABELS[name] - COMMON]
        grown = re.search(rf"(rate|increase)\s*\(\s*{name}\b[^)\[]*\[", expr) is not None
        if grown != (KINDS[name] == "counter"):
            found.append(f"{name} is a {KINDS[name]}")
    for labels, inner in re.findall(r"by\s*\(([^)]*)\)\s*\((.*)", expr, re.DOTALL):
        name = re.search(r"(tessera_\w+|sglang:\w+)", inner)
        if name is not None and name[1] in LABELS:
            wanted = {label.strip() for label in labels.split(",")}
            found += [f"{name[1]} has no {label}" for label in wanted - LABELS[name[1]] - COMMON]
    plain = LITERAL.sub("", re.sub(r"\{[^}]*\}", "", expr))
    plain = re.sub(r"by\s*\([^)]*\)", "by", plain)
    words = set(re.findall(r"(?<![\w:$.])[a-z_]\w*(?![\w:])", plain))
    words -= {word for word in words if word.startswith("tessera_")}
    found += [f"word {word}" for word in words - FUNCTIONS - KEYWORDS]
    return found


def duration(text: str) -> bool:
    return DURATION.fullmatch(text.strip()) is not None


@pytest.mark.parametrize(("title", "expr"), list(expressions()))
def test_an_expression_is_plausible_and_its_series_exist(title: str, expr: str) -> None:
    assert not wrong_with(expr), (title, expr)


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("sum (rate(tessera_hit_tokens_total[5m])", "unbalanced"),
        ("sum (rate(tessera_hits_total[5m]))", "unknown tessera_hits_total"),
        ("rate(tessera_hit_tokens_total[5 minutes])", "duration 5 minutes"),
        ("sum (increase(tessera_hit_tokens_total[1h] offset 1day))", "offset 1day"),
        ('rate(tessera_hit_tokens_total{sort="span"}[5m])', "tessera_hit_tokens_total has no sort"),
        ("sum by (tier) (tessera_pages)", "tessera_pages has no tier"),
        ("sum (tessera_hit_tokens_total)", "tessera_hit_tokens_total is a counter"),
        ("rate(tessera_pages[5m])", "tessera_pages is a gauge"),
        ("summe (tessera_pages)", "word summe"),
    ],
)
def test_what_would_be_wrong_is_noticed(expr: str, complaint: str) -> None:
    assert wrong_with(expr) == [complaint]


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {name for _, expr in expressions() for name in re.findall(r"tessera_\w+", expr)}
    assert shown == set(LABELS)


def test_the_readme_explains_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(tessera_\w+)` \| (.*?) \|", (DOCS / "README.md").read_text(), re.M)
    explained = {name: set(re.findall(r"`(\w+)`(?=:|,| \w*$|$)", labels)) for name, labels in rows}
    assert set(explained) == set(LABELS)
    for name, labels in LABELS.items():
        assert labels <= explained[name], name


def test_sglangs_series_exist_in_the_installed_sglang() -> None:
    package = pytest.importorskip("sglang")
    source = Path(package.__path__[0]) / "srt" / "observability" / "metrics_collector.py"
    known = set(re.findall(r'"(sglang:\w+)"', source.read_text()))
    text = (DOCS / "grafana.json").read_text() + (DOCS / "README.md").read_text()
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"sglang:\w+", text)}
    used -= {"sglang:NAME"}  # a kernel's name, not a metric's
    assert len(used) > 5
    assert used <= known, used - known


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["uid"] == "tessera-sglang"
    assert board["title"]
    assert board["schemaVersion"] >= 36
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model": "query"}
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list(
            "ABC"[: len(panel["targets"])]
        )
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {
                "model",
                "__rate_interval",
                "__range",
            }


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 5
    watched = " ".join(rule["expr"] for rule in rules())
    for name in (
        "tessera_dedup_collisions_total",
        "tessera_latent_divergence_total",
        "tessera_quarantined_total",
        "tessera_kernel_fallback_total",
        "tessera_hit_tokens_total",
    ):
        assert name in watched
    for rule in rules():
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "meaning", "action"}
        assert all(len(text) > 20 for text in rule["annotations"].values())
        assert duration(rule.get("for", "0s"))
        assert re.search(r"[<>]", rule["expr"]), "it compares"
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = re.match(r"\(?\s*sum by \(([^)]*)\)", rule["expr"])
        assert kept is not None
        assert labels <= {label.strip() for label in kept[1].split(",")}, rule["alert"]
