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
    shift = _finite(merged)
    out.mul_(torch.exp(lse - shift)[..., None])
    out.masked_fill_(lse.isneginf()[..., None], 0.0)  # NaN times weight 0 is NaN
    out.addcmul_(_shown(part_out, part_lse), torch.exp(part_lse - shift)[..., None])
    lse.copy_(merged)


def _finite(lse: Tensor) -> Tensor:
    """lse with 0 for -inf, so that exp(-inf - lse) of an empty row is 0 and not NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _shown(out: Tensor, lse: Tensor) -> Tensor:
    """out [T, H, Dv] with 0 where the row saw nothing."""
    return out.masked_fill(lse.isneginf()[..., None], 0.0)
