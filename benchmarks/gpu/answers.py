"""Whole batches against the oracle: plan, look-up, rotation, kernel and merge together."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.attention.world import build
from tessera_sglang.attention.kernels.base import Kernel
from tessera_sglang.attention.plan import BatchQueries

from .cases import Batch, Model, shared
from .oracle import expected, flattened
from .parity import BOUNDS, Deviation, deviation
from .timing import capture, lengths, static_step


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

    return {
        "shared decode": against(wanted),
        "shared decode against unshared": against(apart),
        "shared decode against flat sequences": against(flat),
    }


def check_replay(kernel: Kernel, model: Model, *, rows: int) -> Deviation:
    """A decode step captured once and replayed over other lengths and another batch: the worst."""
    world = build(model.shape, shared(8, 2048), "cuda")
    step = static_step(world, kernel, rows=rows)
    request_rows, seq = world.request_rows.clone(), lengths(world)
    q = world.q.clone()

    def forward() -> Tensor:
        begun = step.begin(world.rows, request_rows, seq)
        return begun.attend(q, world.keys, world.values, scale=world.scale)

    graph, out = capture(forward)
    worst: list[Deviation] = []
    count = len(world.requests)
    for ahead, order in ((0, list(range(count))), (3, list(range(count))), (9, [5, 2, 2, 7, 0, 1, 4, 6])):
        layouts = [world.batch.layouts[n] for n in order]
        sources = [world.batch.sources[n] for n in order]
        some = [int(world.batch.seq_tokens[n]) - ahead for n in order]
        batch = BatchQueries.of([1] * count, some, layouts, sources)
        request_rows.copy_(torch.tensor(order))
        seq.copy_(torch.tensor(some))
        q.normal_(generator=torch.Generator("cuda").manual_seed(ahead))
        step.load(batch, world.rows, request_rows)
        graph.replay()
        found = out.clone()
        plan = world.plan(batch)
        begun = world.executor.begin(plan, kernel, world.rows, request_rows)
        again = begun.attend(q, world.keys, world.values, scale=world.scale)
        shown = torch.zeros(found.shape[:2], device="cuda")
        worst.append(deviation(found, again.float(), None, shown, BOUNDS[model.shape.dtype]))
    return max(worst, key=lambda one: one.worst)
