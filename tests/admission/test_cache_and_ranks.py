"""The pool that is about to be allocated, and how ranks share the heads out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loading import ATTENTION, Loaded, refusal, spoiled


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_cache_that_the_kernels_do_not_read_is_refused(
    loaded_mla: Loaded, dtype: torch.dtype
) -> None:
    reason = refusal(spoiled(loaded_mla, cache_dtype=dtype))
    assert reason.startswith(
        "the KV pool's dtype: wanted one of bfloat16, float16, float32; found "
    )


def test_a_pool_of_other_rows_is_refused(loaded_mla: Loaded, loaded_llama: Loaded) -> None:
    assert refusal(spoiled(loaded_mla, pool_row=(64, 64))) == (
        "the KV pool's row: wanted (64, 32), latent and rope of model.layers.0.self_attn; found (64, 64)"
    )
    assert refusal(spoiled(loaded_llama, pool_row=(4, 32, 32))).startswith(
        "the KV pool's row: wanted (2, 32, 32)"
    )


def test_a_row_wider_than_the_latent_and_its_rope_is_refused(loaded_mla: Loaded) -> None:
    def spoil(layer: Any) -> None:
        layer.attn_mqa.qk_head_dim = 128

    assert refusal(spoiled(loaded_mla, spoil)).startswith(
        f"{ATTENTION}.attn_mqa.qk_head_dim: wanted 96, cached row [c_kv, k_rope]; found 128"
    )


@pytest.mark.parametrize("name", ["loaded_mla", "loaded_llama"])
def test_another_partition_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(name)
    assert refusal(spoiled(loaded, ranks=3)) == (
        "config num_attention_heads: wanted a multiple of the 3 tensor-parallel ranks; found 4"
    )
    reason = refusal(spoiled(loaded, ranks=2))  # a rank that holds all heads
    assert "heads a rank; found 4" in reason
    assert reason.startswith("model.layers.0.self_attn.")


def test_heads_that_do_not_divide_are_refused(loaded_llama: Loaded) -> None:
    reason = refusal(spoiled(loaded_llama, ranks=3, num_attention_heads=6))
    assert reason.startswith("config num_key_value_heads: wanted a multiple or a divisor of the 3")


def test_a_missing_layer_is_refused(loaded_mla: Loaded) -> None:
    assert refusal(spoiled(loaded_mla, num_hidden_layers=4)) == (
        "num_hidden_layers: wanted 4, layers that cache; found 3"
    )
