"""(a) The PyTorch kernel against ``scaled_dot_product_attention`` on the same shapes and dtype.

Ours is a forward pass of one layer as a server runs it: the plan, the look-up of slots, the rows
gathered from a paged pool, the log-sum-exp that merging needs. SDPA gets contiguous tensors that hold
the same keys and values, and is called in every way that computes the same thing:

* K/V heads, ``enable_gqa``: as one calls it; and, in prefill, with KV heads repeated beforehand.
* MLA as one calls it, keys wider than values, which only its slow path takes; and with values padded
  to the width of keys, which its fast path takes, ``enable_gqa`` or heads expanded as a view.

The check is against the fastest of these. For decode there is one more, which is no call of the same
shape but what a reader may know: a KV head's query heads given as query rows. It is reported apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import Check, Report, progress
from tessera_sglang.attention.kernels.base import AttentionShape
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel

from .results import SAME, Lines, dtype_name, largest_difference, model_name
from .timing import Turns
from .world import Request, World, build

OURS = "ours"
HEADS_AS_ROWS = "sdpa, heads as rows"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """A plain batch."""

    name: str
    requests: tuple[Request, ...]

    @property
    def decode(self) -> bool:
        """One new token a request; else all tokens are new."""
        return self.requests[0].new == 1


def measure(
    report: Report, lines: Lines, case: Case, shape: AttentionShape, turns: Turns, bound: float
) -> None:
    """One case, one model, one dtype."""
    name = f"a. {case.name}, {model_name(shape)}, {dtype_name(shape.dtype)}"
    progress(name)
    world = build(shape, case.requests)
    kernel = TorchKernel()
    inputs = contiguous(world)
    ways = sdpa_ways(*inputs, scale=world.scale, decode=case.decode)
    if shape.latent:
        needed = slow_path_bytes(*inputs)
        if needed > memory_available() // 4:
            del ways["sdpa"]
            why = f"would take {needed / GIB:.1f} GiB, {memory_available() / GIB:.1f} available"
            report.notes.append(f"{name}: SDPA as one calls it was left out: {why}.")
    outputs: dict[str, Tensor] = {}

    def keeping(way: str, call: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            outputs[way] = call()

        return run

    everyone = {OURS: lambda: world.forward(kernel), **ways}
    calls = {way: keeping(way, call) for way, call in everyone.items()}
    times = turns.time(calls, keep=frozenset({OURS, HEADS_AS_ROWS}))
    report.checks.append(
        Check.at_most(
            f"{name}: largest difference of the answers",
            largest_difference(outputs[OURS], outputs.values()),
            SAME[shape.dtype],
        )
    )
    ratios = {way: times.ratio(way, OURS) for way in ways}
    checked = min((way for way in ways if way != HEADS_AS_ROWS), key=times.median_s)
    report.checks.append(
        Check.at_least(f"{name}: throughput, ours / fastest SDPA", ratios[checked], bound)
    )
    report.figures[name] = {
        "ways": times.summary(),
        "ours_by_way": ratios,
        "checked_against": checked,
    }
    for way in everyone:
        mark = "1 call" if way in times.given_up else "checked" if way == checked else ""
        lines.add(name, way, times.median_s(way), ratios.get(way), mark)


def contiguous(world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [R, H, T, D], keys [R, Hkv, S, D] and values [R, Hkv, S, Dv] of a plain batch."""
    slots = world.rows.long()
    rows = len(world.requests)
    q = world.q.view(rows, -1, *world.q.shape[1:]).transpose(1, 2).contiguous()
    keys = world.keys[slots].transpose(1, 2).contiguous()
    return q, keys, world.values[slots].transpose(1, 2).contiguous()


def sdpa_ways(
    q: Tensor, keys: Tensor, values: Tensor, *, scale: float, decode: bool
) -> dict[str, Callable[[], Tensor]]:
    """Calls of SDPA that compute the batch, each returning ``[T, H, Dv]`` of all requests."""
    heads, kv_heads, width = q.shape[1], keys.shape[1], values.shape[-1]
    group = heads // kv_heads

    def call(k: Tensor, v: Tensor, gqa: bool) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=not decode, scale=scale, enable_gqa=gqa
            )
            return out[..., :width].transpose(1, 2).flatten(0, 1)

        return run

    ways = {"sdpa": call(keys, values, True)}
    padded = F.pad(values, (0, keys.shape[-1] - width))
    if keys.shape[-1] != width:
        expanded = [x.expand(-1, heads, -1, -1) for x in (keys, padded)]
        ways["sdpa, padded"] = call(keys, padded, True)
        ways["sdpa, padded and expanded"] = call(expanded[0], expanded[1], False)
    elif not decode:
        ways["sdpa, heads repeated"] = call(
            keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), False
        )
    if decode:
        stacked = q.view(q.shape[0], kv_heads, group, q.shape[-1])

        def as_rows() -> Tensor:
            out = F.scaled_dot_product_attention(stacked, keys, padded, scale=scale)
            return out[..., :width].flatten(1, 2)

        ways[HEADS_AS_ROWS] = as_rows
    return ways


def slow_path_bytes(q: Tensor, keys: Tensor, values: Tensor) -> int:
    """What SDPA's slow path holds at once: keys repeated and scaled, values repeated, and scores."""
    repeated = q.shape[1] // keys.shape[1] * (2 * keys.numel() + values.numel())
    scores = 3 * q.shape[0] * q.shape[1] * q.shape[2] * keys.shape[2]
    return 4 * (repeated + scores) + (q.element_size() < 4) * 2 * repeated


def memory_available() -> int:
    """Bytes that can be had without swapping; 0 if nobody says."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
