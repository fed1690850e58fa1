"""What no shape shows is refused too: the order of fused rows, and where the norm sits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loading import ATTENTION, Loaded, refusal, spoiled


def value_before_key(layer: Any) -> None:
    per_head = layer.kv_b_proj.weight.data.unflatten(0, (4, 64))
    layer.w_vc = per_head[:, :32].transpose(1, 2).contiguous()
    layer.w_kc = per_head[:, 32:].contiguous()


def test_values_before_keys_are_refused(loaded_mla: Loaded) -> None:
    reason = refusal(spoiled(loaded_mla, value_before_key))
    assert reason.startswith(f"{ATTENTION}.w_kc: wanted its slice of kv_b_proj.weight")
    assert "[k_nope, value] per head" in reason


def test_absorbed_values_of_other_heads_are_refused(loaded_mla: Loaded) -> None:
    def spoil(layer: Any) -> None:
        layer.w_vc = layer.w_vc.flip(0).contiguous()

    assert refusal(spoiled(loaded_mla, spoil)).startswith(f"{ATTENTION}.w_vc: wanted its slice")


def rotary_query_first(layer: Any) -> None:
    """A layer that splits a query head into [q_rope, q_nope]."""

    def split(q: Any, latent_cache: Any) -> Any:
        q_rope, q_nope = q.split([32, 32], dim=-1)
        return q_nope, q_rope, latent_cache[..., 64:].unsqueeze(1)

    layer._split_q_nope_pe = split


def rotary_key_first(layer: Any) -> None:
    """A layer whose latent projection is laid out [k_rope, c_kv]."""
    project = layer.prepare_qkv_latent

    def swapped(hidden: Any, batch: Any) -> Any:
        row = project(hidden, batch)
        return torch.cat([row[:, :96], row[:, 128:], row[:, 96:128]], dim=-1)

    layer.prepare_qkv_latent = swapped


def no_norm(layer: Any) -> None:
    """A layer that caches the latent as projected."""
    layer.kv_a_layernorm.forward = lambda x: x
    layer.kv_a_layernorm._forward_method = lambda x: x


def rotated_norm(layer: Any) -> None:
    """A layer that normalises the whole row, rotary channels included."""
    project = layer.prepare_qkv_latent

    def normed(hidden: Any, batch: Any) -> Any:
        row = project(hidden, batch)
        whole = row[:, 96:]
        whole = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True))
        return torch.cat([row[:, :96], whole * 3], dim=-1)

    layer.prepare_qkv_latent = normed


@pytest.mark.parametrize(
    ("spoil", "named", "meaning"),
    [
        (rotary_query_first, "q_b_proj.weight", "rows [q_nope, q_rope] per head"),
        (rotary_key_first, "fused_qkv_a_proj_with_mqa.weight", "k_rope behind c_kv"),
        (rotated_norm, "fused_qkv_a_proj_with_mqa.weight", "not normalised"),
        (no_norm, "fused_qkv_a_proj_with_mqa.weight", "kv_a_layernorm over c_kv alone"),
    ],
)
def test_an_order_that_no_shape_shows_is_refused(
    loaded_mla: Loaded, spoil: Any, named: str, meaning: str
) -> None:
    found = spoiled(loaded_mla)
    spoil(found.layer(0))  # one layer goes through its projections, the first
    reason = refusal(found)
    assert reason.startswith(f"model.layers.0.self_attn.{named}: wanted ")
    assert meaning in reason
