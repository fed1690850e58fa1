"""The attention benchmark at its quick sizes: it measures both sides of what it says, and can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.attention import planning, sdpa, spans
from benchmarks.attention.results import Lines
from benchmarks.attention.sdpa import Case
from benchmarks.attention.spans import Reading
from benchmarks.attention.suite import QUICK, Settings
from benchmarks.attention.timing import Times, Turns
from benchmarks.attention.world import GAP, LEAD, PAGE, Request, Use, build, llama, mla
from benchmarks.report import ROOT, Report
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel

ONCE = Turns(1)
SMALL = mla(2, torch.float32)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.attention", "--quick", "--json", "--threads", "1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    parsed: dict[str, Any] = json.loads(found.stdout)
    assert found.returncode == (0 if parsed["holds"] else 1)
    return parsed


def test_the_object_has_what_every_benchmark_prints(report: dict[str, Any]) -> None:
    assert report["benchmark"] == "attention"
    assert {"cpu", "cores", "memory_gib", "gpu"} <= set(report["hardware"])
    assert {"python", "torch"} <= set(report["versions"])
    assert report["commit"]
    assert report["settings"]["clock"] == "processor"
    for check in report["checks"]:
        assert set(check) == {"name", "value", "target", "holds"}
        assert check["value"] is not None, check
    assert report["holds"] == all(check["holds"] for check in report["checks"])


def test_every_promise_is_checked(report: dict[str, Any]) -> None:
    """For GQA and MLA, float32 and bfloat16; with the same bounds as at full size."""
    assert QUICK.bounds == Settings().bounds
    names = [check["name"] for check in report["checks"]]
    targets = {check["name"]: check["target"] for check in report["checks"]}
    for dtype in ("float32", "bfloat16"):
        for model in ("GQA 32/8 heads", "MLA 16 heads"):
            for phase in ("prefill", "decode"):
                (name,) = (
                    n
                    for n in names
                    if n.startswith(f"a. {phase}")
                    and f"{model}, {dtype}: throughput, ours / fastest SDPA" in n
                )
                assert targets[name] == ">= 0.9"
        for phase in ("prefill", "decode"):
            assert any(
                n.startswith(f"b. {phase}") and f"MLA 16 heads, {dtype}: time, spans / flat" in n
                for n in names
            )
        (name,) = (n for n in names if n.startswith("c.") and f"{dtype}: throughput" in n)
        assert targets[name] == ">= 2"
    assert all(targets[n] == "<= 1.15" for n in names if n.startswith("b."))
    assert [targets[n] for n in names if n.startswith("d.")] == ["< 0.05"] * 2


def test_answers_agree(report: dict[str, Any]) -> None:
    same = [check for check in report["checks"] if "difference of the answers" in check["name"]]
    assert len(same) == 10
    assert all(check["holds"] for check in same)


def test_checks_are_against_the_fastest_alternative(report: dict[str, Any]) -> None:
    values = {check["name"]: check["value"] for check in report["checks"]}
    for name, figures in report["figures"].items():
        if not name.startswith("a."):
            continue
        medians = {
            way: times["median_s"]
            for way, times in figures["ways"].items()
            if way not in (sdpa.OURS, sdpa.HEADS_AS_ROWS)
        }
        checked = figures["checked_against"]
        assert medians[checked] == min(medians.values())
        ratio = figures["ours_by_way"][checked]
        assert values[f"{name}: throughput, ours / fastest SDPA"] == pytest.approx(ratio, rel=1e-3)


def test_a_wrong_kernel_and_missed_bounds_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TorchKernel.run

    def off_by_a_little(self: TorchKernel, *inputs: Any, **more: Any) -> tuple[Tensor, Tensor]:
        out, lse = run(self, *inputs, **more)
        return out * 1.01, lse

    found, lines = Report("attention"), Lines("", "")
    monkeypatch.setattr(TorchKernel, "run", off_by_a_little)
    case = Case("prefill", (Request(80, 80),))
    sdpa.measure(found, lines, case, SMALL, ONCE, bound=float("inf"))
    reading = Reading("decode", 2, new=1, cached=80, spans=2, span_tokens=PAGE)
    spans.measure_reading(found, lines, reading, SMALL, ONCE, bound=0.0)
    planning.measure(found, planning.Sizes(2, 2, PAGE, 70), ONCE, bound=0.0)
    assert len(found.checks) == 5
    assert not any(check.holds for check in found.checks)
    assert found.emit(as_json=True) == 1


def test_nan_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = sdpa.sdpa_ways

    def broken(*inputs: Any, **more: Any) -> dict[str, Any]:
        return {**ways(*inputs, **more), "broken": lambda: torch.full((80, 2, 512), torch.nan)}

    monkeypatch.setattr(sdpa, "sdpa_ways", broken)
    found, case = Report("attention"), Case("prefill", (Request(80, 80),))
    sdpa.measure(found, Lines("", ""), case, SMALL, ONCE, bound=0.0)
    assert not found.checks[0].holds


def test_worlds_hold_what_they_say() -> None:
    """Copies have the same content in pages of their own; the rest of the pool is NaN."""
    requests = [
        Request(130, 1, (Use(128, 0), Use(PAGE, 1))),
        Request(90, 2, (Use(128, 0, copy=1),)),
    ]
    world = build(SMALL, requests)
    assert world.rows.shape == (2, 130 + 128 + PAGE)
    first, copy = world.rows[0, :128].long(), world.rows[1, :128].long()
    assert not set(first.tolist()) & set(copy.tolist())
    assert torch.equal(world.keys[first], world.keys[copy])
    used = torch.cat([row[: r.keys] for row, r in zip(world.rows.long(), requests, strict=True)])
    assert len(set(used.tolist())) == sum(r.keys for r in requests), "slots are used twice"
    rest = torch.ones(len(world.keys), dtype=torch.bool)
    rest[used] = False
    assert bool(world.keys[rest].isnan().all())
    assert bool(world.keys[used].isfinite().all())
    layout = world.batch.layouts[0]
    assert layout is not None
    assert [run.prompt_start for run in layout.runs] == [LEAD, LEAD + 128 + GAP]


def test_shared_and_private_plans_differ_in_who_reads_with_whom() -> None:
    world = build(llama(torch.float32), [Request(90, 1, (Use(128, 0),))] * 3)
    (together,) = world.plan().spans
    (apart,) = world.plan(world.private).spans
    assert (together.parts, apart.parts) == (1, 3)
    assert together.rows == apart.rows == 3


def test_ways_take_turns_and_the_hopeless_are_given_up() -> None:
    clock, log = iter(range(10**6)), []
    cost = {"a": 1, "slow": 50, "kept": 60}

    def way(name: str) -> Any:
        def call() -> None:
            log.append(name)
            for _ in range(cost[name]):
                next(clock)

        return call

    turns = Turns(4, clock=lambda: float(next(clock)))
    times = turns.time({name: way(name) for name in cost}, keep=frozenset({"kept"}))
    assert log[:3] == ["a", "slow", "kept"]
    assert log[3:] == ["a", "kept", "kept", "a"] * 2
    assert times.given_up == {"slow"}, "by the fastest alternative, whatever else there is"
    assert times.ratio("kept", "a") == pytest.approx(61 / 2)
    assert len(times.rounds["slow"]) == 1


def test_a_ratio_compares_ways_inside_a_round() -> None:
    times = Times({"a": (1.0, 10.0, 3.0), "b": (2.0, 20.0, 6.0)}, frozenset())
    assert times.ratio("b", "a") == 2.0


def test_full_size_is_what_the_project_states() -> None:
    full = Settings()
    assert (full.prefill_tokens, full.decode_requests, full.decode_keys) == (4096, 16, 8192)
    assert (full.readers, full.shared_tokens) == (16, 8192)
    assert (full.planned.requests, full.planned.spans) == (64, 8)
    assert all(reading.spans == 4 for reading in full.reading)
    assert replace(full, threads=1).turns(short=True).rounds == full.short_rounds
