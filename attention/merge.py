"""Exact merge of attention over disjoint runs of keys.

If part i attended to its keys alone with output ``o_i`` and ``l_i = ln Σ exp(score)``, then over
all keys ``l = ln Σ exp(l_i)`` and ``o = Σ exp(l_i - l) · o_i``, exactly (Milakov & Gimelshein,
arXiv 1805.02867). Averaging the outputs is wrong however it is weighted otherwise.

``lse`` is a *natural* logarithm everywhere in this room; a kernel whose logarithm is of base 2
is converted by its adapter. A row that saw no key of a part has ``lse = -inf`` there, and what
its output holds is meaningless: it may be uninitialised memory, NaN included, and never shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge parts that cover the same query rows.

    Args:
        outputs: ``[T, H, Dv]`` float32 each; not modified.
        lses: ``[T, H]`` float32 each, natural logarithm; not modified.

    Returns:
        ``out [T, H, Dv]`` and ``lse [T, H]``, float32; a row empty in every part has out 0 and
        lse -inf.
    """
    if not outputs or len(outputs) != len(lses):
        raise ValueError(f"{len(outputs)} outputs and {len(lses)} lses: need as many, at least one")
    stacked = torch.stack(list(lses))  # [P, T, H]
    lse = torch.logsumexp(stacked, dim=0)  # [T, H]
    weights = torch.exp(stacked - _finite(lse))  # [P, T, H]
    out = _shown(outputs[0], lses[0]) * weights[0, ..., None]  # [T, H, Dv]
    for part, part_lse, weight in zip(outputs[1:], lses[1:], weights[1:], strict=True):
        out.addcmul_(_shown(part, part_lse), weight[..., None])
    return out, lse


def merge_into(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: slice = slice(None)
) -> None:
    """Merge a part that covers only the contiguous query ``rows`` into ``out, lse`` in place.

    Args:
        out: ``[T, H, Dv]`` float32, updated. May start uninitialised if ``lse`` starts at -inf.
        lse: ``[T, H]`` float32, updated.
        part_out: ``[rows, H, Dv]`` float32; not modified.
        part_lse: ``[rows, H]`` float32; not modified.
        rows: the query rows of the part.
    """
    out, lse = out[rows], lse[rows]  # views
    if part_lse.shape != lse.shape:
        raise ValueError(f"a part of {list(part_lse.shape)} for rows of {list(lse.shape)}")
    merged = torch.logaddexp(lse, part_lse)  # [rows, H]
    if out.device.type == "cpu" and not bool(torch.isneginf(torch.minimum(lse, part_lse)).any()):
        # Nothing to hide, which only a CPU may ask: one pass over the outputs instead of four.
        out.lerp_(part_out, torch.sigmoid(part_lse - lse)[..., None])
        lse.copy_(merged)
        return
    shift = _finite(merged)
    out.mul_(torch.exp(lse - shift)[..., None])
    out.masked_fill_(lse.isneginf()[..., None], 0.0)  # NaN times weight 0 is NaN
    out.addcmul_(_shown(part_out, part_lse), torch.exp(part_lse - shift)[..., None])
    lse.copy_(merged)


def merge_at(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    rows: slice | Tensor,
    queries: slice | Tensor,
) -> None:
    """Merge the ``rows`` of stacked parts into the ``queries`` that they belong to, in place.

    Args:
        out: ``[T, H, Dv]`` float32, updated.
        lse: ``[T, H]`` float32, updated.
        part_out: ``[N, H, Dv]`` float32 or narrower; part_lse: ``[N, H]`` float32. Not modified.
        rows: which of the N stacked rows; a slice, or int64 indices.
        queries: the query of each of them, each at most once; likewise.
    """
    if isinstance(rows, slice) and isinstance(queries, slice):
        merge_into(out, lse, part_out[rows].float(), part_lse[rows], queries)
        return
    merged_out, merged_lse = merge(
        [out[queries], part_out[rows].float()], [lse[queries], part_lse[rows]]
    )
    out[queries] = merged_out
    lse[queries] = merged_lse


def merge_by_table(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge any number of stacked rows into each query at once; few queries, as in decode.

    Args:
        out: ``[T, H, Dv]`` float32; lse: ``[T, H]`` float32. Not modified.
        part_out: ``[N, H, Dv]`` float32 or narrower; part_lse: ``[N, H]`` float32.
        table: ``[T, S]`` int64, the stacked rows of each query, N where it has no more.

    Returns:
        ``out [T, H, Dv]`` and ``lse [T, H]``, float32.
    """
    if part_lse.shape[0] == 0:
        return out, lse
    padded = torch.nn.functional.pad(part_lse, (0, 0, 0, 1), value=-math.inf)  # [N + 1, H]
    lses = torch.cat([lse[:, None], padded[table]], dim=1)  # [T, 1 + S, H]
    merged = torch.logsumexp(lses, dim=1)  # [T, H]
    weights = torch.exp(lses - _finite(merged)[:, None])  # [T, 1 + S, H]
    result = _shown(out, lse) * weights[:, 0, :, None]
    at = table.clamp(max=part_lse.shape[0] - 1)
    for column in range(table.shape[1]):
        part = part_out.index_select(0, at[:, column]).float()  # [T, H, Dv]
        result.addcmul_(_shown(part, lses[:, column + 1]), weights[:, column + 1, :, None])
    return result, merged


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 for -inf, so that exp(-inf - lse) of an empty row is 0 and not NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _shown(out: Tensor, lse: Tensor) -> Tensor:
    """out [T, H, Dv] with 0 where the row saw nothing."""
    return out.masked_fill(lse.isneginf()[..., None], 0.0)
