"""`Work` for the PyTorch kernel: part by part, or, where it is to be replayed, all parts at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..packed_rows import read_rows
from .base import AttentionShape, RowFormat, Work, no_rows


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch of the PyTorch kernel."""

    work: Work
    shape: AttentionShape
    scale: float


class Attend(Protocol):
    """`TorchKernel.attend`."""

    def __call__(
        self,
        q: Tensor,
        key_buffer: Tensor,
        value_buffer: Tensor,
        slots: Tensor,
        *,
        scale: float,
        causal_from: int | None,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """One part."""
        ...


def run(
    attend: Attend,
    prepared: Prepared,
    q: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    logit_cap: float,
) -> tuple[Tensor, Tensor]:
    """Every part after the other; see `Kernel.run`."""
    work, packed = prepared.work, prepared.shape.rows is RowFormat.FP8_PACKED
    assert work.slots is not None
    rows, keys = work.host_query_indptr.tolist(), work.host_key_indptr.tolist()
    out: Tensor | None = None
    lse: Tensor | None = None
    for part in range(work.parts):
        begin, end = rows[part], rows[part + 1]
        if begin == end:
            continue
        slots = work.slots[keys[part] : keys[part + 1]]
        part_keys, part_values = key_buffer, value_buffer
        if packed:
            part_keys, part_values, slots = _unpacked(key_buffer, slots, prepared.shape)
        found, found_lse = attend(
            q[begin:end],
            part_keys,
            part_values,
            slots,
            scale=prepared.scale,
            causal_from=len(slots) - (end - begin) if work.causal and end - begin > 1 else None,
            logit_cap=logit_cap,
        )
        if end - begin == work.rows:
            return found, found_lse
        if out is None or lse is None:
            out = found.new_empty((work.rows, *found.shape[1:]))
            lse = found_lse.new_empty((work.rows, found_lse.shape[1]))
        out[begin:end] = found
        lse[begin:end] = found_lse
    if out is None or lse is None:
        return no_rows(q, prepared.shape)
    return out, lse


def run_static(
    prepared: Prepared,
    q: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    logit_cap: float,
) -> tuple[Tensor, Tensor]:
    """Parts of equally many rows against as many keys as there is room for, masked to those there are.

    Shapes depend on capacities alone and nothing is read back, so the calls can be captured and
    replayed. It reads the whole capacity: an oracle for captured graphs, and a last resort.
    """
    work, shape = prepared.work, prepared.shape
    assert work.slots is not None
    parts, heads, kv_heads = work.parts, shape.query_heads, shape.kv_heads
    rows = work.rows // parts
    slots = work.slots.view(parts, -1)  # [P, S]
    held = (work.key_indptr[1:] - work.key_indptr[:-1]).long()  # [P]
    seen = torch.arange(slots.shape[1], device=q.device) < held[:, None]  # [P, S]
    flat = torch.where(seen, slots, 0).flatten()
    if shape.rows is RowFormat.FP8_PACKED:
        row = read_rows(key_buffer[:, 0], flat, torch.float32)[:, None]
        keys, values = row, row[..., : shape.value_width]
    else:
        keys = key_buffer.index_select(0, flat).float()
        values = value_buffer.index_select(0, flat).float()
    hidden = ~seen.flatten()[:, None, None]
    k = keys.masked_fill(hidden, 0.0).view(parts, -1, kv_heads, shape.key_width)  # [P, S, Hkv, D]
    v = values.masked_fill(hidden, 0.0).view(parts, -1, kv_heads, shape.value_width)
    grouped = q.float().view(parts, rows, kv_heads, heads // kv_heads, shape.key_width)
    scores = torch.einsum("prhgd,pshd->prhgs", grouped, k) * prepared.scale
    if logit_cap > 0.0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~seen[:, None, None, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [P, r, Hkv, G]
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.einsum("prhgs,pshv->prhgv", weights, v)
    return out.reshape(-1, heads, shape.value_width), lse.reshape(-1, heads)


def _unpacked(
    key_buffer: Tensor, slots: Tensor, shape: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    """The part's rows as float32 keys and values, and the slots they then have."""
    row = read_rows(key_buffer[:, 0], slots, torch.float32)[:, None]  # [S, 1, D]
    return row, row[..., : shape.value_width], torch.arange(len(slots), device=slots.device)
