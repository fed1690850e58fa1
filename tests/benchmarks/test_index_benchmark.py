"""The index benchmark on a tiny workload: its figures are real, and its checks can fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.index import suite
from benchmarks.index.forks import replay
from benchmarks.index.sides import OURS, PAGE_SIZE, build_side
from benchmarks.index.suite import Settings, measure
from benchmarks.index.timing import prompts_scenario
from benchmarks.index.workloads import Sizes, Trace, load_trace, make_prompts, synthetic_trace
from benchmarks.report import Check, Report
from tessera_sglang.cache import TesseraCache

SIZES = Sizes(
    long_count=2,
    long_tokens=4_096,
    shared_count=4,
    prefix_tokens=512,
    own_tokens=128,
    span_count=2,
    span_tokens=1_024,
    widest_offset=256,
)
TINY = Settings(
    sizes=SIZES,
    rounds=1,
    repeats=2,
    memory_tokens=400_000,
    growth_levels=(100_000, 110_000),
    growth_repetitions=2,
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(sessions=2, turns=6)


@pytest.fixture(scope="module")
def report(trace: Trace) -> dict[str, Any]:
    return json.loads(json.dumps(measure(TINY, trace).as_dict()))


def test_the_object_has_what_every_benchmark_prints(report: dict[str, Any]) -> None:
    assert report["benchmark"] == "index"
    assert {"cpu", "cores", "memory_gib", "gpu"} <= set(report["hardware"])
    assert {"python", "sglang", "torch", "tessera-sglang"} <= set(report["versions"])
    assert report["commit"]
    assert all(set(check) == {"name", "value", "target", "holds"} for check in report["checks"])
    assert report["holds"] == all(check["holds"] for check in report["checks"])
    assert report["settings"]["sizes"]["long_tokens"] == SIZES.long_tokens
    assert report["figures"]["trace_source"] == "synthetic"


def test_every_workload_is_compared_with_the_python_core(report: dict[str, Any]) -> None:
    assert report["figures"]["stock_cores"]["python"] == "compared"
    names = {check["name"] for check in report["checks"]}
    for workload in ("a", "b", "e"):
        for operation in ("match", "match+slots", "insert"):
            assert f"{workload}.{operation}: throughput, ours / python" in names
            assert f"{workload}.{operation}: p99 latency, python / ours" in names
    match = report["figures"]["a.match"]["sides"]
    for side in (OURS, "python"):
        assert match[side]["calls"] == SIZES.long_count * TINY.repeats
        assert match[side]["tokens_per_call"] == SIZES.long_tokens
        assert 0 < match[side]["p50_us"] <= match[side]["p99_us"]
    levels = report["figures"]["growth"]["levels"]["python"]
    assert [level["tokens"] for level in levels] == [98_304, 106_496]


def test_sides_hit_alike_and_spans_are_found(report: dict[str, Any]) -> None:
    hits = [check for check in report["checks"] if "hit length" in check["name"]]
    assert len(hits) >= 7
    assert all(check["holds"] for check in hits)
    assert report["figures"]["spans"]["found_as_spans"] == SIZES.span_count * SIZES.span_tokens
    assert report["figures"]["spans"]["found_by_prompt"]["python"] == 0


def test_a_cached_token_costs_about_its_own_bytes(report: dict[str, Any]) -> None:
    """Eight for the token itself; so few tokens are within the noise of the heap."""
    for shape in report["figures"]["memory"]["bytes_per_token"].values():
        assert all(5 < found < 60 for found in shape.values()), shape


def test_hits_are_what_the_workload_says() -> None:
    side = build_side(OURS, capacity_tokens=1 << 17, row_tokens=1 << 13, clock=time.process_time_ns)
    outcome = prompts_scenario(make_prompts(SIZES), repeats=1)(side)
    whole = SIZES.prefix_tokens + SIZES.own_tokens
    assert outcome.hits["a.match"] == [SIZES.long_tokens - PAGE_SIZE] * 2
    assert outcome.hits["b.arrival"] == [0] + [SIZES.prefix_tokens] * 3
    assert outcome.hits["b.match_again"] == [whole] * 4
    assert side.cache.protected_size() == 0, "a request was not released"
    held = SIZES.long_count * SIZES.long_tokens + SIZES.prefix_tokens + 4 * SIZES.own_tokens
    held += SIZES.root_tokens + SIZES.span_count * SIZES.span_tokens
    assert side.cache.total_size() == held
    assert side.allocator.available_size() == (1 << 17) - held, "slots were lost"


def test_a_cache_that_finds_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TesseraCache.match_prefix
    empty = Report("index")

    def find_nothing(self: TesseraCache, params: Any) -> Any:
        root = self.root_node
        return found(self, params)._replace(device_prefix_len=0, last_device_node=root)

    monkeypatch.setattr(TesseraCache, "match_prefix", find_nothing)
    prompts = make_prompts(SIZES)
    sides = [suite._side(name, 1 << 17, 1 << 13) for name in (OURS, "python")]
    suite._add_prompts(empty, sides, prompts, TINY)
    wrong = {check.name for check in empty.checks if not check.holds}
    assert "a.match: look-ups with another hit length than python" in wrong
    assert "c.spans: tokens found at random offsets" in wrong


def test_forks_are_counted_and_checked(trace: Trace) -> None:
    whole, forked = replay(trace, None), replay(trace, 8)
    assert (whole.forks, whole.fork_rows) == (0, 0)
    assert forked.fork_rows >= 8 * forked.forks > 0
    assert forked.wrong_rows == 0
    assert forked.page_tokens == whole.page_tokens
    assert forked.recomputed_share < whole.recomputed_share < 1


def test_checks_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("index", checks=[Check.at_least("x", 1.0, 1.0), Check.at_most("y", 1, 2)])
    assert report.emit(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
    for failing in (
        Check.at_least("x", 0.99, 1.0),
        Check.at_least("x", None, 1.0),
        Check.at_most("x", float("nan"), 1.0),
        Check.below("x", 1.0, 1.0),
        Check.equals("x", 1, 0),
    ):
        assert not failing.holds
        assert Report("index", checks=[failing]).emit(as_json=False) == 1
        assert "NO" in capsys.readouterr().out
    assert Report("index").emit(as_json=True) == 1, "no check is no claim"


def test_traces_are_read_in_the_order_of_their_time(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 2, "input": "one two, three", "output": "two"},
        {"timestamp": 1, "input": "one", "output": ""},
        {"timestamp": 3, "input": "", "output": "nothing was asked"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    trace = load_trace(tmp_path)
    assert [list(r.prompt) for r in trace.requests] == [[0], [0, 1, 2, 3]]
    assert (trace.skipped, trace.source) == (1, str(tmp_path))
    assert load_trace(tmp_path / "none").source == "synthetic"
