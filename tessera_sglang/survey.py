"""What a loaded model lets us do: which kernel may serve it, and whether spans can be relocated.

Read off the model itself, layer by layer, not off its name. What is not recognised is refused: a
wrong rotation would not crash, it would answer. Whether it is what its configuration says is for
:mod:`admission`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tessera_sglang.attention.rope import Pairing, RelativeRotation

from .compat import AttentionType, RadixAttention

# Fields of a config.json that give layers different attention or rotary tables. A falsy value is fine.
_PER_LAYER_ROPE = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval")
_OTHER_ROPE = (
    "rope_local_base_freq",
    "rope_theta_local",
    "mrope_section",
    "dual_chunk_attention_config",
)
_UNSTABLE_TABLES = ("Dynamic", "LongRoPE", "SuScaled", "DualChunk")  # depend on the length served
SPARSE_BACKEND = "dsa"  # the one of SGLang's that runs an indexer
_SPARSE_MARKS = ("use_dsa", "use_nsa")  # of SGLang's models
_SPARSE = (
    "sparse attention (DSA): an indexer scores the whole row, by keys that are rotated as well, and "
    "chooses what a query reads; moved and merged parts would be other choices"
)
_MANY_DIMENSIONS = ("MRotary", "Vision", "FourierRotary", "Ernie4_5")  # more than one position axis


@dataclass(frozen=True, slots=True)
class Survey:
    """The verdict on one model.

    ``foreign`` says why Tessera's own kernel can not serve its layers: one of SGLang's backends then
    does, ``stock``, or where that is None its default for the device. ``refusal`` says why spans can
    not be served; ``rotation`` and ``rope_start`` (first rotary channel of a query head) are set when
    it is None and Tessera's kernels turn the queries.
    """

    foreign: str | None
    refusal: str | None
    rotation: RelativeRotation | None = None
    rope_start: int = 0
    stock: str | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """Why a model's attention is SGLang's to run, and which of its backends must; None: any."""

    reason: str
    stock: str | None = None


@dataclass(frozen=True, slots=True)
class LatentRow:
    """The cached row of an MLA model: the latent, then the rotary channels."""

    latent_channels: int
    rope_channels: int


def survey(model: Any, hf_config: Any, latent: LatentRow | None) -> Survey:
    """Look through a loaded model. ``hf_config`` is its text configuration; ``latent`` its cached
    row if it is an MLA model."""
    foreign = foreign_of(model)
    if foreign is not None:
        return Survey(foreign=foreign.reason, refusal=foreign.reason, stock=foreign.stock)
    try:
        rotation, start = _rotation(_paged_layers(model), hf_config, latent)
    except _CanNotRelocateError as error:
        return Survey(foreign=None, refusal=str(error))
    return Survey(foreign=None, refusal=None, rotation=rotation, rope_start=start)


def foreign_of(model: Any) -> Foreign | None:
    """Whether attention goes to one of SGLang's own backends; None where Tessera's kernels fit."""
    layers = _paged_layers(model)
    if not layers:
        return Foreign("the model has no attention layer that SGLang pages")
    for name, parent, layer in layers:
        if any(getattr(parent, mark, False) for mark in _SPARSE_MARKS):
            return Foreign(f"{name}: {_SPARSE}", stock=SPARSE_BACKEND)
        reason = _foreign_layer(parent, layer)
        if reason is not None:
            return Foreign(f"{name}: {reason}")
    return None


class _CanNotRelocateError(Exception):
    pass


def _paged_layers(model: Any) -> list[tuple[str, Any, Any]]:
    """Path and module that hold each paged layer, and the layer."""
    return [
        (name, parent, layer)
        for name, parent in model.named_modules()
        for layer in parent.children()
        if isinstance(layer, RadixAttention)
    ]


def _foreign_layer(parent: Any, layer: Any) -> str | None:
    if getattr(parent, "sinks", None) is not None:
        return "attention sinks"
    if layer.sliding_window_size is not None and layer.sliding_window_size > 0:
        return f"sliding-window attention (window {layer.sliding_window_size})"
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        return f"attention type {layer.attn_type} is not causal self-attention"
    if layer.use_irope:
        return "chunked local attention"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"logit capping by {layer.logit_capping_method!r}"
    if layer.xai_temperature_len > 0:
        return "temperature that depends on the position"
    return None


def _rotation(
    layers: list[Any], hf_config: Any, latent: LatentRow | None
) -> tuple[RelativeRotation, int]:
    for field in (*_PER_LAYER_ROPE, *_OTHER_ROPE):
        value = _config_value(hf_config, field)
        if value and not (field == "no_rope_layers" and all(value)):
            raise _CanNotRelocateError(
                f"rotary embedding differs between layers or axes ({field} = {value})"
            )
    ropes: dict[int, Any] = {}
    for name, parent, _ in layers:
        if getattr(parent, "use_rope", True) is False:
            raise _CanNotRelocateError(f"{name}: a layer without rotary embedding")
        if hasattr(parent, "query_layernorm") and getattr(parent, "use_qk_norm", True):
            raise _CanNotRelocateError(f"{name}: queries and keys are normalised after rotation")
        rope = getattr(parent, "rotary_emb", None)
        if rope is None or getattr(rope, "cos_sin_cache", None) is None:
            raise _CanNotRelocateError(
                f"{name}: no rotary table was found (rotary_emb.cos_sin_cache)"
            )
        ropes[id(rope)] = rope
    if len(ropes) != 1:
        raise _CanNotRelocateError(f"{len(ropes)} different rotary tables, one per kind of layer")
    return _read_rope(next(iter(ropes.values())), layers[0][2], latent)


def _read_rope(rope: Any, layer: Any, latent: LatentRow | None) -> tuple[RelativeRotation, int]:
    kind = type(rope).__name__
    for mark in (*_UNSTABLE_TABLES, *_MANY_DIMENSIONS):
        if mark in kind:
            raise _CanNotRelocateError(f"rotary embedding {kind} can not be relocated")
    pairing = Pairing.HALF_SPLIT if rope.is_neox_style else Pairing.INTERLEAVED
    try:
        rotation = RelativeRotation.from_cos_sin_table(rope.cos_sin_cache.detach().cpu(), pairing)
    except ValueError as error:
        raise _CanNotRelocateError(f"rotary embedding {kind}: {error}") from error
    _check_turn(rope, rotation)
    width = int(rope.cos_sin_cache.shape[-1])
    if latent is not None:
        if latent.rope_channels != width:
            raise _CanNotRelocateError(
                f"the cached row has {latent.rope_channels} rotary channels, the table {width}"
            )
        return rotation, latent.latent_channels
    if width > layer.qk_head_dim:
        raise _CanNotRelocateError(
            f"the rotary table has {width} channels, a head {layer.qk_head_dim}"
        )
    return rotation, 0


def _check_turn(rope: Any, rotation: RelativeRotation) -> None:
    """The model's own code must agree: rope(p + s) x = turn by s of rope(p) x."""
    shift = 37
    table = rope.cos_sin_cache
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, rotation.rotary_dim), generator=generator).to(table)
    positions = torch.tensor([0, 5, 101], device=table.device)

    def turned(at: torch.Tensor) -> torch.Tensor:
        query: torch.Tensor = rope.forward_native(at, x.clone(), x.clone())[0]
        return query.reshape(3, 1, -1)[..., : rotation.rotary_dim].float().cpu()

    try:
        before, after = turned(positions), turned(positions + shift)
    except Exception as error:
        raise _CanNotRelocateError(
            f"rotary embedding {type(rope).__name__} could not be tried: {error!r}"
        ) from error
    moved = rotation.rotate(before, shift, start=0)
    tolerance = 0.05 if table.dtype != torch.float32 else 1e-3
    if not torch.allclose(moved, after, atol=tolerance * float(before.abs().max())):
        raise _CanNotRelocateError(
            f"rotary embedding {type(rope).__name__} does not turn as its table says"
        )


def _config_value(hf_config: Any, field: str) -> Any:
    value = getattr(hf_config, field, None)
    if value is None:
        scaling = getattr(hf_config, "rope_scaling", None)
        value = scaling.get(field) if isinstance(scaling, dict) else None
    return value
