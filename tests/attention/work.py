"""Launches for kernel tests: `Work` built from lists of parts, pools with NaN wherever no key is, and
the oracle over the same `Work`.

    pool = make_pool([130, 65], kv_heads=1, key_width=576, value_width=512, latent=True)
    work = make_work([(1, pool.slots[0]), (7, pool.slots[1])], causal=False)
    check(kernel, shape, work, q, pool, scale=0.1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera_sglang.attention.kernels.base import AttentionShape, Work
from tessera_sglang.attention.reference import attend_reference

Sizes = tuple[tuple[int, int], ...]  # query rows and keys of each part

DECODE: Sizes = tuple((1, keys) for keys in (1, 63, 64, 65, 127, 129, 700))
STACKED: Sizes = ((3, 65), (1, 129), (16, 300), (2, 0), (1, 1), (5, 64), (5, 128))
VERIFY: Sizes = ((4, 4), (4, 65), (3, 129), (1, 1), (4, 700))
PREFILL: Sizes = ((100, 100), (7, 129), (1, 64), (65, 400))

# Query rows, and where the keys lie: slots [S] int64, or (pages [ceil(S/page)], S).
Part = tuple[int, Tensor | tuple[Tensor, int]]


def make_work(
    parts: Sequence[Part],
    causal: bool = False,
    page_tokens: int = 64,
    *,
    capacity: int | None = None,
    device: torch.device | str = "cpu",
) -> Work:
    """The launch of these parts, with both tables: slots, and pages where the slots form pages.

    With ``capacity`` (keys of a part at most) the work is static: the tables are buffers with room for
    ``capacity`` keys a part, the slots and pages of each at a fixed stride.
    """
    rows = [queries for queries, _ in parts]
    slots = [_slots(keys, page_tokens) for _, keys in parts]
    pages = [_pages(keys, page_tokens) for _, keys in parts]
    paged = all(part is not None for part in pages)
    lengths = [len(part) for part in slots]
    page_counts = [-(-length // page_tokens) for length in lengths]
    all_slots = torch.cat([*slots, torch.empty(0, dtype=torch.int64)])
    all_pages = torch.cat([torch.empty(0, dtype=torch.int32), *(p for p in pages if p is not None)])
    host_keys, page_indptr = _indptr(lengths), _indptr(page_counts)
    if capacity is not None:
        assert not causal
        assert len(set(rows)) <= 1, "parts of static work have as many rows"
        assert max(lengths, default=0) <= capacity
        stride = -(-capacity // page_tokens)
        room = torch.zeros(len(parts), capacity, dtype=torch.int64)
        for line, part in zip(room, slots, strict=True):
            line[: len(part)] = part
        table = torch.zeros(len(parts), stride, dtype=torch.int32)
        for line, part in zip(table, pages, strict=True):
            if part is not None:
                line[: len(part)] = part
        all_slots, all_pages = room.reshape(-1), table.reshape(-1)
        host_keys = np.arange(len(parts) + 1, dtype=np.int64) * capacity
        page_indptr = np.arange(len(parts) + 1, dtype=np.int64) * stride

    def put(values: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values).to(device, dtype)

    return Work(
        causal=causal,
        page_tokens=page_tokens,
        query_indptr=put(_indptr(rows), torch.int32),
        key_indptr=put(_indptr(lengths), torch.int32),
        slots=all_slots.to(device),
        page_indptr=put(page_indptr, torch.int32) if paged else None,
        pages=all_pages.to(device) if paged else None,
        host_query_indptr=_indptr(rows),
        host_key_indptr=host_keys,
        static=capacity is not None,
    )


def reference_parts(
    work: Work, q: Tensor, keys: Tensor, values: Tensor, scale: float, logit_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What a kernel has to return, on the host: ``out [N, H, Dv]`` and ``lse [N, H]``, float32.

    Reads slots if the work has them, else pages; lengths from the device tensors.
    """
    q, keys, values = q.cpu(), keys.cpu(), values.cpu()
    outs = [torch.empty(0, q.shape[1], values.shape[-1])]
    lses = [torch.empty(0, q.shape[1])]
    for part, slots in enumerate(part_slots(work)):
        first, last = work.host_query_indptr[part : part + 2].tolist()
        rows, length = last - first, len(slots)
        seen = torch.full((rows,), length)  # keys that each row sees
        if work.causal:
            seen = length - rows + 1 + torch.arange(rows)
        mask = torch.arange(length)[None] < seen[:, None]
        out, lse = attend_reference(
            q[first:last], keys[slots], values[slots], mask, scale, logit_cap
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def part_slots(work: Work) -> list[Tensor]:
    """The slots of every part, on the host."""
    bounds = list(pairwise(work.key_indptr.tolist()))
    if work.slots is not None:
        starts = (work.host_key_indptr if work.static else work.key_indptr).tolist()
        return [
            work.slots[start : start + b - a].cpu()
            for (a, b), start in zip(bounds, starts, strict=False)
        ]
    assert work.pages is not None
    assert work.page_indptr is not None
    starts = work.page_indptr.tolist()
    tokens = torch.arange(work.page_tokens)
    found = []
    for (a, b), start in zip(bounds, starts, strict=False):
        pages = work.pages[start : start - (-(b - a) // work.page_tokens)].cpu().long()
        found.append((pages[:, None] * work.page_tokens + tokens).reshape(-1)[: b - a])
    return found


@dataclass(frozen=True)
class Pool:
    """One layer's buffers. What is in no part's slots is NaN."""

    keys: Tensor  # [num_slots, Hkv, D]
    values: Tensor  # [num_slots, Hkv, Dv]
    slots: tuple[Tensor, ...]  # [S] int64 of each run of keys, on the host, in whole pages

    def to(self, device: torch.device | str) -> Pool:
        """The buffers on ``device``; values stay a view of keys if they were."""
        keys = self.keys.to(device)
        if self.values.data_ptr() == self.keys.data_ptr():
            return Pool(keys, keys[..., : self.values.shape[-1]], self.slots)
        return Pool(keys, self.values.to(device), self.slots)


def make_pool(
    lengths: Sequence[int],
    *,
    kv_heads: int,
    key_width: int,
    value_width: int,
    latent: bool = False,
    dtype: torch.dtype = torch.float32,
    page_tokens: int = 64,
    seed: int = 0,
) -> Pool:
    """Runs of keys in whole pages, pages shuffled over a pool with spare ones."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_tokens) for length in lengths]
    spare = 3
    order = torch.randperm(sum(counts) + spare, generator=random)
    slots, taken = [], 0
    for length, count in zip(lengths, counts, strict=True):
        pages = order[taken : taken + count]
        taken += count
        slots.append(
            (pages[:, None] * page_tokens + torch.arange(page_tokens)).reshape(-1)[:length]
        )
    total = len(order) * page_tokens
    used = torch.cat([*slots, torch.empty(0, dtype=torch.int64)])

    def fill(width: int) -> Tensor:
        buffer = torch.full((total, kv_heads, width), math.nan, dtype=dtype)
        buffer[used] = torch.randn(len(used), kv_heads, width, generator=random).to(dtype)
        return buffer

    keys = fill(key_width)
    return Pool(keys, keys[..., :value_width] if latent else fill(value_width), tuple(slots))


def work_of(
    parts: Sizes,
    causal: bool = False,
    capacity: int | None = None,
    **pool: Any,
) -> tuple[Work, Pool]:
    """A launch of parts of these sizes over a pool of its own, small MLA rows unless told otherwise."""
    shape = {"kv_heads": 1, "key_width": 8, "value_width": 4, "latent": True, **pool}
    made = make_pool([keys for _, keys in parts], **shape)
    described = [(rows, slots) for (rows, _), slots in zip(parts, made.slots, strict=True)]
    return make_work(described, causal, capacity=capacity), made


def check(
    kernel: Any,
    shape: AttentionShape,
    work: Work,
    q: Tensor,
    pool: Pool,
    *,
    scale: float,
    logit_cap: float = 0.0,
    tolerance: float = 2e-5,
    cosine: float = 1e-7,
) -> None:
    """The kernel, then the oracle: the order keeps the answer out of recycled memory."""
    before = q.clone(), pool.keys.clone()
    prepared = kernel.prepare(work, shape, scale=scale)
    out, lse = kernel.run(prepared, q, pool.keys, pool.values, logit_cap=logit_cap)
    assert torch.equal(q, before[0]), "the kernel wrote into its queries"
    assert torch.equal(pool.keys.nan_to_num(), before[1].nan_to_num()), "… into the pool"
    assert lse.dtype == torch.float32
    assert out.dtype in (torch.float32, q.dtype)
    out, lse = out.cpu().float(), lse.cpu()
    wanted, wanted_lse = reference_parts(work, q, pool.keys, pool.values, scale, logit_cap)
    assert out.shape == wanted.shape
    assert lse.shape == wanted_lse.shape
    assert torch.equal(lse.isneginf(), wanted_lse.isneginf()), "rows that see nothing"
    torch.testing.assert_close(lse, wanted_lse, rtol=tolerance, atol=tolerance)
    shown = ~wanted_lse.isneginf()
    torch.testing.assert_close(out[shown], wanted[shown], rtol=tolerance, atol=tolerance)
    if bool(wanted[shown].any()):
        pair = out[shown].flatten().double(), wanted[shown].flatten().double()
        assert float(torch.cosine_similarity(*pair, dim=0)) > 1 - cosine


def _slots(keys: Tensor | tuple[Tensor, int], page_tokens: int) -> Tensor:
    if isinstance(keys, Tensor):
        return keys.cpu().long()
    pages, length = keys
    tokens = torch.arange(page_tokens)
    return (pages.cpu().long()[:, None] * page_tokens + tokens).reshape(-1)[:length]


def _pages(keys: Tensor | tuple[Tensor, int], page_tokens: int) -> Tensor | None:
    """Page ids [ceil(S/page)] int32, or None if the slots do not form pages."""
    if not isinstance(keys, Tensor):
        return keys[0].cpu().to(torch.int32)
    pages = keys.cpu()[::page_tokens] // page_tokens
    if not torch.equal(_slots((pages, len(keys)), page_tokens), keys.cpu().long()):
        return None
    return pages.to(torch.int32)


def _indptr(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(np.int64)
