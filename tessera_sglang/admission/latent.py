"""Layers that cache a latent: DeepSeek's MLA and its kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tessera_sglang.attention.rope import Pairing, mla_softmax_scale

from .checks import PLAIN, AdmissionError, Checks, Config, Deployment, is_plain, share_of
from .probe import try_projections
from .rotary import check_rope, rope_parameters


@dataclass(frozen=True, slots=True)
class LatentWidths:
    """What the configuration says of every layer."""

    hidden: int
    heads: int  # of this rank
    latent: int
    rope: int
    nope: int
    value: int
    query_latent: int  # 0 where queries are projected in one step

    @classmethod
    def read(cls, config: Config, ranks: int) -> LatentWidths:
        """From a configuration; AdmissionError where a number is missing."""
        numbers = {}
        for field in (
            *("hidden_size", "num_attention_heads", "kv_lora_rank"),
            *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        ):
            value = config.get(field)
            if not isinstance(value, int):
                raise AdmissionError(f"config {field}: wanted a whole number; found {value!r}")
            numbers[field] = value
        return cls(
            hidden=numbers["hidden_size"],
            heads=share_of(config, "num_attention_heads", numbers["num_attention_heads"], ranks),
            latent=numbers["kv_lora_rank"],
            rope=numbers["qk_rope_head_dim"],
            nope=numbers["qk_nope_head_dim"],
            value=numbers["v_head_dim"],
            query_latent=config.get("q_lora_rank") or 0,
        )

    def __str__(self) -> str:
        return f"MLA, {self.heads} heads of {self.nope}+{self.rope}, row {self.latent}+{self.rope}"


def is_latent(module: Any) -> bool:
    """Whether a module is attention over a cached latent."""
    return all(hasattr(module, part) for part in ("kv_a_layernorm", "attn_mqa", "kv_lora_rank"))


def check_latent(
    checks: Checks, path: str, module: Any, config: Config, deployment: Deployment
) -> LatentWidths:
    """One layer. Raises AdmissionError for the first thing that does not fit."""
    w = LatentWidths.read(config, deployment.ranks)
    _check_shapes(checks, path, module, w)
    for name in ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj_with_mqa", "o_proj"):
        if hasattr(module, name):
            checks.bias(f"{path}.{name}", getattr(module, name), config)
    _check_row(checks, path, module, w, deployment)
    _check_absorbed(checks, path, module, w, deployment)
    _check_positions(checks, path, module, config, w)
    if getattr(module, "use_dsa", False):
        checks.leave_out("projection path of sparse layers, and their indexers")
    elif deployment.values and "projection path" not in checks.tried:
        pairing = _pairing(config)
        if try_projections(checks, path, module, w, pairing):
            checks.note("projection path")
    return w


def _check_shapes(checks: Checks, path: str, module: Any, w: LatentWidths) -> None:
    latent_rows, query_rows = w.latent + w.rope, w.heads * (w.nope + w.rope)
    projections = {
        "q_a_proj": (w.query_latent, w.hidden, "rows [q_a]"),
        "kv_a_proj_with_mqa": (latent_rows, w.hidden, "rows [c_kv, k_rope]"),
        "fused_qkv_a_proj_with_mqa": (
            *(w.query_latent + latent_rows, w.hidden),
            "rows [q_a, c_kv, k_rope]",
        ),
        "q_proj": (query_rows, w.hidden, f"rows [q_nope, q_rope] of {w.heads} heads"),
        "q_b_proj": (query_rows, w.query_latent, f"rows [q_nope, q_rope] of {w.heads} heads"),
        "kv_b_proj": (
            *(w.heads * (w.nope + w.value), w.latent),
            f"rows [k_nope, value] of {w.heads} heads",
        ),
        "o_proj": (w.hidden, w.heads * w.value, f"columns of {w.heads} heads' values"),
    }
    checks.equal(
        f"{path}.num_local_heads",
        w.heads,
        getattr(module, "num_local_heads", w.heads),
        "heads a rank",
    )
    for name, (rows, columns, meaning) in projections.items():
        projection = getattr(module, name, None)
        if projection is not None:
            checks.weight(f"{path}.{name}", projection, (rows, columns), meaning)
    if not (hasattr(module, "kv_a_proj_with_mqa") or hasattr(module, "fused_qkv_a_proj_with_mqa")):
        checks.leave_out("latent projection under another name")
    checks.weight(
        *(f"{path}.kv_a_layernorm", module.kv_a_layernorm, (w.latent,)),
        "the norm of c_kv alone; k_rope is cached as projected and rotated",
    )
    if getattr(module, "q_a_layernorm", None) is not None:
        checks.weight(
            f"{path}.q_a_layernorm", module.q_a_layernorm, (w.query_latent,), "the norm of q_a"
        )


def _check_row(
    checks: Checks, path: str, module: Any, w: LatentWidths, deployment: Deployment
) -> None:
    layer = module.attn_mqa
    row = w.latent + w.rope
    checks.equal(
        f"{path}.attn_mqa.qk_head_dim", row, layer.qk_head_dim, "cached row [c_kv, k_rope]"
    )
    checks.equal(f"{path}.attn_mqa.v_head_dim", w.latent, layer.v_head_dim, "values are c_kv")
    checks.equal(f"{path}.attn_mqa.tp_k_head_num", 1, layer.tp_k_head_num, "one row for all heads")
    checks.equal(f"{path}.attn_mqa.tp_q_head_num", w.heads, layer.tp_q_head_num, "heads a rank")
    checks.equal(
        "the KV pool's row", (w.latent, w.rope), deployment.pool_row, f"latent and rope of {path}"
    )


def _check_absorbed(
    checks: Checks, path: str, module: Any, w: LatentWidths, deployment: Deployment
) -> None:
    """``w_kc`` and ``w_vc`` are the two slices of ``kv_b_proj``, head by head."""
    keys, values = getattr(module, "w_kc", None), getattr(module, "w_vc", None)
    if keys is None or values is None or getattr(module, "use_deep_gemm_bmm", False):
        checks.leave_out("absorbed weights")
        return
    if keys.dtype not in PLAIN or values.dtype not in PLAIN:
        checks.leave_out(f"absorbed {keys.dtype} weights")
        return
    checks.tensor(f"{path}.w_kc", keys, (w.heads, w.nope, w.latent), "heads, k_nope, c_kv")
    checks.tensor(f"{path}.w_vc", values, (w.heads, w.latent, w.value), "heads, c_kv, value")
    if not deployment.values or not is_plain(module.kv_b_proj):
        checks.leave_out("absorbed weights' values")
        return
    per_head = module.kv_b_proj.weight.unflatten(0, (w.heads, w.nope + w.value))
    for name, found, wanted in (
        ("w_kc", keys, per_head[:, : w.nope]),
        ("w_vc", values.transpose(1, 2), per_head[:, w.nope :]),
    ):
        if not torch.equal(found, wanted.to(found.dtype)):
            raise AdmissionError(
                f"{path}.{name}: wanted its slice of kv_b_proj.weight, rows [k_nope, value] per "
                "head; found other values"
            )
    checks.note("absorbed weights")


def _check_positions(
    checks: Checks, path: str, module: Any, config: Config, w: LatentWidths
) -> None:
    rope = getattr(module, "rotary_emb", None)
    if rope is None:
        checks.leave_out("rotary embedding of a layer without one")
        return
    check_rope(checks, path, rope, config, width=w.rope, pairing=_pairing(config))
    parameters = rope_parameters(config)
    factor, temperature = 1.0, 0.0
    if parameters["rope_type"] in ("yarn", "deepseek_yarn") and all(
        parameters.get(field, True) for field in ("apply_yarn_scaling", "apply_scale")
    ):
        factor = float(parameters.get("factor") or 1.0)
        temperature = float(parameters.get("mscale_all_dim") or 0.0)
    elif parameters["rope_type"] != "default":
        checks.leave_out(f"softmax scale under rope type {parameters['rope_type']!r}")
        return
    checks.close(
        f"{path}.attn_mqa.scaling",
        mla_softmax_scale(w.nope + w.rope, factor, temperature),
        module.attn_mqa.scaling,
        f"softmax scale of {w.nope + w.rope} channels, factor {factor}, mscale {temperature}",
    )


def _pairing(config: Config) -> Pairing:
    return Pairing.INTERLEAVED if config.get("rope_interleave", True) else Pairing.HALF_SPLIT
