"""Tiny random models for tests: DeepSeek-V3 (latents), Llama (grouped heads), DeepSeek-V4 (two tiers).

    path = write_mla(tmp_path / "mla")        # a checkpoint that SGLang loads with
    path = write_llama(tmp_path / "llama")    # --dtype float32 --skip-tokenizer-init

Every weight comes from one seeded generator, so a checkpoint is a function of its arguments. The
initial scale matters: with the usual 0.02 attention is a plain average over the context, one token
in 300 moves no logit, and a wrong mask or rotation passes every test. `_randomize` draws weights
with a standard deviation of gain / sqrt(fan in), sharpens attention through the query projection,
and keeps embeddings small next to what the first layer adds.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCAB = 512
ATTENTION_GAIN = 1.5
"""Standard deviation of an attention score, in units of what unscaled projections give."""
EMBEDDING_STD = 0.3
LOGIT_STD = 2.5
"""Wide enough that the best two tokens seldom come within float32 noise of each other."""


def write_mla(
    directory: Path,
    *,
    seed: int = 0,
    layers: int = 3,
    hidden: int = 128,
    rope: int = 32,
    query_latent: int | None = 96,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A dense DeepSeek-V3 with YaRN: latent 64, 4 heads of 32 + `rope`, values of 32.

    With `query_latent` None queries are projected in one step, as in DeepSeek-V2-Lite.
    """
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=64,
        q_lora_rank=query_latent,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=4096,
        rope_interleave=True,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    # SGLang reads these from DeepSeek's remote code; transformers' class does not declare them.
    remote = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return _save(DeepseekV3ForCausalLM(config), directory, seed, dtype, remote)


def write_llama(
    directory: Path, *, seed: int = 0, layers: int = 3, dtype: torch.dtype = torch.float32
) -> Path:
    """A Llama with 4 query heads over 2 key-value heads of 32 channels, plain rotary positions."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    return _save(LlamaForCausalLM(config), directory, seed, dtype, {})


V4_VOCAB = 97


def write_v4(directory: Path, *, seed: int = 3) -> Path:
    """A DeepSeek-V4 of four layers with real strides and window; the indexer keeps 8 entries.

    No weight is at the zero that transformers starts from, and answers depend on the context.
    """
    config = DeepseekV4Config(
        vocab_size=V4_VOCAB,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        num_hash_layers=1,
        hc_mult=2,
        hc_sinkhorn_iters=1,
        initializer_range=0.3,
        max_position_embeddings=8192,
        architectures=["DeepseekV4ForCausalLM"],
    )
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    for name, tensor in model.state_dict().items():
        if name.endswith(("position_bias", "sinks", "e_score_correction_bias")):
            tensor.normal_()
        if name.endswith("tid2eid"):
            tensor.random_(0, 2)
    torch.random.set_rng_state(generator)
    config.save_pretrained(directory)
    save_file(model.state_dict(), Path(directory) / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_unlearned(directory: Path, example: Path, *, seed: int = 0) -> Path:
    """The example model with its tokenizer, and random weights in place of what it learned.

    Only printable ASCII can be answered, so an answer is text that never ends early and survives being
    sent back as the next turn.
    """
    shutil.copytree(example, directory, dirs_exist_ok=True)
    model = DeepseekV3ForCausalLM(DeepseekV3Config.from_pretrained(example))
    _randomize(model, torch.Generator().manual_seed(seed))
    silent = torch.ones(model.config.vocab_size, dtype=torch.bool)
    silent[ord(" ") : ord("~") + 1] = False
    with torch.no_grad():
        model.lm_head.weight[silent] = 0.0
    model.to(torch.bfloat16).save_pretrained(directory)
    shutil.copy(example / "config.json", directory)  # with the fields that transformers lacks
    return directory


def write_windowed_config(directory: Path, *, window_tokens: int = 128) -> Path:
    """Only a config.json; load it with `--load-format dummy`.

    Gemma 2: every second layer slides. (SGLang serves Mistral and Qwen2 without their windows.)
    """
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        hidden_act="gelu_pytorch_tanh",  # what SGLang asks for
        final_logit_softcapping=None,  # SGLang caps logits with a Triton kernel only
        attn_logit_softcapping=None,
        max_position_embeddings=4096,
        sliding_window=window_tokens,
        architectures=["Gemma2ForCausalLM"],
    )
    config.save_pretrained(directory)
    return directory


def write_per_layer_rope_config(directory: Path, *, window_tokens: int = 128) -> Path:
    """Only a config.json: Gemma 3, whose sliding layers have another theta than its full ones."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=4096,
        sliding_window=window_tokens,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        architectures=["Gemma3ForCausalLM"],
    )
    config.save_pretrained(directory)
    return directory


def rewrite_config(directory: Path, **fields: Any) -> Path:
    """Change fields of a checkpoint's config.json behind its weights' back."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2) + "\n")
    return directory


def _save(
    model: PreTrainedModel, directory: Path, seed: int, dtype: torch.dtype, extra: dict[str, Any]
) -> Path:
    _randomize(model, torch.Generator().manual_seed(seed))
    model.to(dtype).save_pretrained(directory)
    return rewrite_config(directory, **extra)


@torch.no_grad()
def _randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Fresh weights, in the order of the parameters' names; norms stay at one."""
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() != 2:
            weight.fill_(1.0)
            continue
        std = 1.0 / math.sqrt(weight.shape[1])
        if "embed_tokens" in name:
            std = EMBEDDING_STD
        elif "lm_head" in name:
            std *= LOGIT_STD
        elif "q_proj" in name or "q_b_proj" in name:
            std *= ATTENTION_GAIN
        weight.normal_(0.0, std, generator=generator)
