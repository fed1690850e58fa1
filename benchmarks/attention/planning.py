"""(d) What planning costs of a forward pass.

Planning is `build_plan` and `Executor.begin`, once per forward pass: parts, slots and rotations. The
forward pass is its attention alone: one layer measured, times the layers of the model. Projections,
experts and sampling come on top in a server, so the share that is reported is more than planning's true
share. The prepared schedules of the PyTorch kernel are nothing; a GPU kernel's are not measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.report import Check, Report, Table, progress
from tessera_sglang.attention.execute import Pass
from tessera_sglang.attention.kernels.base import Kernel
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel

from .timing import Turns
from .world import Request, Use, World, build, mla

LAYERS, HEADS = 27, 16  # DeepSeek-V2-Lite


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decode step of many readers."""

    requests: int
    spans: int
    span_tokens: int
    own_tokens: int


def measure(report: Report, sizes: Sizes, turns: Turns, bound: float) -> None:
    """Readers of spans of their own, and, which is less attention, of spans that all of them share."""
    kernel, rows = TorchKernel(), []
    for who, shared in (("own spans", False), ("the same spans", True)):
        name = f"d. decode {sizes.requests} x {sizes.spans} spans, {who}"
        progress(name)
        world = build(mla(HEADS, torch.bfloat16), requests(sizes, shared=shared))
        begun = world.begin(kernel)
        uses = sum(launch.rows for launch in world.plan().spans)
        assert uses == sizes.requests * sizes.spans, "a span was not read as one"
        ways = _ways(world, begun, kernel)
        times = turns.time(ways)
        share = times.ratio("plan and begin", "a layer") / LAYERS
        report.checks.append(
            Check.below(f"{name}: planning by attention of {LAYERS} layers", share, bound)
        )
        report.figures[name] = {"times": times.summary(), "share": share, "layers": LAYERS}
        medians = [times.median_s(way) * 1e3 for way in ways]
        rows.append((name, *medians, f"{share:.2%}"))
    columns = ("case", "plan ms", "plan and begin ms", "a layer ms", f"of {LAYERS} layers")
    report.tables.append(Table("(d) planning, once per forward pass", columns, rows))


def requests(sizes: Sizes, *, shared: bool) -> list[Request]:
    """Requests that read as many spans each: the same ones, or copies of their own."""
    return [
        Request(
            sizes.own_tokens,
            1,
            tuple(
                Use(sizes.span_tokens, text, copy=0 if shared else reader)
                for text in range(sizes.spans)
            ),
        )
        for reader in range(sizes.requests)
    ]


def _ways(world: World, begun: Pass, kernel: Kernel) -> dict[str, Callable[[], object]]:
    return {
        "plan": world.plan,
        "plan and begin": lambda: world.begin(kernel),
        "a layer": lambda: world.attend(begun),
    }
