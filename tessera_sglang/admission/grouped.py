"""Layers that cache keys and values per head: MHA, GQA, MQA.

Only architectures whose geometry is known are compared: in others a projection may carry gates, or
widths may differ from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera_sglang.attention.rope import Pairing
from tessera_sglang.memory_pool.models import GroupedModel

from .checks import AdmissionError, Checks, Config, Deployment, share_of
from .rotary import check_rope, rope_parameters


@dataclass(frozen=True, slots=True)
class HeadWidths:
    """What the configuration says of every layer, on this rank."""

    hidden: int
    heads: int
    kv_heads: int
    width: int

    @classmethod
    def read(cls, config: Config, model: GroupedModel, ranks: int) -> HeadWidths:
        """Query heads are dealt out; of fewer KV heads than ranks each rank has one."""
        heads = share_of(config, "num_attention_heads", model.heads, ranks)
        if model.kv_heads % ranks and ranks % model.kv_heads:
            raise AdmissionError(
                f"config num_key_value_heads: wanted a multiple or a divisor of the {ranks} "
                f"tensor-parallel ranks; found {model.kv_heads}"
            )
        return cls(
            int(config["hidden_size"]), heads, max(model.kv_heads // ranks, 1), model.head_width
        )

    def __str__(self) -> str:
        return f"{self.heads} query and {self.kv_heads} KV heads of {self.width}"


def check_grouped(
    checks: Checks,
    path: str,
    module: Any,
    layer: Any,
    config: Config,
    model: GroupedModel,
    deployment: Deployment,
) -> HeadWidths:
    """One layer: ``module`` holds the projections and ``layer``, SGLang's paged attention."""
    w = HeadWidths.read(config, model, deployment.ranks)
    attn = f"{path}.attn"
    checks.equal(f"{attn}.tp_q_head_num", w.heads, layer.tp_q_head_num, "query heads a rank")
    checks.equal(f"{attn}.tp_k_head_num", w.kv_heads, layer.tp_k_head_num, "KV heads a rank")
    checks.equal(f"{attn}.qk_head_dim", w.width, layer.qk_head_dim, "channels of a key")
    checks.equal(f"{attn}.v_head_dim", w.width, layer.v_head_dim, "channels of a value")
    checks.equal(
        *("the KV pool's row", (w.kv_heads, w.width, w.width), deployment.pool_row),
        f"KV heads a rank, key and value of {path}",
    )
    rows = w.heads * w.width
    projections = {
        "qkv_proj": (
            *(rows + 2 * w.kv_heads * w.width, w.hidden),
            f"rows [query, key, value] of {w.heads}+{w.kv_heads}+{w.kv_heads} heads",
        ),
        "q_proj": (rows, w.hidden, f"rows of {w.heads} query heads"),
        "k_proj": (w.kv_heads * w.width, w.hidden, f"rows of {w.kv_heads} KV heads"),
        "v_proj": (w.kv_heads * w.width, w.hidden, f"rows of {w.kv_heads} KV heads"),
        "o_proj": (w.hidden, rows, f"columns of {w.heads} heads"),
    }
    for name, (wanted, columns, meaning) in projections.items():
        projection = getattr(module, name, None)
        if projection is not None:
            checks.weight(f"{path}.{name}", projection, (wanted, columns), meaning)
            if name != "o_proj":
                checks.bias(f"{path}.{name}", projection, config)
    for name, wanted in (("q_size", rows), ("kv_size", w.kv_heads * w.width)):
        checks.equal(f"{path}.{name}", wanted, getattr(module, name, wanted), "where qkv is split")
    scale = config.get("attention_multiplier") or w.width**-0.5
    checks.close(f"{attn}.scaling", scale, layer.scaling, f"softmax scale of {w.width} channels")
    _check_positions(checks, path, module, config, w)
    return w


def _check_positions(checks: Checks, path: str, module: Any, config: Config, w: HeadWidths) -> None:
    rope = getattr(module, "rotary_emb", None)
    if rope is None:
        checks.leave_out("rotary embedding of a layer without one")
        return
    share = rope_parameters(config)["partial_rotary_factor"] or 1.0
    half_split = config.get("rope_is_neox_style", True)  # of all architectures that are known
    pairing = Pairing.HALF_SPLIT if half_split else Pairing.INTERLEAVED
    check_rope(checks, path, rope, config, width=int(w.width * share), pairing=pairing)
