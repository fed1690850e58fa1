"""(b) Spans against the same context without spans, and (c) one span that many requests read.

Every timed call is a forward pass of one layer, planning and look-up included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.report import Check, Report, progress
from tessera_sglang.attention.kernels.base import AttentionShape
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel

from .results import SAME, Lines, dtype_name, largest_difference, model_name
from .timing import Turns
from .world import GAP, LEAD, Request, Use, World, build


@dataclass(frozen=True, slots=True)
class Reading:
    """Requests that read spans of their own."""

    name: str
    requests: int
    new: int  # tokens of each that are computed
    cached: int  # remaining tokens of each that are there already
    spans: int
    span_tokens: int

    def with_spans(self) -> list[Request]:
        """All new tokens see all spans, as they would see a context of as many keys."""
        assert self.cached > LEAD + (self.spans - 1) * GAP, "a span would stand among new tokens"
        uses = [
            tuple(Use(self.span_tokens, text, copy=reader) for text in range(self.spans))
            for reader in range(self.requests)
        ]
        return [Request(self.cached + self.new, self.new, use) for use in uses]

    def flat(self) -> list[Request]:
        """Just as many keys, and no spans."""
        keys = self.cached + self.new + self.spans * self.span_tokens
        return [Request(keys, self.new) for _ in range(self.requests)]


def measure_reading(
    report: Report, lines: Lines, case: Reading, shape: AttentionShape, turns: Turns, bound: float
) -> None:
    """(b): the time with spans by that without."""
    name = f"b. {case.name}, {model_name(shape)}, {dtype_name(shape.dtype)}"
    progress(name)
    kernel = TorchKernel()
    spans, flat = build(shape, case.with_spans()), build(shape, case.flat())
    plans = spans.plan(), flat.plan()
    assert sum(launch.parts for launch in plans[0].spans) == case.requests * case.spans
    assert not plans[1].spans
    assert _scores(spans) == _scores(flat), "not the same amount of attention"
    times = turns.time(
        {"spans": lambda: spans.forward(kernel), "flat": lambda: flat.forward(kernel)}
    )
    ratio = times.ratio("spans", "flat")
    report.checks.append(Check.at_most(f"{name}: time, spans / flat", ratio, bound))
    report.figures[name] = {"ways": times.summary(), "spans_by_flat": ratio}
    lines.add(name, f"{case.spans} spans", times.median_s("spans"), ratio, "checked")
    lines.add(name, "flat", times.median_s("flat"))


def measure_shared(
    report: Report,
    lines: Lines,
    shape: AttentionShape,
    *,
    readers: int,
    span_tokens: int,
    own_tokens: int,
    turns: Turns,
    bound: float,
) -> None:
    """(c): decode of many requests over one span, told so, against each reading for itself."""
    name = (
        f"c. decode {readers} x {span_tokens} shared, {model_name(shape)}, "
        f"{dtype_name(shape.dtype)}"
    )
    progress(name)
    kernel = TorchKernel()
    one = build(shape, [Request(own_tokens, 1, (Use(span_tokens, 0),))] * readers)
    copies = build(
        shape, [Request(own_tokens, 1, (Use(span_tokens, 0, copy=n),)) for n in range(readers)]
    )
    plain = build(shape, [Request(own_tokens + span_tokens)] * readers)
    ways: dict[str, Callable[[], Tensor]] = {
        "shared": lambda: one.forward(kernel),
        "same pages, read by each": lambda: one.forward(kernel, one.private),
        "a copy each": lambda: copies.forward(kernel),
        "flat, no spans": lambda: plain.forward(kernel),
    }
    same = [ways[way]() for way in ("same pages, read by each", "a copy each")]
    differ = largest_difference(ways["shared"](), same)
    times = turns.time(ways)
    others = [way for way in ways if way != "shared"]
    checked = min(others, key=times.median_s)
    gains = {way: times.ratio(way, "shared") for way in others}
    report.checks += [
        Check.at_most(f"{name}: largest difference of the answers", differ, SAME[shape.dtype]),
        Check.at_least(f"{name}: throughput, shared / fastest unshared", gains[checked], bound),
    ]
    report.figures[name] = {
        "ways": times.summary(),
        "shared_gain_over": gains,
        "checked_against": checked,
    }
    for way in ways:
        lines.add(
            name, way, times.median_s(way), gains.get(way), "checked" if way == checked else ""
        )


def _scores(world: World) -> int:
    """Query-key pairs of a head, from the plan: what has to be computed, masked pairs left out."""
    plan = world.plan()
    total = 0
    for launch in (plan.own, *plan.spans):
        for part in range(launch.parts):
            rows = int(launch.query_indptr[part + 1] - launch.query_indptr[part])
            keys = int(launch.key_indptr[part + 1] - launch.key_indptr[part])
            total += rows * keys
            if launch.causal:
                total -= rows * (rows - 1) // 2
    return total
