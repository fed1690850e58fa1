"""Tables and plots read what the benchmarks write: figures made by their own code, through JSON."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from benchmarks import __main__ as everything
from benchmarks import saved
from benchmarks.multi_agent.results import Cell
from benchmarks.multi_agent.results import report as multi_agent_report
from benchmarks.plots.catalogue import PLOTS
from benchmarks.plots.style import plotting, written
from benchmarks.quality.rows import Row
from benchmarks.rag.results import Curve, Steady
from benchmarks.rag.results import report as rag_report
from benchmarks.readme.markdown import TIMES
from benchmarks.readme.tables import TABLES
from benchmarks.report import Report
from benchmarks.saved import Saved
from benchmarks.serving.bound import Work
from benchmarks.serving.compare import Comparison
from benchmarks.serving.run import Run
from benchmarks.traces import sessions, sglang_sets
from benchmarks.workloads.multi_agent import Shape
from benchmarks.workloads.rag import Shape as Corpus
from tessera_sglang.bench.metrics import Metrics
from tessera_sglang.demo.client import Answer

RUN = Run(
    requests=4,
    prompt_tokens=1000,
    cached_tokens=100,
    computed_tokens=900,
    prefix_hit_tokens=100,
    span_hit_tokens=0,
    span_prefills=0,
    evicted_pages=None,
    held_tokens=800,
    wall_s=8.0,
    ttft_p50_s=4.0,
    ttft_p99_s=5.0,
    itl_p50_s=0.25,
    throughput_tokens_per_s=50.0,
)
FASTER = replace(
    RUN, computed_tokens=90, wall_s=1.0, throughput_tokens_per_s=400.0, span_hit_tokens=800
)


def read_back(report: Report, folder: Path) -> Saved:
    saved.write(report.as_dict(), folder)
    found = saved.read(report.benchmark, folder)
    assert found is not None
    return found


def drawn(name: str, result: Saved, folder: Path) -> str:
    with plotting() as pyplot:
        figure = PLOTS[name].draw(pyplot, result)
        return written(figure, folder / f"{name}.svg", PLOTS[name].title).read_text("utf-8")


def row_of(text: str, beginning: str) -> list[str]:
    """Cells of the one row that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {beginning} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_agents_over_one_document(tmp_path: Path) -> None:
    found = Comparison((RUN, RUN), (FASTER, FASTER))
    cells = [
        Cell(
            Shape(agents=agents, document_tokens=tokens),
            found,
            Work(900 * agents, 900 * agents**2, agents),
            Work(90 + agents, 90 + agents**2, agents),
        )
        for agents in (1, 4, 16)
        for tokens in (1024, 4096)
    ]
    result = read_back(multi_agent_report(cells[0], cells[1:], quick=True), tmp_path)
    claim = TABLES["multi_agent"].table(result)
    assert row_of(claim, "tokens computed") == ["900", "90", f"10.0{TIMES}"]
    assert row_of(claim, "wall time") == ["8.00 s", "1.00 s", f"8.00{TIMES}"]
    served = row_of(claim, "prompt tokens served per second")
    assert served == ["50", "400", f"8.00{TIMES}"], "more is better"
    assert row_of(claim, "span hits") == ["0.0 %", "80.0 %", ""]
    surface = row_of(TABLES["surface"].table(result), "document of 1,024 tokens")
    assert [cell.startswith(f"**8.00{TIMES}** (") for cell in surface] == [True] * 3
    assert "document of 4,096 tokens" in drawn("multi_agent", result, tmp_path)


def test_retrieval(tmp_path: Path) -> None:
    def answers(count: int, cached: int) -> tuple[Answer, ...]:
        return tuple(Answer(100, cached, 0.1, "") for _ in range(count))

    steady = Steady(answers(50, 0)[:10] + answers(40, 50), (3, 7, 7, 7, 7), 9, 1000)
    curve = Curve(Corpus(), 1000, 4000, answers(100, 30), answers(25, 10))
    result = read_back(rag_report(steady, curve), tmp_path)
    text = TABLES["rag"].table(result)
    assert row_of(text, "corpus that fits, Tessera") == ["0.0 %", *["50.0 %"] * 4]
    assert "7 pages of documents were stored of the 9" in text
    assert drawn("rag", result, tmp_path)


def test_recorded_sessions_and_data_sets_of_sglang(tmp_path: Path) -> None:
    def side(cached: int) -> tuple[sessions.Side, ...]:
        return (sessions.Side(cached, 1000 - cached, 1.0, 0.1),)

    outcomes = [
        sessions.Outcome("aaaa", 5, 3, 1000, 0, {"stock": side(500), "tessera": side(500)}),
        sessions.Outcome("bbbb", 5, 3, 1000, 200, {"stock": side(500), "tessera": side(500)}),
    ]
    metrics = Metrics(100.0, 10.0, 0.1, 0.2, 0.01, 0.01, 0.5, 8, 800, 80, 1.0)
    report = Report("traces")
    sessions.add(report, outcomes)
    found = {sglang_sets.AGENTIC: {"stock": (metrics,), "tessera": (metrics,)}}
    sglang_sets.add(report, found)
    assert [check.holds for check in report.checks] == [True, False], "what shifts has to gain"
    result = read_back(report, tmp_path)
    text = TABLES["traces"].table(result)
    counts = ["5", "1,000", "20.0 %", "50.0 %", "50.0 %", "500", "500"]
    assert row_of(text, "`bbbb`") == [*counts, "1.00 s", "1.00 s"]
    assert row_of(text, "**all**")[:3] == ["10", "2,000", "10.0 %"]
    sets = row_of(TABLES["sglang_sets"].table(result), "`agentic-trace`")
    assert sets == ["50.0 %", "50.0 %", "1.00 s", "1.00 s", "1.00"]
    assert drawn("traces", result, tmp_path)


def test_quality_of_both_models(tmp_path: Path) -> None:
    def row(setting: str, **fields: Any) -> Row:
        values: dict[str, Any] = {
            **dict.fromkeys(Row.__dataclass_fields__, 0.5),
            **{"model": "tiny-mla", "setting": setting, "by": "all", "right": "recall"},
            **{"root": None, "link_pages": None, "simulated": False, "computed_warm": None},
        }
        return Row(**(values | fields))

    rows = [
        row("full attention", kl=0.0, kl_spread=0.0),
        row("auto/1", root="auto", link_pages=1),
        row("reused", simulated=True, kl_spread=9.0),
        row("auto/1", by="kind"),
        row("full attention", model="SmolLM2-135M-Instruct", right="quote accuracy"),
    ]
    notes = ["tiny-mla: what it costs."]
    result = read_back(Report("quality", figures={"rows": rows}, notes=notes), tmp_path)
    text = TABLES["quality, example model"].table(result)
    assert row_of(text, "auto/1")[0] == "0.500 ± 0.500", "and not by kind"
    assert text.endswith("tiny-mla: what it costs.")
    assert "quote accuracy" in TABLES["quality, SmolLM2"].table(result)
    svg = drawn("quality", result, tmp_path)
    assert "reused (simulated)" in svg


@pytest.mark.parametrize("name", everything.COMMANDS)
def test_every_command_of_all_benchmarks_is_there(name: str) -> None:
    assert importlib.util.find_spec(f"benchmarks.{name}") is not None


def test_every_table_and_plot_is_of_a_benchmark_that_is_run() -> None:
    sources = {source.benchmark for source in TABLES.values()}
    assert sources == set(everything.COMMANDS)
    assert {plot.benchmark for plot in PLOTS.values()} <= sources
    assert {source.plot for source in TABLES.values() if source.plot} == set(PLOTS)
