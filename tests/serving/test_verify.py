"""``tessera-sglang verify`` against a real server, as a user runs it, and against the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import write_unlearned
from oracle import OracleRequest, load_model
from prompts import PAGE
from scoring import score
from server import Server
from transformers import AutoTokenizer

from tessera_sglang.config import AUTO_ROOT_TEXT
from tessera_sglang.verify.measure import TOP

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-mla"
TOKENS = 10
LINK = 1
KL_TOLERANCE = 1e-3
DOCUMENTS = (
    ("The mill stands on the left bank. It has two wheels, and the lower is older. " * 4).strip(),
    ("Bread is sold at six. The oven is lit at two, by whoever may sleep until ten. " * 4).strip(),
)
QUESTIONS = ("Which wheel is older?", "When is the oven lit?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing is known to it, so that every token depends on the whole context."""
    return write_unlearned(tmp_path_factory.mktemp("unlearned") / "tiny-mla", MODEL)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    config = {"link_pages": LINK, "span_root": "auto"}
    with Server(model, pool_tokens=65536, config=config, tokenizer=True) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, token ids whose last span ends the prompt in whole pages, and messages."""
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    parts = [f"Read.\n\n{DOCUMENTS[0]}", f"\n\n{DOCUMENTS[1]}", f"\n\n{QUESTIONS[0]}\n"]
    text = "".join(parts)
    spans = [[7, len(parts[0])], [len(parts[0]) + 2, len(parts[0]) + len(parts[1])]]
    ids = list(f"Answer: {QUESTIONS[1]}\n".encode())
    body = list(DOCUMENTS[1].encode())[: 4 * PAGE]
    shared = [
        {"type": "text", "text": document, "cache_control": {"type": "ephemeral"}}
        for document in DOCUMENTS
    ]
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": [*shared, {"type": "text", "text": QUESTIONS[1]}]},
    ]
    entries: list[dict[str, Any]] = [
        {"text": text, "text_spans": spans},
        {"input_ids": ids + body, "spans": [[len(ids), len(ids) + len(body)]]},
        {"messages": messages},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tessera_sglang.cli", "verify", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def measured(server: Server, prompts: Path) -> dict[str, Any]:
    """One run over the whole grid, with a threshold that everything passes."""
    server.generate([65] * 200, steps=1)
    done = verify(
        *("--url", server.url, "--prompts", str(prompts), "--tokens", str(TOKENS)),
        *("--root", "A constant beginning. ", "--threshold", "1000", "--json"),
    )
    assert done.stdout, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["verdict"]["server_passes"] else 1)
    again = server.generate([65] * 200, steps=1)
    assert again.cached >= 3 * PAGE, "the server's cache is left alone"
    return report


def of(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in report["settings"] if s["name"] == name)
    return found


# --- a whole run ---------------------------------------------------------------------------------


def test_the_grid_is_complete(measured: dict[str, Any]) -> None:
    names = [f"{root}/{pages}" for root in ("none", "auto", "own") for pages in (0, 1, 2)]
    assert [setting["name"] for setting in measured["settings"]] == ["server", *names]
    for setting in measured["settings"]:
        assert len(setting["prompts"]) == 3
        for one in setting["prompts"]:
            assert len(one["kl_nats"]) == one["reference_tokens"] == TOKENS
            assert 0 <= one["agreed_tokens"] <= TOKENS
            assert all(kl >= 0 for kl in one["kl_nats"])
    assert measured["full_attention"]["mean_entropy_nats"] > 0
    assert max(setting["summary"]["mean_kl_nats"] for setting in measured["settings"]) > 0.01


def test_tokens_follow_from_the_layout(measured: dict[str, Any]) -> None:
    first, second = ((len(text) // PAGE) for text in DOCUMENTS)
    for root in ("none", "auto", "own"):
        for pages in (0, 1, 2):
            found = of(measured, f"{root}/{pages}")["prompts"]
            shared = [first + second - 2 * pages, 3 - pages, first + second - 2 * pages]
            assert [one["cold_computed_tokens"] for one in found] == [
                one["prompt_tokens"] for one in found
            ]
            saved = [one["prompt_tokens"] - one["warm_computed_tokens"] for one in found]
            assert saved == [PAGE * shared_pages for shared_pages in shared]
    full = measured["full_attention"]["summary"]
    assert full["warm_computed_tokens"] == full["prompt_tokens"], "no prefix is shared"


def test_the_servers_settings_are_those_of_the_same_name(measured: dict[str, Any]) -> None:
    own, named = of(measured, "server")["prompts"], of(measured, f"auto/{LINK}")["prompts"]
    for one, other in zip(own, named, strict=True):
        assert one["kl_nats"] == pytest.approx(other["kl_nats"], abs=KL_TOLERANCE)
        assert one["warm_computed_tokens"] == other["warm_computed_tokens"]


def test_full_attention_agrees_with_itself(measured: dict[str, Any]) -> None:
    full = measured["full_attention"]["summary"]
    assert full["worst"]["kl_nats"] < KL_TOLERANCE
    assert full["agreement"] == full["same_choice"] == 1
    assert full["nll_nats"] == pytest.approx(full["full_nll_nats"], abs=KL_TOLERANCE)


def test_random_weights_are_warned_of(measured: dict[str, Any]) -> None:
    assert measured["full_attention"]["text_nll_nats"] > 5, "nothing was learned"
    assert any("mean nothing" in text for text in measured["warnings"])


@pytest.mark.parametrize(("name", "link_pages", "with_root"), [("none/0", 0, 0), ("auto/1", 1, 1)])
def test_divergences_equal_the_oracles(
    measured: dict[str, Any], model: Path, prompts: Path, name: str, link_pages: int, with_root: int
) -> None:
    oracle, tokenizer = load_model(model), AutoTokenizer.from_pretrained(model)
    text = AUTO_ROOT_TEXT * PAGE
    root = tokenizer.encode(text)[:PAGE] if with_root else []
    for number, entry in enumerate(map(json.loads, prompts.read_text().splitlines()[:2])):
        prompt = entry.get("input_ids") or tokenizer.encode(entry["text"])
        spans = [tuple(span) for span in entry.get("spans") or entry["text_spans"]]
        if spans[-1][1] == len(prompt):  # the prompt's last token is nobody's page
            spans[-1] = (spans[-1][0], len(prompt) - 1)
        whole = prompt + measured["full_attention"]["continuations"][number]
        full, spanned = (
            score(
                oracle,
                OracleRequest(whole, declared),
                page_size=PAGE,
                link_pages=link_pages,
                root=root,
                start=len(prompt),
            )
            for declared in ([], spans)
        )
        found = of(measured, name)["prompts"][number]["kl_nats"]
        assert found == pytest.approx(_divergences(full, spanned), abs=KL_TOLERANCE)


def _divergences(full: torch.Tensor, spans: torch.Tensor) -> list[float]:
    """KL(full || spans) of every row over full's best tokens and all others as one."""
    best = full.topk(TOP).indices
    p, q = (rows.double().exp() for rows in (full, spans))
    rest = torch.ones_like(p).scatter(1, best, 0.0)
    p, q = (torch.cat([x.gather(1, best), (x * rest).sum(1, keepdim=True)], 1) for x in (p, q))
    return torch.where(p > 0, p * (p / q).log(), 0).sum(1).tolist()


# --- for people ----------------------------------------------------------------------------------


def test_a_table_a_verdict_and_a_line_to_copy(server: Server, prompts: Path) -> None:
    arguments = ["--url", server.url, "--prompts", str(prompts), "--tokens", "2"]
    arguments += ["--roots", "auto", "--link-pages", "0,1"]
    strict = verify(*arguments, "--threshold", "0")
    assert strict.returncode == 1
    assert "No setting passes." in strict.stdout
    assert "full attention" in strict.stdout
    assert "Warning: this looks like random weights" in strict.stdout
    assert "\r" not in strict.stderr, "no progress bar in a pipe"


def test_what_goes_wrong_is_said_and_is_no_verdict(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_ids": [1, 2, 3], "spans": [[0, 9]]}')
    done = verify("--url", server.url, "--prompts", str(path))
    assert done.returncode == 2
    assert f"{path}:1: spans[0] = [0, 9] ends past the prompt" in done.stderr
    ids = [65] * 33000
    path.write_text(json.dumps({"input_ids": ids, "spans": [[0, 200]]}))
    done = verify("--url", server.url, "--prompts", str(path))
    assert done.returncode == 1
    assert f"{path}:1, full attention: HTTP 400: " in done.stderr
    assert "context length" in done.stderr
    assert not done.stdout


def test_it_starts_and_ends_a_server_of_its_own(prompts: Path) -> None:
    done = verify(
        *("--model-path", str(MODEL), "--prompts", str(prompts), "--tokens", "2"),
        *("--roots", "none", "--link-pages", "0", "--threshold", "1000", "--json"),
        *("--", "--max-total-tokens", "32768", "--dtype", "float32"),
    )
    report = json.loads(done.stdout)
    assert report["server"]["link_pages"] == 1
    assert [setting["name"] for setting in report["settings"]] == ["server", "none/0"]
    assert done.returncode == (0 if report["verdict"]["server_passes"] else 1)
