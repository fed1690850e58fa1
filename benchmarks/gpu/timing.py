"""Time of a layer on a GPU.

CUDA events around a call, with the L2 cache overwritten before each, as the other layers of a model
would; the median of many, after warm-up. The GPU is kept busy while a call is queued, so that an eager
call takes what its kernels take and not what Python does. A captured call is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention.world import World
from tessera_sglang.attention.kernels.base import Kernel
from tessera_sglang.attention.plan import BatchQueries, Plan
from tessera_sglang.attention.static_decode import StaticDecode, StaticShape, Storage, static_plan

FLUSHED_BYTES = 256 << 20  # several times an L2 cache
BUSY_CYCLES = 2_000_000  # about a millisecond: longer than it takes to queue a layer
WARM_UP, CALLS = 3, 30
cuda: Any = torch.cuda  # partly untyped


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run it."""
        ...


def time_us(call: Callable[[], object], *, calls: int = CALLS) -> float:
    """Median of a call on the current GPU, microseconds."""
    flush = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(WARM_UP):
        call()
    events = []
    for _ in range(calls):
        flush.zero_()
        cuda._sleep(BUSY_CYCLES)
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        events.append((start, end))
        torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) * 1e3 for start, end in events]))


def capture(call: Callable[[], Tensor]) -> tuple[Replayable, Tensor]:
    """A graph of a call, and the tensor that every replay writes. Warmed up on a side stream."""
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


# --- a decode step in fixed shapes ---------------------------------------------------------------


def static_step(world: World, kernel: Kernel, *, rows: int) -> StaticDecode:
    """Buffers that just hold the batch, spans in parts of ``rows`` readers, loaded."""
    plan = static_plan(world.batch)
    step = StaticDecode(
        world.executor,
        kernel,
        static_shape(plan, len(world.requests), rows),
        context_tokens=int(world.rows.shape[1]),
        storage=Storage(world.keys.device),
    )
    step.load(world.batch, world.rows, world.request_rows)
    return step


def static_shape(plan: Plan, requests: int, rows: int) -> StaticShape:
    """The smallest one that holds a plan; at least one part, since a launch has some."""
    if not plan.spans:
        return StaticShape(requests, 1, 1, rows)
    (launch,) = plan.spans
    parts = -(-np.diff(launch.query_indptr) // rows)
    spans = launch.merge_table(plan.query_tokens).shape[1]
    return StaticShape(requests, spans, int(parts.sum()), rows)


def lengths(world: World, batch: BatchQueries | None = None) -> Tensor:
    """``[requests]`` int64 on the device."""
    return torch.from_numpy((batch or world.batch).seq_tokens).to(world.keys.device)


# --- how much work that was ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Amount:
    """Work of a layer."""

    flop: float  # of both products; masked pairs left out
    bytes: float  # keys, once for each part that reads them; queries, outputs

    @classmethod
    def of(cls, world: World, plan: Plan) -> Amount:
        """What a plan asks for."""
        pairs = keys = rows = 0
        for launch in (plan.own, *plan.spans):
            counts, lengths = np.diff(launch.query_indptr), np.diff(launch.key_indptr)
            pairs += int((counts * lengths).sum())
            if launch.causal:
                pairs -= int((counts * (counts - 1) // 2).sum())
            keys += int(lengths.sum())
            rows += launch.rows
        shape = world.shape
        flop = 2.0 * pairs * shape.query_heads * (shape.key_width + shape.value_width)
        key_bytes = world.keys[0].nbytes + (0 if shape.latent else world.values[0].nbytes)
        width = shape.key_width + shape.value_width
        row_bytes = shape.query_heads * width * shape.dtype.itemsize
        return cls(flop, float(keys * key_bytes + rows * row_bytes))
