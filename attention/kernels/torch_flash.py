"""PyTorch's own CPU flash attention, which returns the log-sum-exp that merging needs.

`F.scaled_dot_product_attention` does not return it, the operator behind it does. It wants keys and
values of one width, so MLA stays with `torch_kernel`; it puts the causal diagonal at the first key, so
the keys before the first query are a part of their own; and it multiplies hidden values by zero, so
those of the diagonal have to be finite. Everything is float32, also where the pool is not: bfloat16
would be no faster, and would round what is merged. Heads go a few at a time: converted queries and
outputs then stay in the cache, where fresh memory of a whole batch's size would cost page faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..merge import merge_into

_LEAST_ROWS = 16  # below, blocks of keys against stacked heads are faster
_GATHERED = 1 << 24  # elements of the keys that are gathered at a time
_QUERIES = 1 << 20  # elements of the queries of one call: what it needs is soon used again
_LEAST_HEADS = 4  # of one call, so that threads share a causal triangle evenly
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
    """One part; see `TorchKernel.attend`. Every row sees a key. None where a hidden value is broken.

    Args:
        q: ``[T, H, D]``; buffers ``[num_slots, Hkv, D]``; slots: ``[S]``.
        scale: of the scores.
        causal_from: keys before the first row, from 0 on; None: every row sees every key.

    Returns:
        ``out [T, H, D]`` and ``lse [T, H]``, float32.
    """
    rows, heads, width = q.shape
    kv_heads = key_buffer.shape[1]
    out = q.new_empty((rows, heads, width), dtype=torch.float32)
    lse = q.new_empty((rows, heads), dtype=torch.float32)
    for begin, end, causal in _cuts(slots.shape[0], rows, kv_heads * width, causal_from):
        k = key_buffer.index_select(0, slots[begin:end])  # [S, Hkv, D]
        v = value_buffer.index_select(0, slots[begin:end])
        if causal and not _finite(v):
            return None
        for some, kv_some in _head_groups(rows, heads, kv_heads, width):
            found = _call(q[:, some], k[:, kv_some], v[:, kv_some], scale, causal)
            if begin == 0:
                out[:, some], lse[:, some] = found
            else:
                merge_into(out[:, some], lse[:, some], *found)
    return out, lse


def _cuts(
    keys: int, rows: int, key_elements: int, causal_from: int | None
) -> list[tuple[int, int, bool]]:
    """Runs of keys, the first of which begins at 0: where they start and end, and if causally seen."""
    if causal_from is not None:
        keys = min(keys, causal_from + rows)
    whole = keys if causal_from is None else min(causal_from, keys)  # keys that all rows see
    step = max(_GATHERED // key_elements, rows)
    cuts = [(begin, min(begin + step, whole), False) for begin in range(0, whole, step)]
    return [*cuts, (whole, keys, True)] if whole < keys else cuts


def _head_groups(rows: int, heads: int, kv_heads: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Query heads of one call, and the KV heads that they read."""
    group = heads // kv_heads
    step = max(max(_QUERIES // (rows * width), _LEAST_HEADS) // group, 1)
    for begin in range(0, kv_heads, step):
        end = min(begin + step, kv_heads)
        yield slice(begin * group, end * group), slice(begin, end)


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q ``[T, h, D]`` against k and v ``[S, hkv, D]``: out ``[T, h, D]`` and lse ``[T, h]``."""
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().reshape(rows, kv_heads, -1, width).permute(1, 2, 0, 3)  # [hkv, G, T, D]
    over_heads = (-1, heads // kv_heads, -1, -1)
    out, lse = _flash(
        grouped,
        _by_head(k)[:, None].expand(over_heads),
        _by_head(v)[:, None].expand(over_heads),
        0.0,
        causal,
        attn_mask=None,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


def _by_head(x: Tensor) -> Tensor:
    """Keys ``[S, hkv, D]`` as float32 ``[hkv, S, D]``, each head's together: a twentieth is gained."""
    return x.transpose(0, 1).contiguous().float()


def _finite(x: Tensor) -> bool:
    """Whether nothing is broken, read once; a sum that overflows counts as broken too."""
    return bool(torch.isfinite(x.sum(dtype=torch.float32)))
