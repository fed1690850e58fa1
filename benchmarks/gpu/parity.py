"""A kernel's answers against the oracle, within bounds that a wrong kernel does not keep.

The kernel always runs before the oracle, so that recycled memory can not hold the answer, and slots
that belong to no part are NaN. An answer is within bounds if every output and every lse is, absolute
or relative, if the outputs point the same way, and if exactly the rows that see nothing have an lse
of -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention.world import Request, World, build
from tessera_sglang.attention.kernels.base import AttentionShape, Kernel
from tessera_sglang.attention.plan import Launch, Plan, indptr
from tessera_sglang.attention.reference import attend_reference

from .oracle import stored


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far an answer may be off."""

    absolute: float
    relative: float
    cosine: float  # below 1
    lse: float  # absolute or relative


# float32: sums in another order. bfloat16: queries turned and probabilities rounded, 2^-9 each.
BOUNDS = {
    torch.float32: Bounds(2e-5, 2e-5, 1e-7, 2e-5),
    torch.bfloat16: Bounds(4e-3, 2e-2, 1e-5, 1e-3),
}


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far an answer is off, each as a share of its bound; inf where NaN or -inf is misplaced."""

    out: float
    cosine: float
    lse: float
    log_base: float | None  # of the lse, by its size: e if all is well; None: there is no lse

    @property
    def worst(self) -> float:
        """Within bounds if at most 1."""
        return max(self.out, self.cosine, self.lse)


def deviation(
    out: Tensor, wanted: Tensor, lse: Tensor | None, wanted_lse: Tensor, bounds: Bounds
) -> Deviation:
    """Compare ``out [N, H, Dv]`` and, where there is one, ``lse [N, H]`` with the oracle's."""
    shown = ~wanted_lse.isneginf()
    found, truth = out.float()[shown], wanted[shown]
    allowed = torch.maximum(torch.full_like(truth, bounds.absolute), bounds.relative * truth.abs())
    off = _largest((found - truth).abs() / allowed)
    flat = found.flatten().double(), truth.flatten().double()
    aligned = 1.0 - float(torch.cosine_similarity(*flat, dim=0)) if len(flat[0]) else 0.0
    cosine = aligned / bounds.cosine if math.isfinite(aligned) else math.inf
    if lse is None:
        return Deviation(off, cosine, 0.0, None)
    if not torch.equal(lse.isneginf(), wanted_lse.isneginf()):
        return Deviation(off, cosine, math.inf, None)
    got, true = lse.float()[shown], wanted_lse[shown]
    allowed = bounds.lse * true.abs().clamp(min=1.0)
    slope = float((got * true).sum() / true.square().sum().clamp(min=1e-30))
    base = math.exp(1.0 / slope) if slope > 0.01 else None
    return Deviation(off, cosine, _largest((got - true).abs() / allowed), base)


def _largest(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    largest = float(x.max())  # NaN if any is
    return largest if math.isfinite(largest) else math.inf


# --- one launch: out and lse ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of one launch: query rows and keys of each."""

    name: str
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool


EDGES = (
    Parts("full parts, some empty", (1, 0, 3, 16, 2), (200, 70, 0, 129, 64), False),
    Parts("one row a part", (1, 1, 1, 1), (1, 64, 65, 700), False),
    Parts("causal parts, some rows blind", (4, 2, 5, 1), (64, 1, 130, 0), True),
)


def launch_world(shape: AttentionShape, parts: Parts, device: str, seed: int) -> World:
    """A pool with the keys of every part, and their rows."""
    requests = [Request(max(keys, 1)) for keys in parts.keys]
    return build(shape, requests, device, seed)


def check_launch(kernel: Kernel, shape: AttentionShape, parts: Parts, device: str) -> Deviation:
    """Run one launch by itself, as a pass would, and compare output and lse."""
    world = launch_world(shape, parts, device, seed=len(parts.rows))
    pieces = np.array([(part, 0, keys) for part, keys in enumerate(parts.keys)], dtype=np.int64)
    launch = Launch(
        parts.causal, indptr(np.array(parts.rows)), np.arange(len(pieces) + 1), pieces, None, None
    )
    plan = Plan(launch, (), launch.rows, False)
    begun = world.executor.begin(plan, kernel, world.rows, world.request_rows)
    generator = torch.Generator(device).manual_seed(1)
    size = (launch.rows, shape.query_heads, shape.key_width)
    q = torch.randn(size, generator=generator, device=device).to(shape.dtype)
    prepared = kernel.prepare(begun.own, shape, scale=world.scale)
    out, lse = kernel.run(prepared, q, world.keys, world.values)
    out, lse = out.clone(), lse.clone()
    wanted, wanted_lse = reference(world, launch, q)
    return deviation(out, wanted, lse, wanted_lse, BOUNDS[shape.dtype])


def reference(world: World, launch: Launch, q: Tensor) -> tuple[Tensor, Tensor]:
    """The launch by the oracle: ``out [N, H, Dv]`` and ``lse [N, H]``, float32."""
    outs, lses = [], []
    for part, (first, last) in enumerate(pairwise(launch.query_indptr.tolist())):
        request, start, end = launch.pieces[part].tolist()
        keys, values = stored(world, world.rows[request, start:end].long())
        rows, length = last - first, end - start
        seen = torch.full((rows,), length, device=q.device)
        if launch.causal:
            seen = length - rows + 1 + torch.arange(rows, device=q.device)
        mask = torch.arange(length, device=q.device)[None] < seen[:, None]
        out, lse = attend_reference(q[first:last], keys, values, mask, world.scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)
