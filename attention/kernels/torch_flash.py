"""PyTorch's own CPU flash attention, which returns the log-sum-exp that merging needs.

`F.scaled_dot_product_attention` does not return it, the operator behind it does. It wants keys and
values of one width, so MLA stays with `torch_kernel`; it puts the causal diagonal at the first key, so
the keys before the first query are a part of their own; and it multiplies hidden values by zero, so
they have to be finite. Everything is float32, also where the pool is not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..merge import merge_into

_LEAST_ROWS = 16  # below, blocks of keys against stacked heads are faster
_GATHERED = 1 << 24  # elements of the keys that are gathered at a time: 64 MiB
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def suits(q: Tensor, key_buffer: Tensor, value_buffer: Tensor, logit_cap: float) -> bool:
    """Whether the operator can run this, and is the faster way."""
    return (
        q.device.type == "cpu"
        and q.shape[0] >= _LEAST_ROWS
        and key_buffer.shape[-1] == value_buffer.shape[-1]
        and logit_cap == 0.0
    )


def attend(
    q: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    slots: Tensor,
    *,
    scale: float,
    causal_from: int | None,
) -> tuple[Tensor, Tensor] | None:
    """One part; see `TorchKernel.attend`. Every row sees a key. None where a value is not finite.

    Args:
        q: ``[T, H, D]``; buffers ``[num_slots, Hkv, D]``; slots: ``[S]``.
        scale: of the scores.
        causal_from: keys before the first row, from 0 on; None: every row sees every key.

    Returns:
        ``out [T, H, D]`` and ``lse [T, H]``, float32.
    """
    rows, heads, width = q.shape
    kv_heads = key_buffer.shape[1]
    grouped = q.float().reshape(rows, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
    keys = slots.shape[0] if causal_from is None else min(slots.shape[0], causal_from + rows)
    whole = keys if causal_from is None else min(causal_from, keys)  # keys that all rows see
    out = grouped.new_empty((rows, heads, width))
    lse = grouped.new_full((rows, heads), -math.inf)
    step = max(_GATHERED // (kv_heads * width), rows)
    cuts = [(begin, min(begin + step, whole), False) for begin in range(0, whole, step)]
    if whole < keys:
        cuts.append((whole, keys, True))
    for begin, end, causal in cuts:
        found = _part(grouped, key_buffer, value_buffer, slots[begin:end], scale, causal)
        if found is None:
            return None
        part, part_lse = (_by_row(x, rows, heads) for x in found)
        if len(cuts) == 1:
            return part.contiguous(), part_lse.contiguous()
        merge_into(out, lse, part, part_lse)
    return out, lse


def _part(
    grouped: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    slots: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor] | None:
    v = value_buffer.index_select(0, slots).float().transpose(0, 1)  # [Hkv, S, D]
    if not bool(torch.isfinite(v).all()):
        return None
    k = key_buffer.index_select(0, slots).float().transpose(0, 1)
    group = grouped.shape[1]
    over_heads = (-1, group, -1, -1)
    out, lse = _flash(
        grouped,
        k[:, None].expand(over_heads),
        v[:, None].expand(over_heads),
        0.0,
        causal,
        attn_mask=None,
        scale=scale,
    )
    return out, lse  # [Hkv, G, T, D] and [Hkv, G, T]


def _by_row(x: Tensor, rows: int, heads: int) -> Tensor:
    return x.movedim(2, 0).reshape(rows, heads, *x.shape[3:])
