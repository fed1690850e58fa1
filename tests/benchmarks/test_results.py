"""Saved results, and the tables and plots that are made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import report as reports
from benchmarks import saved
from benchmarks.plots.catalogue import PLOTS
from benchmarks.readme.rewrite import rewritten
from benchmarks.readme.tables import TABLES, Source
from benchmarks.report import ROOT, Check, Report, argument_parser

SVG = "{http://www.w3.org/2000/svg}"


def said(_: str) -> None:
    """Nobody listens."""


def a_report(name: str = "one") -> Report:
    figures: dict[str, object] = {
        "numpy": np.float32(0.5),
        "array": np.arange(3),
        "nested": ({"path": Path("x")}, float("nan")),
        1: 1 / 3,  # type: ignore[dict-item] # a key that JSON can not have
    }
    return Report(name, checks=[Check.at_least("a bar", 1.0, 2.0)], figures=figures)


def test_figures_are_plain_json_whatever_they_were(tmp_path: Path) -> None:
    path = saved.write(a_report().as_dict(), tmp_path)
    assert path.name == "one.json"
    found = saved.read("one", tmp_path)
    assert found is not None
    assert found.figures == {
        "numpy": 0.5,
        "array": [0, 1, 2],
        "nested": [{"path": "x"}, None],
        "1": 0.333333,
    }
    assert [check["name"] for check in found.failed] == ["a bar"]
    assert saved.read("another", tmp_path) is None
    assert [one.name for one in tmp_path.iterdir()] == ["one.json"], "no scratch file is left"


def test_saving_writes_what_json_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    status = a_report().emit(as_json=True, save=True)
    assert status == 1, "its check does not hold, saved or not"
    written = json.loads((tmp_path / "one.json").read_text())
    assert saved.rounded(json.loads(capsys.readouterr().out)) == written


def test_quick_runs_are_not_saved(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        argument_parser("").parse_args(["--quick", "--save"])
    assert refusal.value.code == 2
    assert "not saved" in capsys.readouterr().err


def test_saving_a_result_does_not_make_the_next_one_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    (tmp_path / "benchmarks/results").mkdir(parents=True)
    for name in ("README.md", "benchmarks/results/one.json", "code.py"):
        (tmp_path / name).write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    monkeypatch.setattr(reports, "ROOT", tmp_path)
    clean = reports.commit()
    assert len(clean) == 40
    (tmp_path / "README.md").write_text("after")
    (tmp_path / "benchmarks/results/one.json").write_text("after")
    assert reports.commit() == clean
    (tmp_path / "code.py").write_text("after")
    assert reports.commit() == f"{clean}-dirty"


# --- README --------------------------------------------------------------------------------------

BLOCK = "before\n<!-- results: t -->\n{}<!-- end -->\nafter\n"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    saved.write(a_report().as_dict(), tmp_path)
    return tmp_path


def tables(benchmark: str = "one") -> dict[str, Source]:
    return {"t": Source(benchmark, lambda result: f"numpy is {result.figures['numpy']}")}


def test_a_block_is_made_from_its_result_and_nothing_else_is_touched(results: Path) -> None:
    text = rewritten(BLOCK.format("typed by hand\n"), results, said, tables())
    assert text.startswith(
        "before\n<!-- results: t -->\nnumpy is 0.5\n\n`python -m benchmarks.one`"
    )
    assert "1 of its 1 checks did not hold: *a bar*." in text
    assert text.endswith("\n<!-- end -->\nafter\n")
    assert "typed" not in text
    assert rewritten(text, results, said, tables()) == text


def test_without_a_result_a_block_stays(results: Path) -> None:
    heard: list[str] = []
    text = BLOCK.format("from another day\n")
    assert rewritten(text, results, heard.append, tables("absent")) == text
    assert "absent.json" in heard[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<!-- results: nobody -->\n<!-- end -->", "no table 'nobody'"),
        ("<!-- results: t -->\n", "not closed"),
    ],
)
def test_a_broken_block_is_refused(results: Path, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        rewritten(text, results, said, tables())


def test_the_check_fails_where_readme_says_something_else(results: Path) -> None:
    saved.write({**a_report("plain_traffic").as_dict(), "figures": PLAIN_TRAFFIC}, results)
    readme = results / "README.md"
    readme.write_text("<!-- results: plain_traffic -->\n<!-- end -->\n")
    command = [sys.executable, "-m", "benchmarks.readme", "--readme", str(readme)]
    command += ["--results", str(results)]

    def status(*more: str) -> int:
        return subprocess.run([*command, *more], cwd=ROOT, capture_output=True).returncode

    assert status("--check") == 1
    assert status() == 0
    assert "| random | 100 | 110 | 1.10 |" in readme.read_text()
    assert status("--check") == 0
    readme.write_text(readme.read_text().replace("110", "120"))
    assert status("--check") == 1


PLAIN_TRAFFIC = {"tokens_per_s": {"random": {"content": [110, 90, 120], "radix": [100, 99, 101]}}}


def test_readme_is_what_the_saved_results_say() -> None:
    before = (ROOT / "README.md").read_text("utf-8")
    assert rewritten(before, saved.RESULTS, said) == before, "run python -m benchmarks.readme"


def test_every_table_stands_in_readme() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert [name for name in TABLES if f"<!-- results: {name} -->" not in text] == []


# --- plots ---------------------------------------------------------------------------------------

plotted = pytest.importorskip("benchmarks.plots.style", exc_type=ImportError)


def a_figure(pyplot: Any) -> Any:
    figure, axes = pyplot.subplots(figsize=(3, 2))
    axes.plot([0, 1], [0, 1], label="a < b")
    axes.legend()
    return figure


def test_a_plot_repeats_and_follows_the_readers_colours(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for number in range(2):
        with plotted.plotting() as pyplot:
            path = plotted.written(a_figure(pyplot), tmp_path / f"{number}.svg", "A < B")
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    root = ElementTree.fromstring(drawn[0])
    assert root.findtext(f"{SVG}title") == "A < B"
    text = drawn[0].decode()
    assert "prefers-color-scheme: dark" in text
    assert "<dc:date>" not in text
    sheet = text.index("</style>")
    for colour in (plotted.INK, plotted.SOFT, plotted.PAGE):
        assert colour in text[:sheet]
        assert colour not in text[sheet:], "every use is a class, which a dark page can change"


def test_plots_have_names_of_their_own() -> None:
    assert len({plot.title for plot in PLOTS.values()}) == len(PLOTS)
