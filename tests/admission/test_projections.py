"""Admission of real models: the tiny ones fit, and a projection of another shape is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import ATTENTION, Loaded, refusal, rows, spoiled
from models import rewrite_config, write_mla
from torch import nn

from tessera_sglang.survey import LatentRow, survey

# --- what fits -----------------------------------------------------------------------------------


def test_a_latent_model_fits(loaded_mla: Loaded) -> None:
    found = loaded_mla.admit()
    # per layer: 5 projections, 2 norms, 2 absorbed weights and, its own, the rotary table
    assert (found.tensors, found.layers, found.left_out) == (30 - 3, 3, ())
    assert found.tried == ("absorbed weights", "yarn rotary table", "projection path")
    assert str(found) == (
        "admission: 27 tensors of 3 layers fit the geometry (MLA, 4 heads of 32+32, row 64+32, "
        "float32 cache; compared by value: absorbed weights, yarn rotary table, projection path)"
    )


def test_a_latent_model_without_a_query_latent_fits(loaded_lite: Loaded) -> None:
    found = loaded_lite.admit()
    assert found.tried == ("absorbed weights", "yarn rotary table", "projection path")
    assert (found.layers, found.left_out) == (3, ())


def test_a_model_of_grouped_heads_fits(loaded_llama: Loaded) -> None:
    found = loaded_llama.admit()
    assert (found.tensors, found.layers, found.left_out) == (9, 3, ())
    assert found.geometry == "4 query and 2 KV heads of 32, float32 cache"
    assert found.tried == ("default rotary table",)


def test_looking_changes_nothing(loaded_mla: Loaded) -> None:
    before = {name: value.clone() for name, value in loaded_mla.model.state_dict().items()}
    loaded_mla.admit()
    after = loaded_mla.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "wanted"),
    [
        ("fused_qkv_a_proj_with_mqa", 160, "[192, 128], rows [q_a, c_kv, k_rope]"),
        ("q_b_proj", 128, "[256, 96], rows [q_nope, q_rope] of 4 heads"),
        ("kv_b_proj", 192, "[256, 64], rows [k_nope, value] of 4 heads"),
        ("o_proj", 64, "[128, 128], columns of 4 heads' values"),
        ("kv_a_layernorm", 96, "[64], the norm of c_kv alone"),
        ("q_a_layernorm", 64, "[96], the norm of q_a"),
    ],
)
def test_a_projection_of_another_shape_is_refused(
    loaded_mla: Loaded, name: str, count: int, wanted: str
) -> None:
    reason = refusal(spoiled(loaded_mla, rows(name, count)))
    assert reason.startswith(f"{ATTENTION}.{name}.weight: wanted {wanted}")
    assert f"found [{count}" in reason


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("kv_a_proj_with_mqa", "[96, 128], rows [c_kv, k_rope]"),
        ("q_proj", "[256, 128], rows [q_nope, q_rope] of 4 heads"),
    ],
)
def test_an_unfused_projection_of_another_shape_is_refused(
    loaded_lite: Loaded, name: str, wanted: str
) -> None:
    reason = refusal(spoiled(loaded_lite, rows(name, 64)))
    assert reason == f"{ATTENTION}.{name}.weight: wanted {wanted}; found [64, 128]"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("qkv_proj", "[256, 128], rows [query, key, value] of 4+2+2 heads"),
        ("o_proj", "[128, 128], columns of 4 heads"),
    ],
)
def test_a_grouped_projection_of_another_shape_is_refused(
    loaded_llama: Loaded, name: str, wanted: str
) -> None:
    reason = refusal(spoiled(loaded_llama, rows(name, 32)))
    assert reason == f"{ATTENTION}.{name}.weight: wanted {wanted}; found [32, 128]"


@pytest.mark.parametrize(
    ("name", "projection"),
    [("loaded_mla", "fused_qkv_a_proj_with_mqa"), ("loaded_llama", "qkv_proj")],
)
def test_a_bias_that_the_model_does_not_have_is_refused(
    name: str, projection: str, request: pytest.FixtureRequest
) -> None:
    loaded: Loaded = request.getfixturevalue(name)
    assert refusal(spoiled(loaded, attention_bias=True)) == (
        f"model.layers.0.self_attn.{projection}.bias: wanted one, as config attention_bias says; "
        "found none"
    )


def test_quantised_weights_are_measured_and_said_not_to_be_compared(loaded_mla: Loaded) -> None:
    def quantise(model: Any) -> None:
        for layer in model.model.layers:
            for name in ("fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj"):
                projection = getattr(layer.self_attn, name)
                packed = projection.weight.detach().to(torch.float8_e4m3fn)
                projection.weight = nn.Parameter(packed, requires_grad=False)

    found = spoiled(loaded_mla)
    quantise(found.model)
    verdict = found.admit()
    assert verdict.tensors == 27
    assert verdict.tried == ("yarn rotary table",)
    assert "values of quantised torch.float8_e4m3fn weights" in verdict.left_out
    found.layer().kv_b_proj.weight = nn.Parameter(
        torch.zeros((192, 64)).to(torch.float8_e4m3fn), requires_grad=False
    )
    assert refusal(found).startswith(f"{ATTENTION}.kv_b_proj.weight: wanted [256, 64]")


# --- what is not known ---------------------------------------------------------------------------


def test_an_unknown_architecture_is_admitted_and_said_not_to_be_checked(
    loaded_llama: Loaded,
) -> None:
    verdict = spoiled(loaded_llama, model_type="llama_of_tomorrow").admit()
    assert (verdict.tensors, verdict.layers) == (0, 0)
    assert "no layer that is known" in str(verdict)
    assert "not checked: architecture 'llama_of_tomorrow'" in str(verdict)


def test_sparse_attention_is_sglangs_and_its_projections_are_checked(
    load: Any, tmp_path: Path
) -> None:
    fields = {"index_topk": 64, "index_head_dim": 64, "index_n_heads": 4}
    rewrite_config(
        write_mla(tmp_path),
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        **fields,
    )
    loaded = load(tmp_path)
    verdict = survey(loaded.model, SimpleNamespace(**loaded.config), LatentRow(64, 32))
    assert verdict.stock == "dsa"
    assert verdict.foreign == verdict.refusal
    assert "model.layers.0.self_attn: sparse attention (DSA)" in verdict.foreign
    found = loaded.admit()
    assert (found.tensors, found.layers) == (27, 3)
    assert found.left_out == ("projection path of sparse layers, and their indexers",)
    assert refusal(spoiled(loaded, rows("kv_b_proj", 192))).startswith(
        f"{ATTENTION}.kv_b_proj.weight: wanted [256, 64]"
    )


def test_kin_of_a_known_architecture_are_checked_layer_by_layer(loaded_mla: Loaded) -> None:
    kin = spoiled(loaded_mla, rows("q_b_proj", 128), model_type="kin")
    assert refusal(kin).startswith(f"{ATTENTION}.q_b_proj.weight: wanted [256, 96]")
