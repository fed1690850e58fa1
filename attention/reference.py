"""The oracle: attention as the papers write it, slow and plain. Tests and `verify` only.

Everything is computed in float64 from whatever dtype comes in and returned in float32. MLA is
here twice: *naive*, with keys and values expanded per head, and *absorbed*, on the cached latent
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C). The two are the same function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    out, lse = _attend(q.double(), k.double(), v.double(), mask, scale, logit_cap)
    return out.float(), lse.float()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, logit_cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)  # [S, H, D]
    v = v.repeat_interleave(group, dim=1)  # [S, H, Dv]
    scores = torch.einsum("thd,shd->ths", q, k) * scale  # [T, H, S]
    if logit_cap > 0.0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [T, H]
    p = torch.exp(scores - lse[..., None])  # [T, H, S], NaN in rows that see nothing
    p = p.masked_fill(~mask[:, None, :], 0.0)
    # 0 · NaN is NaN: keep broken values out of the sum, then show them to the rows that see them.
    broken = ~torch.isfinite(v)  # [S, H, Dv]
    out = torch.einsum("ths,shd->thd", p, v.masked_fill(broken, 0.0))  # [T, H, Dv]
    if bool(broken.any()):
        sees_broken = torch.einsum("ts,shd->thd", mask.double(), broken.double()) > 0.0
        out = out.masked_fill(sees_broken, float("nan"))
    return out, lse


@dataclass(frozen=True, slots=True)
class MLAWeights:
    """The up-projections of one MLA layer, per head, and its output projection."""

    w_uk: Tensor  # [H, nope, rank]    latent -> key without rotary channels
    w_uv: Tensor  # [H, rank, v_dim]   latent -> value
    w_o: Tensor  # [H, v_dim, hidden]


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
    """MLA with keys and values expanded per head.

    Args:
        q_nope: ``[T, H, nope]``; q_rope: ``[T, H, rope]``, rotated.
        latent: ``[S, rank]``; k_rope: ``[S, rope]``, rotated, shared by the heads.
        mask: ``[T, S]`` bool, True = visible.
        scale: of the scores, see `rope.mla_softmax_scale`.

    Returns:
        ``[T, hidden]`` float32.
    """
    heads, latent = q_nope.shape[1], latent.double()
    k_nope = torch.einsum("sr,hnr->shn", latent, weights.w_uk.double())  # [S, H, nope]
    k_shared = k_rope.double()[:, None].expand(-1, heads, -1)  # [S, H, rope]
    v = torch.einsum("sr,hrv->shv", latent, weights.w_uv.double())  # [S, H, v_dim]
    q = torch.cat([q_nope, q_rope], dim=-1).double()  # [T, H, nope + rope]
    out, _ = _attend(q, torch.cat([k_nope, k_shared], dim=-1), v, mask, scale)  # [T, H, v_dim]
    return torch.einsum("thv,hvm->tm", out, weights.w_o.double()).float()


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
    """`mla_naive` on the latent itself: one KV head whose values are a slice of its keys.

    ``one_output_product`` applies W_O · W_UV at once instead of one after the other.
    """
    row = torch.cat([latent, k_rope], dim=-1).double()[:, None]  # [S, 1, rank + rope]: the cache
    q_latent = absorb_query(q_nope.double(), weights.w_uk.double())  # [T, H, rank]
    q = torch.cat([q_latent, q_rope.double()], dim=-1)  # [T, H, rank + rope]
    out, _ = _attend(q, row, row[..., : latent.shape[-1]], mask, scale)  # [T, H, rank]
    w_uv, w_o = weights.w_uv.double(), weights.w_o.double()
    if one_output_product:
        return torch.einsum("thr,hrm->tm", out, absorb_output(w_uv, w_o)).float()
    values = torch.einsum("thr,hrv->thv", out, w_uv)  # [T, H, v_dim]
    return torch.einsum("thv,hvm->tm", values, w_o).float()
