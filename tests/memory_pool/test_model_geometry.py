"""Configs to geometries: published models to the byte, transformers' own defaults, refusals."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from tessera_sglang.memory_pool.geometry import Geometry, LayerKind, Tier
from tessera_sglang.memory_pool.known_models import KNOWN
from tessera_sglang.memory_pool.model_geometry import ModelConfigError, read_model
from tessera_sglang.memory_pool.models import GroupedModel, HybridModel, MlaModel
from tessera_sglang.memory_pool.rows import IndexFormat, KvFormat

TINY_MLA = Path(__file__).parents[2] / "examples" / "tiny-mla" / "config.json"

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
}
V3 = KNOWN["deepseek-v3"].config
V4 = KNOWN["deepseek-v4-pro"].config


def geometry(name: str) -> Geometry:
    return read_model(KNOWN[name].config, name).geometry()


def kinds(found: Geometry) -> Counter[LayerKind]:
    return Counter(layer.kind for layer in found.layers)


# --- known models --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "bytes_per_token", "page_bytes"),
    [
        ("deepseek-v2", 60, 69_120, 4_423_680),
        ("deepseek-v2-lite", 27, 31_104, 1_990_656),
        ("deepseek-v3", 61, 70_272, 4_497_408),
        ("deepseek-r1", 61, 70_272, 4_497_408),
        ("deepseek-v3.2", 61, 61 * (1152 + 132), 5_012_736),
        ("kimi-k2", 61, 70_272, 4_497_408),
        ("moonlight", 27, 31_104, 1_990_656),
        ("mistral-large-3", 61, 70_272, 4_497_408),
        ("llama-2-7b", 32, 524_288, 33_554_432),
        ("llama-3.1-8b", 32, 131_072, 8_388_608),
        ("llama-3.1-405b", 126, 516_096, 33_030_144),
        ("qwen2.5-72b", 80, 327_680, 20_971_520),
        ("qwen3-8b", 36, 147_456, 9_437_184),
        ("smollm2-135m", 30, 23_040, 1_474_560),
    ],
)
def test_models_whose_layers_all_page(
    name: str, layers: int, bytes_per_token: int, page_bytes: int
) -> None:
    found = geometry(name)
    assert len(found.layers) == layers
    assert found.bytes_per_token == bytes_per_token
    assert (found.page_tokens, found.page_bytes) == (64, page_bytes)
    assert found.slot_bytes == 0


@pytest.mark.parametrize(
    ("name", "layers", "bytes_per_token", "page_bytes", "slot_bytes"),
    [
        (
            "deepseek-v4-flash",
            {LayerKind.SWA: 2, LayerKind.CSA: 21, LayerKind.HCA: 20},
            21 * 163 + 20 * Fraction(73, 16),
            449_824,
            14_990_336,
        ),
        (
            "deepseek-v4-pro",
            {LayerKind.HCA: 31, LayerKind.CSA: 30},
            30 * 163 + 31 * Fraction(73, 16),
            644_024,
            22_656_000,
        ),
    ],
)
def test_hybrids(
    name: str,
    layers: dict[LayerKind, int],
    bytes_per_token: Fraction,
    page_bytes: int,
    slot_bytes: int,
) -> None:
    found = geometry(name)
    assert kinds(found) == layers
    assert found.bytes_per_token == bytes_per_token
    assert (found.page_tokens, found.page_bytes) == (128, page_bytes)
    assert found.slot_bytes == slot_bytes


def test_order_of_v4_layers() -> None:
    flash = [layer.kind.value for layer in geometry("deepseek-v4-flash").layers]
    pro = [layer.kind.value for layer in geometry("deepseek-v4-pro").layers]
    assert flash == ["SWA", "SWA", *(["CSA", "HCA"] * 20), "CSA"]
    assert pro == ["HCA", "HCA", *(["CSA", "HCA"] * 29), "CSA"]


def test_every_source_is_an_address() -> None:
    assert all(known.source.startswith("https://") for known in KNOWN.values())


@pytest.mark.parametrize("name", KNOWN)
def test_tensors_of_three_pages_and_two_slots_have_the_bytes_that_follow(name: str) -> None:
    found = geometry(name)
    pages = [
        torch.empty((3, *found.page_shape(plane)), dtype=torch.uint8, device="meta")
        for _, plane in found.planes(Tier.PAGED)
    ]
    slots = [
        torch.empty((2, plane.rows, plane.row_bytes), dtype=torch.uint8, device="meta")
        for _, plane in found.planes(Tier.ARENA)
    ]
    assert sum(tensor.nbytes for tensor in pages) == 3 * found.page_bytes
    assert sum(tensor.nbytes for tensor in slots) == 2 * found.slot_bytes


# --- formats, pages and ranks --------------------------------------------------------------------


def test_formats_of_mla() -> None:
    model = read_model(V3, "v3")
    packed = model.geometry(KvFormat.FP8_PACKED)
    assert packed.bytes_per_token == 61 * 656
    assert model.geometry(KvFormat.FP8).bytes_per_token == 61 * 576
    assert packed.metadata_share == Fraction(1, 41)
    with pytest.raises(ValueError, match="v3 has no indexer to keep in fp4"):
        model.geometry(index=IndexFormat.FP4)


def test_expanded_heads_are_for_comparison() -> None:
    model = read_model(KNOWN["deepseek-v2"].config, "v2")
    assert isinstance(model, MlaModel)
    expanded = model.expanded()
    assert expanded.layers[0].bytes_per_token == 80 * 1024  # 128 heads × (192 + 128) × 2 B
    assert expanded.bytes_per_token * 4096 == Fraction(75, 4) * 2**30
    assert round(float(expanded.bytes_per_token / model.geometry().bytes_per_token), 1) == 71.1
    assert model.expanded(key=128).layers[0].bytes_per_token == 65_536
    grouped = read_model(KNOWN["llama-3.1-8b"].config, "llama")
    assert isinstance(grouped, GroupedModel)
    assert grouped.expanded().bytes_per_token == 4 * grouped.geometry().bytes_per_token


def test_latents_are_replicated_and_heads_are_split() -> None:
    mla = read_model(V3, "v3").geometry(tensor_parallel=8)
    assert mla.bytes_per_token == 70_272
    assert {layer.replicas for layer in mla.layers} == {8}
    gqa = read_model(KNOWN["llama-3.1-8b"].config, "llama").geometry(tensor_parallel=8)
    assert gqa.bytes_per_token == 131_072 // 8
    assert {layer.replicas for layer in gqa.layers} == {1}
    v4 = read_model(V4, "v4").geometry(tensor_parallel=4)
    assert {layer.replicas for layer in v4.layers} == {4}
    with pytest.raises(ValueError, match="8 KV heads"):
        read_model(KNOWN["llama-3.1-8b"].config, "llama").geometry(tensor_parallel=3)


def test_pages_that_the_geometry_forbids() -> None:
    with pytest.raises(ValueError, match=r"page of 64 tokens .* block of 128"):
        read_model(V4, "v4").geometry(page_tokens=64)
    with pytest.raises(ValueError, match=r"page of 32 tokens .* block of 64"):
        read_model(V3, "v3").geometry(page_tokens=32)
    assert read_model(V4, "v4").geometry(page_tokens=256).page_bytes == 2 * 644_024
    assert read_model(LLAMA, "llama").geometry(page_tokens=1).page_bytes == 2 * 64


# --- reading configs -----------------------------------------------------------------------------


def test_the_example_model() -> None:
    found = read_model(json.loads(TINY_MLA.read_text()), "tiny-mla")
    assert isinstance(found, MlaModel)
    assert found.geometry().bytes_per_token == found.layers * 2 * (found.latent + found.rope)


def test_text_config_of_a_multimodal_model() -> None:
    outer = {"model_type": "kimi_k25", "text_config": dict(KNOWN["kimi-k2"].config)}
    assert (
        read_model(outer, "k2").geometry() == read_model(KNOWN["kimi-k2"].config, "k2").geometry()
    )


def test_mistrals_own_params() -> None:
    params = {
        "dim": 7168,
        "n_layers": 61,
        "n_heads": 128,
        "n_kv_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    assert read_model(params, "m") == read_model(V3, "m")
    dense = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    assert read_model(dense, "m") == read_model(KNOWN["llama-3.1-8b"].config, "m")


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA, (0, 0)),
        ({**LLAMA, "model_type": "mistral", "sliding_window": None}, (0, 0)),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 16}, (16, 16)),
        ({**LLAMA, "model_type": "qwen2", "sliding_window": 16}, (0, 0)),
        (
            {**LLAMA, "model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False},
            (0, 0),
        ),
        (
            {
                **LLAMA,
                "model_type": "gpt_oss",
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (16, 0),
        ),
    ],
)
def test_windows(config: dict[str, object], windows: tuple[int, ...]) -> None:
    model = read_model(config, "m")
    assert isinstance(model, GroupedModel)
    assert model.windows == windows
    found = model.geometry()
    assert found.slot_bytes == sum(2 * window * 2 * 8 * 2 for window in windows)
    assert found.bytes_per_token == windows.count(0) * 64


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "model_type as a word, found None"),
        ({"model_type": ["llama"]}, "model_type as a word"),
        (
            {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]},
            r"no geometry is known for model_type 'mamba2' \(architectures \['Mamba2ForCausalLM'\]\)",
        ),
        ({"model_type": "deepseek_v41"}, "known are .*deepseek_v4, .*smollm3"),
        ({**LLAMA, "kv_lora_rank": 512}, r"no kv_lora_rank \(latent attention\), found 512"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads dividing .* 4, found 3"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers as a whole number .* found 0"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers .* found True"),
        ({**LLAMA, "num_hidden_layers": "2"}, "num_hidden_layers .* found '2'"),
        ({**LLAMA, "hidden_size": 30}, "head_dim, or hidden_size in 4 equal heads"),
        ({**LLAMA, "model_type": "mistral"}, "sliding_window .null for none., found None"),
        ({**LLAMA, "model_type": "gpt_oss", "sliding_window": 16}, "layer_types as 2 of"),
        (
            {**LLAMA, "model_type": "qwen3", "sliding_window": 16, "use_sliding_window": True},
            "layer_types as 2 of",
        ),
        ({**LLAMA, "layer_types": ["full_attention", "mamba"]}, "layer_types as 2 of"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types as 2 of"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 2}, "sliding_window as a whole number"),
        ({**V3, "kv_lora_rank": None}, "kv_lora_rank as a whole number .* found None"),
        ({**V3, "index_head_dim": 128}, r"no index_head_dim \(a sparse indexer\)"),
        ({**V3, "model_type": "deepseek_v32"}, "index_head_dim as a whole number"),
        ({**V4, "num_key_value_heads": 8}, "num_key_value_heads 1, found 8"),
        ({**V4, "qk_rope_head_dim": 512}, "qk_rope_head_dim below head_dim 512"),
        ({**V4, "compress_ratios": None}, "at least 61 compress_ratios"),
        ({**V4, "compress_ratios": [4] * 60}, "at least 61 compress_ratios"),
        ({**V4, "compress_ratios": [2] * 61}, "compress_ratios of 0, 4 or 128"),
        ({**V4, "compress_ratios": [[4]] * 61}, "compress_ratios of 0, 4 or 128"),
        ({**V4, "compress_rates": [4, 128]}, "compress_rates by layer type"),
    ],
)
def test_what_can_not_be_read_is_refused(config: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelConfigError, match=complaint):
        read_model(config, "m")


# --- against transformers ------------------------------------------------------------------------


def test_transformers_defaults_are_the_published_models() -> None:
    transformers = pytest.importorskip("transformers")
    v3 = read_model(transformers.DeepseekV3Config().to_dict(), "m")
    assert v3 == read_model(V3, "m")
    v32 = read_model(transformers.DeepseekV32Config().to_dict(), "m")
    assert v32 == read_model(KNOWN["deepseek-v3.2"].config, "m")
    llama = read_model(transformers.LlamaConfig(**KNOWN["llama-3.1-8b"].config).to_dict(), "m")
    assert llama == read_model(KNOWN["llama-3.1-8b"].config, "m")


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_transformers_reads_the_same_layers_from_a_v4_config(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(**KNOWN[name].config)
    saved = read_model(config.to_dict(), name)
    assert isinstance(saved, HybridModel)
    assert saved == read_model(KNOWN[name].config, name)


def test_v4_state_is_what_transformers_carries_over_a_boundary() -> None:
    """Feed a whole block and one token more through its cache, and compare element counts."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config_class = pytest.importorskip("transformers").DeepseekV4Config
    config = config_class(**KNOWN["deepseek-v4-pro"].config)
    csa = next(g for g in geometry("deepseek-v4-pro").layers if g.kind is LayerKind.CSA)
    cache = modeling.DeepseekV4CSACache(config)
    widths = {"compressor": config.head_dim, "indexer": config.index_head_dim}
    for part, prefix in (("compressor", ""), ("indexer", "index_")):
        width = widths[part]
        kv, gate = torch.zeros(2, 1, 129, 2 * width)
        ready, ready_gate, _ = cache.store_compression_weights(part, kv, gate)
        grouped = (1, -1, 4, 2 * width)
        cache.update_overlap_state(part, ready.view(grouped), ready_gate.view(grouped), width)
        overlap, tail = csa.plane(f"{prefix}overlap"), csa.plane(f"{prefix}tail")
        assert overlap.rows * overlap.region("series").elements == cache.overlap_kv[part].numel()
        assert overlap.rows * overlap.region("gate").elements == cache.overlap_gate[part].numel()
        assert tail.region("series").elements == cache.buffer_kv[part].numel()  # of one token
        assert tail.region("gate").elements == cache.buffer_gate[part].numel()
