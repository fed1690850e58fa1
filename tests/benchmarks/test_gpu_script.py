"""The GPU script where there is no GPU: it says so, and its parity tests catch planted faults."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.attention.world import PAGE, Request, Use, build, mla
from benchmarks.gpu import kernels, speed, suite
from benchmarks.gpu.answers import Answers, check_replay, check_shared
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.cases import Batch, Model, Timed, readers, timed, with_spans
from benchmarks.gpu.oracle import expected, flattened
from benchmarks.gpu.parity import BOUNDS, EDGES, check_launch, deviation
from benchmarks.gpu.precision import Needles
from benchmarks.gpu.timing import Amount
from benchmarks.report import ROOT, Report
from tessera_sglang.attention.kernels.base import AttentionShape, Phase, Work
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel
from tessera_sglang.attention.shelf import Offer, Shelf

NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
MODEL = Model("small", mla(2, torch.float32))
Results = tuple[Tensor, Tensor]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of layers, and batches that are quickly checked."""
    some = (
        Batch("decode", Phase.DECODE, readers(2 * PAGE, PAGE, new=1)),
        Batch("prefill", Phase.PREFILL, readers(2 * PAGE, PAGE, new=60)),
    )
    monkeypatch.setattr("benchmarks.gpu.answers.models", lambda device: (MODEL,))
    monkeypatch.setattr("benchmarks.gpu.answers.batches", lambda device: some)
    monkeypatch.setattr("benchmarks.gpu.precision.needle.depths", lambda keys: [keys // 2])


def test_without_a_gpu_it_passes_and_says_that_it_was_not_measured() -> None:
    """As on a machine that has neither SGLang nor the plugin's other dependencies."""
    hidden = "import sys; sys.modules.update(dict.fromkeys(['sglang', 'msgspec', 'xxhash']));"
    start = f"{hidden} from benchmarks.gpu.suite import main; sys.exit(main(['--json']))"
    begin = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", start], cwd=ROOT, env=NO_GPU, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert "GPU: not measured" in found.stderr
    report = json.loads(found.stdout)
    assert report["holds"] is True
    assert report["figures"]["gpu_measured"] is False
    assert any("GPU: not measured" in note for note in report["notes"])
    assert report["figures"]["kernels"] == {"torch": "loaded"}
    assert len(report["checks"]) > 50
    assert {"kernel", "layers", "case", "out", "lse", "log base"} <= set(
        report["figures"]["answers"][0]
    )
    assert "speed" not in report["figures"]
    assert report["figures"]["seconds"] < time.monotonic() - begin


# --- what runs on a GPU, rehearsed -----------------------------------------------------------------


class Paged(TorchKernel):
    """Reads pages, as FlashMLA does."""

    capabilities = replace(TorchKernel.capabilities, name="flashmla", reads="pages")

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> Any:
        assert work.slots is None
        assert work.pages is not None
        assert work.page_indptr is not None
        tokens = torch.arange(work.page_tokens)
        slots = (work.pages[:, None].long() * work.page_tokens + tokens).flatten()
        if not work.static:
            starts = (work.page_indptr[:-1] * work.page_tokens).tolist()
            counts = work.key_indptr.diff().tolist()
            parts = [slots[a : a + n] for a, n in zip(starts, counts, strict=True)]
            slots = torch.cat([*parts, slots[:0]])
        return super().prepare(replace(work, slots=slots), shape, scale=scale)


def fake_flash_mla(calls: list[int]) -> Any:
    """The lazy ABI, with nothing behind it."""

    def decode(
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        num_splits: Any,
        softmax_scale: float,
        causal: bool,
        is_fp8_kvcache: bool = False,
    ) -> Results:
        calls.append(len(q))
        assert q.shape[1:] == (1, 2, 576)
        assert k_cache.shape[1:] == (PAGE, 1, 576)
        assert block_table.shape[0] == len(cache_seqlens) == len(q)
        assert block_table.shape[1] * PAGE >= int(cache_seqlens.max())
        return q[..., :head_dim_v], q[..., 0]

    made = SimpleNamespace(have_initialized=False, tile_scheduler_metadata=None, num_splits=None)

    def metadata(*_: Any, **__: Any) -> Any:
        return Made(made, None)

    class Made(tuple):
        def __new__(cls, *items: Any) -> Any:
            return super().__new__(cls, items)

    return SimpleNamespace(flash_mla_with_kvcache=decode, get_mla_metadata=metadata)


@pytest.fixture
def rehearsed(small: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls instead of times and of graphs; small cases; a library that counts its calls."""
    calls: list[int] = []
    spans = with_spans(2, 4 * PAGE + 128, 2, own=128)
    one = (Request(128, 1, (Use(2 * PAGE, 0),)),) * 3
    prefill = (Request(128, 64, (Use(PAGE, 0),)),)
    cases = (
        Timed("decode", MODEL, spans),
        Timed("shared", MODEL, one, shared=True),
        Timed("prefill", MODEL, prefill, Phase.PREFILL),
    )

    def replayed(call: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        out = call()
        return SimpleNamespace(replay=lambda: out.copy_(call())), out

    def once(call: Callable[[], object]) -> float:
        call()
        return 100.0

    monkeypatch.setitem(sys.modules, "flash_mla", fake_flash_mla(calls))
    monkeypatch.setattr("benchmarks.gpu.speed.timed", lambda: cases)
    monkeypatch.setattr("benchmarks.gpu.speed.time_us", once)
    monkeypatch.setattr("benchmarks.gpu.speed.capture", replayed)
    monkeypatch.setattr("benchmarks.gpu.answers.capture", replayed)
    return calls


@pytest.mark.parametrize("rows", [1, 8])
def test_a_captured_step_is_compared_with_an_eager_one(rehearsed: list[int], rows: int) -> None:
    assert check_replay(Paged(), MODEL, "cpu", rows=rows).worst <= 1


def test_kernels_that_read_pages_are_compared_too(rehearsed: list[int]) -> None:
    answers = Answers("cpu")
    answers.measure({"flashmla": Paged()}, Budget())
    assert len(answers.checks) == 8
    assert all(check.holds for check in answers.checks), answers.checks
    needles = Needles("cpu", small=True)
    needles.measure({"flashmla": Paged()}, Budget())
    report = Report("gpu")
    needles.finish(report)
    assert report.holds


def test_the_table_has_flash_mla_itself_and_every_way_of_a_kernel(rehearsed: list[int]) -> None:
    timings, report = speed.Speed("cpu"), Report("gpu")
    timings.measure({"flashmla": Paged(), "tilelang": "not installed"}, Budget())
    timings.finish(report)
    assert rehearsed == [2, 3], "the library is called on flat decode batches"
    ways = {(n.case, n.kernel, n.context, n.way) for n in timings.lines if n.us is not None}
    mine = {("flat", "eager"), ("spans", "eager")}
    for case in ("decode", "shared"):
        assert (case, speed.FLASHMLA, "flat", "eager") in ways
        found = {way[2:] for way in ways if way[:2] == (case, "flashmla")}
        assert found == mine | {("flat", "graph"), ("spans", "graph")}
    assert {way[2:] for way in ways if way[0] == "prefill"} == mine
    assert not [line.note for line in timings.lines if line.note not in ("", "not installed")]
    assert [check.value for check in report.checks] == [1.0]
    assert "not installed" in report.tables[0].render()


def test_a_kernel_that_breaks_is_a_row_and_not_the_end(rehearsed: list[int]) -> None:
    timings = speed.Speed("cpu")
    timings.measure({"flashmla": Breaks()}, Budget())
    notes = [line.note for line in timings.lines if line.kernel == "flashmla"]
    assert notes == ["RuntimeError: illegal memory access"] * 3


# --- planted faults ------------------------------------------------------------------------------


class Averages(TorchKernel):
    """Weighs all parts alike."""

    def run(self, *inputs: Any, **more: Any) -> Results:
        out, lse = super().run(*inputs, **more)
        return out, lse.clamp(min=-1e30) * 0.0


class OfBaseTwo(TorchKernel):
    """Forgets to convert."""

    def run(self, *inputs: Any, **more: Any) -> Results:
        out, lse = super().run(*inputs, **more)
        return out, lse / math.log(2.0)


class ShowsBlindRows(TorchKernel):
    """Has a finite lse where a row sees nothing."""

    def run(self, *inputs: Any, **more: Any) -> Results:
        out, lse = super().run(*inputs, **more)
        return out, lse.clamp(min=-1e30)


class DropsAKey(TorchKernel):
    """Misses the last key of long parts."""

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, **more: Any
    ) -> Results:
        if more["causal_from"] is None and len(slots) > 1:
            slots = slots[:-1]
        return super().attend(q, keys, values, slots, **more)


class ReadsAWholePage(TorchKernel):
    """Reads what stands behind the last key of a page."""

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, **more: Any
    ) -> Results:
        if len(slots) % PAGE and more["causal_from"] is None:
            slots = torch.cat([slots, slots[-1:] + 1])
        return super().attend(q, keys, values, slots, **more)


class Breaks(TorchKernel):
    """Does not run."""

    def run(self, *inputs: Any, **more: Any) -> Results:
        raise RuntimeError("illegal memory access")


def test_the_kernel_without_a_fault_passes(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "offers", lambda: [Offer("torch", TorchKernel)])
    assert suite.main(["--json", "--quick"]) == 0


@pytest.mark.parametrize(
    "fault", [Averages, OfBaseTwo, ShowsBlindRows, DropsAKey, ReadsAWholePage, Breaks]
)
def test_a_planted_fault_fails_the_script(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: type
) -> None:
    answers = Answers("cpu")
    answers.measure({"torch": fault()}, Budget())
    report = Report("gpu")
    answers.finish(report)
    assert report.emit(as_json=True) == 1
    failed = [check.name for check in report.checks if not check.holds]
    assert failed, "the fault was not seen"
    capsys.readouterr()


def test_the_exit_status_of_the_script_is_that_of_its_checks(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "offers", lambda: [Offer("torch", Averages)])
    monkeypatch.setattr("benchmarks.gpu.suite.Needles.measure", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suite.main(["--json", "--quick"]) == 1
    assert "GPU: not measured" in capsys.readouterr().err


def test_the_base_of_the_lse_is_read_off() -> None:
    right = check_launch(TorchKernel(), MODEL.shape, EDGES[0], "cpu")
    wrong = check_launch(OfBaseTwo(), MODEL.shape, EDGES[0], "cpu")
    assert right.worst <= 1 < wrong.worst
    assert right.log_base == pytest.approx(math.e, rel=1e-3)
    assert wrong.log_base == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("turn", [lambda x: x * 1.01, lambda x: x * float("nan"), lambda x: -x])
def test_bounds_see_wrong_outputs(turn: Callable[[Tensor], Tensor]) -> None:
    wanted, lse = torch.randn(5, 2, 16), torch.zeros(5, 2)
    same = deviation(wanted, wanted, lse, lse, BOUNDS[torch.float32])
    assert same.worst <= 1e-3
    assert deviation(turn(wanted), wanted, lse, lse, BOUNDS[torch.float32]).worst > 1


def test_shared_decode_is_compared_with_others_and_not_with_itself() -> None:
    """A fault in the stacking of readers shows in all three comparisons."""

    class TurnsStacks(TorchKernel):
        def attend(self, q: Tensor, *rest: Any, **more: Any) -> Results:
            return super().attend(q.flip(0) if len(q) > 4 else q, *rest, **more)

    good = check_shared(TorchKernel(), MODEL, "cpu")
    bad = check_shared(TurnsStacks(), MODEL, "cpu")
    assert all(found.worst <= 1 for found in good.values()), good
    assert all(found.worst > 1 for found in bad.values()), bad


def test_flat_sequences_are_the_same_context() -> None:
    world = build(MODEL.shape, [Request(90, 1, (Use(2 * PAGE, 0),)), Request(70)])
    flat = flattened(world)
    assert not flat.plan().spans
    torch.testing.assert_close(expected(flat), expected(world), rtol=1e-5, atol=1e-5)


# --- budget, loading, table ----------------------------------------------------------------------


def test_nothing_starts_late_and_what_hangs_is_cut_off() -> None:
    late = Budget(start_within_s=0.0)
    assert not late.allows("speed")
    assert late.skipped == ["speed"]
    short = Budget(stop_after_s=0.05)
    begin = time.monotonic()
    with short.guarding("answers"):
        try:
            time.sleep(30)
        except Exception:  # as a library that hides what went wrong
            pytest.fail("the cut was taken for an error")
    assert time.monotonic() - begin < 10
    assert short.skipped == ["answers, cut off"]


def test_what_is_skipped_is_said(small: None) -> None:
    report = suite.measure({"torch": TorchKernel()}, "cpu", Budget(start_within_s=0.0))
    assert report.figures["skipped"]
    assert any("Out of time" in note for note in report.notes)
    assert not report.holds, "nothing was checked"


def test_a_missing_library_is_a_row_that_says_why() -> None:
    shelf = Shelf(kernels.offers())
    found = shelf.get("flashmla")
    if not isinstance(found, str):
        pytest.skip("flash_mla loads here")
    answers, report = Answers("cpu"), Report("gpu")
    answers.measure({"flashmla": found}, Budget())
    answers.finish(report)
    assert "flash_mla" in str(report.tables[0].rows[0])
    assert not report.checks


def test_spans_are_timed_against_as_much_flat_context() -> None:
    for case in timed():
        for with_them, flat in zip(case.requests, case.flat, strict=True):
            assert (with_them.keys, with_them.new) == (flat.keys, flat.new)
            assert not flat.spans
    shared = [case for case in timed() if case.shared]
    assert {(len(c.requests), c.requests[0].keys) for c in shared} == {(16, 32_768)}
    assert any(case.model.shape.query_heads == 16 for case in shared)


def test_amounts_are_those_of_the_plan() -> None:
    shape = MODEL.shape
    spans = build(shape, with_spans(3, 2 * PAGE * 4 + 128, 4, own=128))
    flat = build(shape, [Request(2 * PAGE * 4 + 128)] * 3)
    a, b = Amount.of(spans, spans.plan()), Amount.of(flat, flat.plan())
    assert a.flop == b.flop == 2.0 * 3 * (8 * PAGE + 128) * 2 * (576 + 512)
    queries = 3 * 4 * 2 * (576 + 512) * 4
    assert a.bytes - b.bytes == queries
    prefill = build(shape, [Request(100, 100)])
    assert Amount.of(prefill, prefill.plan()).flop == 2.0 * 5050 * 2 * (576 + 512)


def test_ratios_and_checks_of_the_table() -> None:
    """By FlashMLA itself where it ran; a promise that could not be measured does not hold."""
    measured = [("x", "flat", "eager", 50.0), (speed.FLASHMLA, "flat", "eager", 100.0)]
    assert speed.baseline_us(measured) == 100.0
    assert speed.baseline_us(measured[:1]) == 50.0
    assert speed.baseline_us([("x", "spans", "eager", 50.0)]) is None
    empty = Report("gpu")
    speed.Speed().finish(empty)
    assert len(empty.checks) == 5
    assert not any(check.holds for check in empty.checks)
    lines = [
        speed.Line(case.name, case.model.name, "flashmla", "spans", way, 1.0, by_flat=ratio)
        for case in timed()
        for way, ratio in (("eager", 2.0), ("graph", 0.3 if case.shared else 1.05))
    ]
    full = Report("gpu")
    speed.Speed(lines=lines).finish(full)
    assert full.holds
    assert full.checks[1].value == pytest.approx(1 / 0.3, rel=1e-3)
