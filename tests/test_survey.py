"""What a loaded model lets us do (case 29): accepted, refused with a reason, or not ours at all.

The models have the structure of SGLang's, with its own attention layer and rotary tables.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tessera_sglang.attention.rope import Pairing

survey_module = pytest.importorskip("tessera_sglang.survey", exc_type=ImportError)
AttentionType = survey_module.AttentionType

HEAD = 32
LATENT = survey_module.LatentRow(latent_channels=64, rope_channels=16)
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "deepseek_yarn", **STRETCHED, "mscale": 1.0, "mscale_all_dim": 0.707}
LLAMA3 = {"rope_type": "llama3", **STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(width: int = HEAD, base: int = 10_000, *, neox: bool = True, **scaling: Any) -> Any:
    """SGLang's rotary embedding for a head of ``width`` channels."""
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(width, width, 256, base, neox, scaling or None, torch.float32)


def attention(width: int = HEAD, **options: Any) -> Any:
    return survey_module.RadixAttention(4, width, width**-0.5, 2, 0, **options)


class Block(nn.Module):
    """Self-attention as models hold it: the paged layers beside the rotary table they use."""

    def __init__(self, rotary: Any, **layers: nn.Module) -> None:
        super().__init__()
        if rotary is not None:
            self.rotary_emb = rotary
        for name, layer in (layers or {"attn": attention()}).items():
            self.add_module(name, layer)


def model(*blocks: nn.Module) -> nn.Module:
    root = nn.Module()
    root.layers = nn.ModuleList(blocks)
    return root


def look(*blocks: nn.Module, latent: Any = None, **config: Any) -> Any:
    return survey_module.survey(model(*blocks), SimpleNamespace(**config), latent)


def refusal(*blocks: nn.Module, latent: Any = None, **config: Any) -> str:
    """The reason why spans are refused while our kernel still serves the model."""
    verdict = look(*blocks, latent=latent, **config)
    assert verdict.foreign is verdict.rotation is None
    assert verdict.refusal is not None
    return str(verdict.refusal)


def latent_block(width: int = LATENT.rope_channels, **scaling: Any) -> Block:
    """DeepSeek: two paged layers beside one table."""
    return Block(
        rope(width, neox=False, **scaling),
        attn_mqa=attention(LATENT.latent_channels + LATENT.rope_channels),
        attn_mha=attention(HEAD + LATENT.rope_channels),
    )


# --- accepted ------------------------------------------------------------------------------------


def test_a_model_of_plain_layers_is_served_from_its_first_channel() -> None:
    verdict = look(Block(rope()), Block(rope()), rope_scaling=None)
    assert (verdict.foreign, verdict.refusal, verdict.rope_start) == (None, None, 0)
    assert verdict.rotation.pairing is Pairing.HALF_SPLIT
    expected = 10_000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    torch.testing.assert_close(verdict.rotation.inv_freq, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", [{}, YARN], ids=["plain", "yarn"])
def test_a_latent_row_is_rotated_behind_the_latent(scaling: dict[str, Any]) -> None:
    verdict = look(latent_block(**scaling), latent_block(**scaling), latent=LATENT)
    assert (verdict.foreign, verdict.refusal) == (None, None)
    assert verdict.rope_start == LATENT.latent_channels
    assert verdict.rotation.rotary_dim == LATENT.rope_channels
    assert verdict.rotation.pairing is Pairing.INTERLEAVED


@pytest.mark.parametrize(
    "scaling",
    [LLAMA3, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", **STRETCHED}],
    ids=lambda scaling: str(scaling["rope_type"]),
)
def test_a_scaling_that_is_fixed_once_and_for_all_is_served(scaling: dict[str, Any]) -> None:
    verdict = look(Block(rope(**scaling)))
    assert verdict.refusal is None
    assert verdict.rotation.rotary_dim == HEAD


def test_a_table_narrower_than_the_head_turns_the_channels_it_covers() -> None:
    verdict = look(Block(rope(HEAD // 2)))
    assert verdict.refusal is None
    assert (verdict.rotation.rotary_dim, verdict.rope_start) == (HEAD // 2, 0)


@pytest.mark.parametrize(
    "config",
    [
        {"no_rope_layers": [1, 1]},
        {"no_rope_layers": []},
        {"no_rope_layer_interval": 0},
        {"rope_local_base_freq": None},
        {"mrope_section": None, "rope_scaling": {"rope_type": "linear"}},
    ],
)
def test_a_field_that_says_nothing_refuses_nothing(config: dict[str, Any]) -> None:
    assert look(Block(rope()), **config).refusal is None


# --- spans refused, prefixes served --------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"no_rope_layer_interval": 4}, "no_rope_layer_interval"),
        ({"nope_layer_interval": 4}, "nope_layer_interval"),
        ({"rope_local_base_freq": 10_000}, "rope_local_base_freq"),
        ({"rope_theta_local": 10_000}, "rope_theta_local"),
        ({"mrope_section": [4, 6, 6]}, "mrope_section"),
        ({"rope_scaling": {"mrope_section": [4, 6, 6]}}, "mrope_section"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    ],
)
def test_a_configuration_of_unlike_layers_or_axes_is_refused(
    config: dict[str, Any], named: str
) -> None:
    reason = refusal(Block(rope()), **config)
    assert reason.startswith("rotary embedding differs between layers or axes")
    assert named in reason


def test_two_tables_are_refused() -> None:
    reason = refusal(Block(rope(base=10_000)), Block(rope(base=500_000)))
    assert reason == "2 different rotary tables, one per kind of layer"


def test_a_layer_that_skips_its_table_is_refused_by_name() -> None:
    skips: Any = Block(rope())
    skips.use_rope = False
    assert refusal(Block(rope()), skips) == "layers.1: a layer without rotary embedding"


@pytest.mark.parametrize("rotary", [None, nn.Identity()], ids=["no module", "no table"])
def test_a_layer_without_a_table_is_refused_by_name(rotary: Any) -> None:
    assert refusal(Block(rope()), Block(rotary)).startswith("layers.1: no rotary table was found")


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "DynamicNTKScalingRotaryEmbedding"),
        ({"rope_type": "dynamic", "alpha": 1000.0}, "DynamicNTKAlphaRotaryEmbedding"),
        ({"rope_type": "default", "mrope_section": [4, 6, 6]}, "MRotaryEmbedding"),
    ],
)
def test_an_embedding_that_moves_or_has_axes_is_refused_by_its_name(
    scaling: dict[str, Any], kind: str
) -> None:
    assert refusal(Block(rope(**scaling))) == f"rotary embedding {kind} can not be relocated"


def test_a_table_that_is_no_rotation_is_refused() -> None:
    bent = SimpleNamespace(cos_sin_cache=rope().cos_sin_cache.clone(), is_neox_style=True)
    bent.cos_sin_cache[100:] = bent.cos_sin_cache[100:].flip(0)
    block = Block(None)
    block.rotary_emb = bent
    assert "not linear in position" in refusal(block)


def test_a_table_that_does_not_fit_the_latent_row_is_refused() -> None:
    reason = refusal(latent_block(8), latent=LATENT)
    assert reason == "the cached row has 16 rotary channels, the table 8"


def test_a_table_wider_than_the_head_is_refused() -> None:
    assert refusal(Block(rope(64))) == "the rotary table has 64 channels, a head 32"


# --- not ours ------------------------------------------------------------------------------------


def with_sinks(sinks: Any) -> Block:
    block = Block(rope())
    block.sinks = sinks
    return block


def with_temperature() -> Block:
    layer = attention()
    layer.xai_temperature_len = 1024
    return Block(rope(), attn=layer)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda: Block(rope(), attn=attention(sliding_window_size=127)), "window 127"),
        (lambda: with_sinks(nn.Parameter(torch.zeros(4))), "attention sinks"),
        (lambda: Block(rope(), attn=attention(is_cross_attention=True)), "not causal self"),
        (
            lambda: Block(rope(), attn=attention(attn_type=AttentionType.ENCODER_ONLY)),
            "AttentionType.ENCODER_ONLY is not causal self-attention",
        ),
        (lambda: Block(rope(), attn=attention(use_irope=True)), "chunked local attention"),
        (
            lambda: Block(rope(), attn=attention(logit_cap=30.0, logit_capping_method="sigmoid")),
            "logit capping by 'sigmoid'",
        ),
        (with_temperature, "temperature that depends on the position"),
    ],
    ids=["window", "sinks", "cross", "encoder", "irope", "cap", "temperature"],
)
def test_a_layer_that_our_kernel_can_not_run_names_itself(block: Any, reason: str) -> None:
    verdict = look(Block(rope()), block())
    assert verdict.foreign == verdict.refusal
    assert verdict.foreign.startswith("layers.1: ")
    assert reason in verdict.foreign
    assert verdict.rotation is verdict.stock is None


@pytest.mark.parametrize("mark", ["use_dsa", "use_nsa"])
def test_sparse_attention_goes_to_its_own_backend(mark: str) -> None:
    block: Any = latent_block()
    setattr(block, mark, True)
    verdict = look(latent_block(), block, latent=LATENT)
    assert verdict.stock == "dsa"
    assert verdict.foreign == verdict.refusal
    assert verdict.foreign.startswith("layers.1: sparse attention (DSA)")


def test_dense_attention_of_the_same_family_is_ours() -> None:
    block: Any = latent_block()
    block.use_dsa = False
    verdict = look(block, latent=LATENT)
    assert (verdict.foreign, verdict.refusal, verdict.stock) == (None, None, None)


def test_a_layer_with_a_plain_cap_or_without_sinks_is_ours() -> None:
    capped = Block(rope(), attn=attention(logit_cap=30.0))
    verdict = look(capped, with_sinks(None))
    assert (verdict.foreign, verdict.refusal) == (None, None)


def test_a_model_without_paged_attention_is_not_ours() -> None:
    verdict = look(nn.Linear(2, 2))
    assert (
        verdict.foreign == verdict.refusal == ("the model has no attention layer that SGLang pages")
    )
