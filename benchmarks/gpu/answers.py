"""Whole batches against the oracle: plan, look-up, rotation, kernel and merge together.

One row of a table, and one check, for each kernel, kind of layers and case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.attention.world import build
from benchmarks.report import Check, Report, Table, progress
from tessera_sglang.attention.kernels.base import Kernel, Phase
from tessera_sglang.attention.plan import BatchQueries

from .budget import Budget
from .cases import Batch, Model, batches, models, shared
from .kernels import refusal
from .oracle import expected, flattened
from .parity import BOUNDS, EDGES, Deviation, check_launch, deviation
from .timing import capture, lengths, static_step

COLUMNS = ("kernel", "layers", "case", "out", "cosine", "lse", "log base")
SHARED = ("shared decode", "shared decode against unshared", "shared decode against flat")


@dataclass(slots=True)
class Answers:
    """What was compared, kernel by kernel."""

    device: str
    rows: list[tuple[object, ...]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    def measure(self, kernels: Mapping[str, Kernel | str], budget: Budget) -> None:
        """Compare kernels; a text says why one is not there."""
        for name, kernel in kernels.items():
            if isinstance(kernel, str):
                self.rows.append((name, "", f"not there: {kernel}", *[None] * 4))
                continue
            for model in models(self.device):
                what = f"answers of {name}, {model.name}"
                if budget.allows(what):
                    progress(f"{what} ({budget.spent_s:.0f} s)")
                    self._compare(kernel, model)

    def finish(self, report: Report) -> None:
        """Add what was found."""
        title = "answers against the oracle, as shares of what they may be off"
        report.tables.append(Table(title, COLUMNS, self.rows))
        report.figures["answers"] = [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]
        report.checks += self.checks

    def _compare(self, kernel: Kernel, model: Model) -> None:
        device, add = self.device, partial(self._add, kernel, model)
        for parts in EDGES:
            phase = Phase.VERIFY if parts.causal else Phase.DECODE
            add(parts.name, phase, partial(check_launch, kernel, model.shape, parts, device))
        for batch in batches(device):
            add(batch.name, batch.phase, partial(check_batch, kernel, model, batch, device))
        found = cache(partial(check_shared, kernel, model, device))
        for case in SHARED:
            add(case, Phase.DECODE, partial(_one, found, case))
        if device == "cuda" and kernel.capabilities.graph_safe:
            for rows in (1, 8):
                replay = partial(check_replay, kernel, model, device, rows=rows)
                add(f"captured decode, parts of {rows}", Phase.DECODE, replay)

    def _add(
        self,
        kernel: Kernel,
        model: Model,
        case: str,
        phase: Phase,
        check: Callable[[], Deviation],
    ) -> None:
        name = kernel.capabilities.name
        why = refusal(kernel, model.shape, phase, self.device)
        if why is not None:
            self.rows.append((name, model.name, f"{case}: it {why}", *[None] * 4))
            return
        label = f"{name}, {model.name}, {case}: deviation by bound"
        try:
            found = check()
        except Exception as error:  # a kernel that breaks is a finding, and not the last one
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self.rows.append((name, model.name, f"{case}: {what}", *[None] * 4))
            self.checks.append(Check.at_most(label, None, 1.0))
            return
        shares = (found.out, found.cosine, found.lse, found.log_base)
        self.rows.append((name, model.name, case, *shares))
        self.checks.append(Check.at_most(label, found.worst, 1.0))


def _one(found: Callable[[], dict[str, Deviation]], case: str) -> Deviation:
    return found()[case]


def check_batch(kernel: Kernel, model: Model, batch: Batch, device: str) -> Deviation:
    """A batch as a server runs it."""
    world = build(model.shape, batch.requests, device)
    out = world.forward(kernel).clone()
    wanted, lse = expected(world)
    return deviation(out, wanted, None, lse, BOUNDS[model.shape.dtype])


def check_shared(kernel: Kernel, model: Model, device: str) -> dict[str, Deviation]:
    """Shared decode against the oracle, against each reading for itself, and against flat sequences."""
    world = build(model.shape, shared(16, 4096 if device == "cuda" else 256), device)
    out = world.forward(kernel).clone()
    apart = world.forward(kernel, world.private).clone()
    flat = flattened(world).forward(kernel).clone()
    wanted, lse = expected(world)
    bounds = BOUNDS[model.shape.dtype]

    def against(other: Tensor) -> Deviation:
        return deviation(out, other.float(), None, lse, bounds)

    return dict(zip(SHARED, map(against, (wanted, apart, flat)), strict=True))


def check_replay(kernel: Kernel, model: Model, device: str, *, rows: int) -> Deviation:
    """A decode step captured once and replayed over other lengths and another batch: the worst."""
    world = build(model.shape, shared(8, 2048 if device == "cuda" else 256), device)
    step = static_step(world, kernel, rows=rows)
    request_rows, seq = world.request_rows.clone(), lengths(world)
    q = world.q.clone()

    def forward() -> Tensor:
        begun = step.begin(world.rows, request_rows, seq)
        return begun.attend(q, world.keys, world.values, scale=world.scale)

    graph, out = capture(forward)
    worst: list[Deviation] = []
    count = len(world.requests)
    steps = ((0, [*range(count)]), (3, [*range(count)]), (9, [5, 2, 2, 7, 0, 1, 4, 6]))
    for ahead, order in steps:
        layouts = [world.batch.layouts[n] for n in order]
        sources = [world.batch.sources[n] for n in order]
        some = [int(world.batch.seq_tokens[n]) - ahead for n in order]
        batch = BatchQueries.of([1] * count, some, layouts, sources)
        request_rows.copy_(torch.tensor(order))
        seq.copy_(torch.tensor(some))
        q.normal_(generator=torch.Generator(device).manual_seed(ahead))
        step.load(batch, world.rows, request_rows)
        graph.replay()
        found = out.clone()
        plan = world.plan(batch)
        begun = world.executor.begin(plan, kernel, world.rows, request_rows)
        again = begun.attend(q, world.keys, world.values, scale=world.scale)
        shown = torch.zeros(found.shape[:2], device=device)
        worst.append(deviation(found, again.float(), None, shown, BOUNDS[model.shape.dtype]))
    return max(worst, key=lambda one: one.worst)
