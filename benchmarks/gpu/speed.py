"""The table: a layer with spans, by each kernel, against FlashMLA on a flat context as long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from benchmarks.attention.world import World, build
from benchmarks.report import Check, Report, Table, progress
from tessera_sglang.attention.kernels.base import Kernel, Phase, RowFormat

from . import flat
from .budget import Budget
from .cases import Timed, timed
from .kernels import refusal
from .timing import Amount, capture, lengths, static_step, time_us

FLASHMLA = "flash_mla itself"
SPANS_BY_FLAT, SHARED_GAIN = 1.10, 3.0
READERS_OF_A_PART = 8  # of a shared run in a captured step, as the server captures it
COLUMNS = ("case", "layers", "kernel", "µs", "TFLOP/s", "GB/s", "by flat", "")


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    case: str
    layers: str
    kernel: str
    context: str  # "flat" or "spans"
    way: str  # "eager" or "graph"
    us: float | None  # None: not measured
    tflop_per_s: float | None = None
    gb_per_s: float | None = None
    by_flat: float | None = None  # time, by that of the case's baseline
    note: str = ""

    @property
    def cells(self) -> tuple[object, ...]:
        """For readers."""
        kernel = f"{self.kernel}, {self.context}, {self.way}" if self.way else self.kernel
        figures = (self.us, self.tflop_per_s, self.gb_per_s, self.by_flat)
        return (self.case, self.layers, kernel, *figures, self.note)


@dataclass(slots=True)
class Speed:
    """What was timed."""

    device: str = "cuda"
    lines: list[Line] = field(default_factory=list)

    def measure(self, kernels: Mapping[str, Kernel | str], budget: Budget) -> None:
        """Every case that the budget allows, with each kernel that can run it."""
        for case in timed():
            name = f"{case.name}, {case.model.name}"
            if budget.allows(f"{name}, by {', '.join(kernels)}"):
                progress(f"{name}, by {', '.join(kernels)} ({budget.spent_s:.0f} s)")
                self.lines += _case(case, kernels, self.device)
                torch.cuda.empty_cache()

    def finish(self, report: Report) -> None:
        """Add what was found, and the promises."""
        lines = sorted(self.lines, key=lambda line: (line.layers, line.case))
        report.tables.append(Table("a layer on the GPU", COLUMNS, [line.cells for line in lines]))
        report.figures["speed"] = [asdict(line) for line in lines]
        for case in timed():
            _check(report, case, self.lines)


def _case(case: Timed, kernels: Mapping[str, Kernel | str], device: str) -> Iterator[Line]:
    shape = case.model.shape
    plain = build(shape, case.flat, device)
    spans = build(shape, case.requests, device)
    measured: list[tuple[str, str, str, float]] = []
    failed: list[Line] = []
    if case.phase is Phase.DECODE and shape.latent and shape.rows is RowFormat.PLAIN:
        try:
            measured.append((FLASHMLA, "flat", "eager", time_us(flat.flashmla(plain))))
        except Exception as error:  # whatever a library does: the table says so and goes on
            failed.append(_failed(case, FLASHMLA, error))
    usable = [name for name in kernels if name != "torch"] + ["torch"]
    for name in usable:
        kernel = kernels.get(name)
        if kernel is None or (name == "torch" and measured):
            continue  # PyTorch is the last resort, and takes long
        why = kernel if isinstance(kernel, str) else refusal(kernel, shape, case.phase, device)
        if isinstance(kernel, str) or why is not None:
            yield Line(case.name, case.model.name, name, "", "", None, note=why or "")
            continue
        try:
            for context, world in (("flat", plain), ("spans", spans)):
                for way, call in _ways(case, kernel, world).items():
                    measured.append((name, context, way, time_us(call())))
        except Exception as error:  # as above
            failed.append(_failed(case, name, error))
    baseline = baseline_us(measured)
    amounts = {"flat": Amount.of(plain, plain.plan()), "spans": Amount.of(spans, spans.plan())}
    for name, context, way, us in measured:
        amount = amounts[context]
        yield Line(
            case.name,
            case.model.name,
            name,
            context,
            way,
            us,
            amount.flop / us / 1e6,
            amount.bytes / us / 1e3,
            us / baseline if baseline else None,
        )
    yield from failed


def _ways(
    case: Timed, kernel: Kernel, world: World
) -> dict[str, Callable[[], Callable[[], object]]]:
    """How a layer can be run; each makes a call that can be timed."""

    def eager() -> Callable[[], Tensor]:
        begun = world.begin(kernel)
        return lambda: world.attend(begun)

    def graph() -> Callable[[], None]:
        step = static_step(world, kernel, rows=READERS_OF_A_PART if case.shared else 1)
        begun = step.begin(world.rows, world.request_rows, lengths(world))
        world.attend(begun)  # makes the schedule, which all layers share
        return capture(lambda: world.attend(begun))[0].replay

    static = case.phase is Phase.DECODE and kernel.capabilities.graph_safe
    static = static and kernel.capabilities.name != "torch"  # it would read the whole capacity
    return {"eager": eager, "graph": graph} if static else {"eager": eager}


def baseline_us(measured: list[tuple[str, str, str, float]]) -> float | None:
    """FlashMLA on flat contexts, by itself if that was measured, else the fastest flat layer."""
    flat_ones = [(name, us) for name, context, _, us in measured if context == "flat"]
    for wanted in (FLASHMLA, "flashmla"):
        times = [us for name, us in flat_ones if name == wanted]
        if times:
            return min(times)
    return min((us for _, us in flat_ones), default=None)


def _check(report: Report, case: Timed, lines: list[Line]) -> None:
    """The promise is about 16 heads and MLA; the other rows are for readers."""
    ratios = [
        line.by_flat
        for line in lines
        if (line.case, line.layers, line.context) == (case.name, case.model.name, "spans")
        and line.by_flat is not None
    ]
    best = min(ratios, default=None)
    name = f"{case.name}, {case.model.name}"
    shape = case.model.shape
    if case.phase is not Phase.DECODE or not shape.latent or shape.rows is not RowFormat.PLAIN:
        return
    if not case.shared:
        report.checks.append(Check.at_most(f"{name}: time, spans / flat", best, SPANS_BY_FLAT))
    elif shape.query_heads == 16:
        gain = 1 / best if best else None
        report.checks.append(
            Check.at_least(f"{name}: throughput, shared / flat", gain, SHARED_GAIN)
        )


def _failed(case: Timed, kernel: str, error: Exception) -> Line:
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Line(case.name, case.model.name, kernel, "", "", None, note=why)
