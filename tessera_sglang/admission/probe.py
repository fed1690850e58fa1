"""A few tokens through an MLA layer's own projections: what no shape can show.

Which rows of a fused projection are which, whether the norm sits on the latent alone, and which
channels are rotated, is decided by the code that splits the product. So seeded hidden states go through
that code, and through the formulas over the raw weights, and the four results must agree.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tessera_sglang.attention.rope import Pairing
from tessera_sglang.compat import AttentionInputs, ForwardMode, get_attn_tp_context
from tessera_sglang.config import BACKEND

from .checks import AdmissionError, Checks, is_plain

if TYPE_CHECKING:
    from .latent import LatentWidths

POSITIONS = (0, 1, 7, 33, 101)
_FAR = 0.1  # of the expected norm: rounding of 16-bit weights stays below, another order is at 1.4


def try_projections(
    checks: Checks, path: str, module: Any, w: LatentWidths, pairing: Pairing
) -> bool:
    """Compare one layer by value; False where that can not be done. Raises AdmissionError."""
    query: Any = getattr(module, "q_b_proj" if w.query_latent else "q_proj", None)
    latent: Any = getattr(module, _latent_projection(w), None)
    rope = getattr(module, "rotary_emb", None)
    norms = [module.kv_a_layernorm] + ([module.q_a_layernorm] if w.query_latent else [])
    known = all(type(norm).__name__ == "RMSNorm" for norm in norms)
    if not is_plain(query, latent, *norms) or not known or module.w_kc is None or rope is None:
        checks.leave_out("projection path (quantised weights or unknown parts)")
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((len(POSITIONS), w.hidden), generator=generator).to(latent.weight)
    positions = torch.tensor(POSITIONS, device=x.device)
    with torch.no_grad():
        try:
            found = _through_the_module(module, x.clone(), positions)
        except Exception as error:  # the code that runs the layer is not ours to refuse
            checks.leave_out(f"projection path ({type(error).__name__}: {error})")
            return False
        wanted = _by_the_formulas(module, w, x, positions, query, latent, pairing)
    kv = _latent_projection(w)
    q = "q_b_proj" if w.query_latent else "q_proj"
    meanings = (
        (f"{path}.{q}.weight", "rows [q_nope, q_rope] per head, q_rope rotated by the table"),
        (f"{path}.{kv}.weight", "k_rope behind c_kv, rotated by the table and not normalised"),
        (f"{path}.w_kc", "q_nope absorbed into the latent"),
        (f"{path}.{kv}.weight", "c_kv before k_rope, kv_a_layernorm over c_kv alone"),
    )
    for (where, meaning), got, ours in zip(meanings, found, wanted, strict=True):
        ours = ours.float().flatten()
        far = float((got.float().flatten() - ours).norm() / ours.norm().clamp_min(1e-30))
        if not far <= _FAR:
            raise AdmissionError(
                f"{where}: wanted {meaning}; found the layer's own result off by {far:.2f} of its "
                "norm (seeded hidden states through the layer's projections)"
            )
    return True


def _latent_projection(w: LatentWidths) -> str:
    return "fused_qkv_a_proj_with_mqa" if w.query_latent else "kv_a_proj_with_mqa"


def _through_the_module(module: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """q_rope, k_rope, absorbed q_nope and c_kv, as the layer hands them to attention."""
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, attn_cp_metadata=None)
    context = get_attn_tp_context()
    before = module.current_attention_backend
    module.current_attention_backend = BACKEND
    if getattr(module, "q_lora_rank", None) is not None:
        context.set_attn_inputs(AttentionInputs(x, batch, module.prepare_qkv_latent))
    try:
        return tuple(module.forward_absorb_prepare(positions, x, batch, None)[:4])
    finally:
        context.clear_attn_inputs()
        module.current_attention_backend = before


def _by_the_formulas(
    module: Any,
    w: LatentWidths,
    x: Tensor,  # [T, hidden]
    positions: Tensor,
    query: Any,
    latent: Any,
    pairing: Pairing,
) -> tuple[Tensor, ...]:
    row = linear(x, latent.weight)  # [T, (q_a +) c_kv + k_rope]
    q_a, c_kv, k_rope = torch.split(row, [w.query_latent, w.latent, w.rope], dim=-1)
    source = _normed(q_a, module.q_a_layernorm) if w.query_latent else x
    q = linear(source, query.weight).view(-1, w.heads, w.nope + w.rope)  # [T, H, nope+rope]
    q_nope, q_rope = torch.split(q, [w.nope, w.rope], dim=-1)
    per_head = module.w_kc  # [H, nope, c_kv], compared with kv_b_proj before
    return (
        _turned(q_rope, module.rotary_emb.cos_sin_cache, positions, pairing),
        _turned(k_rope[:, None], module.rotary_emb.cos_sin_cache, positions, pairing),
        torch.einsum("thn,hnc->thc", q_nope.float(), per_head.float()),
        _normed(c_kv, module.kv_a_layernorm),
    )


def _normed(x: Tensor, norm: Any) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    normed: Tensor = (wide * norm.weight.float()).to(x.dtype)
    return normed


def _turned(x: Tensor, table: Tensor, positions: Tensor, pairing: Pairing) -> Tensor:
    """x [T, H, rope] by the rows of the table."""
    cos, sin = table.to(x.device)[positions].float()[:, None].chunk(2, dim=-1)
    wide = x.float()
    if pairing is Pairing.INTERLEAVED:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    if pairing is Pairing.INTERLEAVED:
        return torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat(turned, dim=-1)
