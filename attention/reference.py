"""The oracle: attention as the papers write it, slow and plain. Tests and `verify` only.

Everything is computed in float64 from whatever dtype comes in and returned in float32. MLA is
here twice: *naive*, with keys and values expanded per head, and *absorbed*, on the cached latent
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C). The two are the same function; a
`MLATrace` holds what each of them computes on the way, so that a disagreement can be located.

A trace can also be had in a lower ``precision``: the rungs of a ladder from the oracle down to the
arithmetic of an engine. float32 computes in float32. bfloat16 (or float16) rounds every tensor that
an engine stores in that dtype (queries, cache rows, weights and what they project to) and sums in
float32; scores, probabilities and lse are never stored and stay float32.

`causal_mask` covers prefill, append and decode, `verify_mask` the verification of drafted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def causal_mask(queries: int, keys: int) -> Tensor:
    """Mask ``[queries, keys]`` bool of the last ``queries`` of ``keys`` tokens, True = visible.

    Prefill has as many queries as keys, append fewer, decode one. `ValueError` if there are more.
    """
    if not 0 <= queries <= keys:
        raise ValueError(f"{queries} queries are not the last tokens of {keys}")
    last_seen = torch.arange(keys - queries, keys)  # by each query: itself
    return torch.arange(keys)[None] <= last_seen[:, None]


def verify_mask(prefix: int, parents: Sequence[int]) -> Tensor:
    """Mask ``[N, prefix + N]`` bool of a tree of N drafted tokens behind ``prefix`` tokens.

    A drafted token sees the prefix, its ancestors and itself. ``parents[i]`` is the drafted token
    that i continues, -1 = the prefix; parents come first, else `ValueError`. A chain is
    ``range(-1, N - 1)`` and gives the mask of an append.
    """
    tree = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if not -1 <= parent < token:
            raise ValueError(f"drafted token {token} can not continue token {parent}")
        if parent >= 0:
            tree[token] = tree[parent]
        tree[token, token] = True
    return torch.cat([torch.ones(len(parents), prefix, dtype=torch.bool), tree], dim=1)


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, logit_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Softmax attention with grouped heads: query head h reads KV head ``h // (H/Hkv)``.

    Args:
        q: ``[T, H, D]``; k: ``[S, Hkv, D]``; v: ``[S, Hkv, Dv]``; any float dtype.
        mask: ``[T, S]`` bool, True = visible. What an invisible key holds never shows.
        scale: of the scores.
        logit_cap: scores become ``cap · tanh(score / cap)``; 0 = none.

    Returns:
        ``out [T, H, Dv]`` and natural-log ``lse [T, H]``, float32; rows that see nothing have
        out 0 and lse -inf.
    """
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)  # [S, H, D]
    v = v.double().repeat_interleave(group, dim=1)  # [S, H, Dv]
    scores = torch.einsum("thd,shd->ths", q.double(), k) * scale  # [T, H, S]
    if logit_cap > 0.0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    p, _, lse = _softmax(scores, mask)
    return _weigh(p, v, mask).float(), lse.float()


@dataclass(frozen=True, slots=True)
class MLAWeights:
    """The up-projections of one MLA layer, per head, and its output projection."""

    w_uk: Tensor  # [H, nope, rank]    latent -> key without rotary channels
    w_uv: Tensor  # [H, rank, v_dim]   latent -> value
    w_o: Tensor  # [H, v_dim, hidden]


@dataclass(frozen=True, slots=True)
class MLATrace:
    """Everything MLA computes on the way, float32. The score is ``content + position``."""

    content: Tensor  # [T, H, S] scaled q_nope · k_nope, 0 where the key is invisible
    position: Tensor  # [T, H, S] scaled q_rope · k_rope, 0 where the key is invisible
    row_max: Tensor  # [T, H] highest visible score, -inf if none is visible
    lse: Tensor  # [T, H] natural logarithm of Σ exp(score), -inf if no key is visible
    latent_out: Tensor | None  # [T, H, rank] before W_UV; None: the naive form has none
    head_out: Tensor  # [T, H, v_dim] after W_UV
    out: Tensor  # [T, hidden] after W_O


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """W_UK into the query, ``[T, H, nope] -> [T, H, rank]``: qᵀ(W_UK c) = (W_UKᵀ q)ᵀ c."""
    return torch.einsum("thn,hnr->thr", q_nope, w_uk)


def absorb_output(w_uv: Tensor, w_o: Tensor) -> Tensor:
    """W_O · W_UV as one product per head, ``[H, rank, hidden]``."""
    return torch.einsum("hrv,hvm->hrm", w_uv, w_o)


def mla_naive(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weights: MLAWeights,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """MLA with keys and values expanded per head: the ``out`` of `trace_naive`."""
    return trace_naive(q_nope, q_rope, latent, k_rope, weights, mask, scale).out


def mla_absorbed(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weights: MLAWeights,
    mask: Tensor,
    scale: float,
    *,
    one_output_product: bool = False,
) -> Tensor:
    """`mla_naive` on the latent itself: the ``out`` of `trace_absorbed`."""
    inputs = (q_nope, q_rope, latent, k_rope, weights, mask, scale)
    return trace_absorbed(*inputs, one_output_product=one_output_product).out


def trace_naive(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weights: MLAWeights,
    mask: Tensor,
    scale: float,
    *,
    precision: torch.dtype = torch.float64,
) -> MLATrace:
    """MLA with keys and values expanded per head.

    Args:
        q_nope: ``[T, H, nope]``; q_rope: ``[T, H, rope]``, rotated; any float dtype.
        latent: ``[S, rank]``; k_rope: ``[S, rope]``, rotated, shared by the heads.
        weights: of the layer, any float dtype.
        mask: ``[T, S]`` bool, True = visible. What an invisible key holds never shows.
        scale: of the scores, see `rope.mla_softmax_scale`.
        precision: of the arithmetic, see the module.
    """
    latent = _stored(latent, precision)
    k_nope = torch.einsum("sr,hnr->shn", latent, _stored(weights.w_uk, precision))  # [S, H, nope]
    v = torch.einsum("sr,hrv->shv", latent, _stored(weights.w_uv, precision))  # [S, H, v_dim]
    q, k = _stored(q_nope, precision), _stored(k_nope, precision)
    content = torch.einsum("thn,shn->ths", q, k) * scale  # [T, H, S]
    position = _position(q_rope, k_rope, scale, precision)
    p, top, lse = _softmax(content + position, mask)
    head_out = _stored(_weigh(p, _stored(v, precision), mask), precision)  # [T, H, v_dim]
    out = torch.einsum("thv,hvm->tm", head_out, _stored(weights.w_o, precision))
    content, position = _visible(content, mask), _visible(position, mask)
    rest = head_out.float(), _stored(out, precision).float()
    return MLATrace(content, position, top.float(), lse.float(), None, *rest)


def trace_absorbed(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weights: MLAWeights,
    mask: Tensor,
    scale: float,
    *,
    precision: torch.dtype = torch.float64,
    one_output_product: bool = False,
) -> MLATrace:
    """`trace_naive` on the latent itself: one KV head whose values are a slice of its keys.

    W_UK is contracted into the query. ``one_output_product`` computes ``out`` with W_O · W_UV at
    once instead of one after the other; ``head_out`` is then not on the way, but still there.
    """
    latent = _stored(latent, precision)  # [S, rank]
    w_uv, w_o = _stored(weights.w_uv, precision), _stored(weights.w_o, precision)
    q_latent = absorb_query(_stored(q_nope, precision), _stored(weights.w_uk, precision))
    content = torch.einsum("thr,sr->ths", _stored(q_latent, precision), latent) * scale
    position = _position(q_rope, k_rope, scale, precision)
    p, top, lse = _softmax(content + position, mask)
    latent_out = _stored(_weigh(p, latent[:, None], mask), precision)  # [T, H, rank]
    head_out = _stored(torch.einsum("thr,hrv->thv", latent_out, w_uv), precision)
    if one_output_product:
        product = _stored(absorb_output(w_uv, w_o), precision)  # [H, rank, hidden]
        out = torch.einsum("thr,hrm->tm", latent_out, product)
    else:
        out = torch.einsum("thv,hvm->tm", head_out, w_o)
    content, position = _visible(content, mask), _visible(position, mask)
    rest = head_out.float(), _stored(out, precision).float()
    return MLATrace(content, position, top.float(), lse.float(), latent_out.float(), *rest)


def _stored(x: Tensor, precision: torch.dtype) -> Tensor:
    """What is left of ``x`` after storing it in ``precision``, in the dtype that sums have."""
    sums = torch.float64 if precision == torch.float64 else torch.float32
    return x.to(precision).to(sums)


def _position(q_rope: Tensor, k_rope: Tensor, scale: float, precision: torch.dtype) -> Tensor:
    q, k = _stored(q_rope, precision), _stored(k_rope, precision)
    return torch.einsum("thr,sr->ths", q, k) * scale


def _visible(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask[:, None, :], 0.0).float()  # [T, H, S]


def _softmax(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p [T, H, S], row maximum [T, H] and lse [T, H] of scores [T, H, S] over visible keys."""
    hidden = ~mask[:, None, :]
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse[..., None])  # NaN in rows that see nothing
    nothing = scores.new_full((*scores.shape[:2], 1), -math.inf)  # amax wants at least one key
    top = torch.cat([scores, nothing], dim=-1).amax(-1)
    return p.masked_fill(hidden, 0.0), top, lse


def _weigh(p: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Σ p · v, ``[T, H, Dv]``, of p [T, H, S] and v [S, H, Dv] or, one for all heads, [S, 1, Dv]."""
    # 0 · NaN is NaN: keep broken values out of the sum, then show them to the rows that see them.
    broken = ~torch.isfinite(v)  # as v
    out = torch.einsum("ths,shd->thd", p, v.masked_fill(broken, 0.0))  # [T, H, Dv]
    if bool(broken.any()):
        sees_broken = torch.einsum("ts,shd->thd", mask.to(p.dtype), broken.to(p.dtype)) > 0.0
        out = out.masked_fill(sees_broken, math.nan)
    return out
