"""The example model's architecture, tokenizer and files: DeepSeek-V3's attention in miniature.

`train.py` beside this file trains it. Layers are dense and few, so that a server starts in seconds on
any machine and attention over compressed latents runs for real.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

BYTES = 256
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
"""Ids from 256 on; the last four open a chat message, `<|eos|>` closes it."""
VOCAB = 264  # 256 bytes, 7 special tokens, 1 unused: a multiple of 8 splits over parallel ranks
BOS, EOS, PAD = 256, 257, 258
CONTEXT_TOKENS = 32_768
YARN_FACTOR = 4
LAYERS = 4
HIDDEN = 256

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|eos|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|eos|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_config() -> DeepseekV3Config:
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN // 2,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        num_nextn_predict_layers=0,
        rope_interleave=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": float(YARN_FACTOR),
            "original_max_position_embeddings": CONTEXT_TOKENS // YARN_FACTOR,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


@torch.no_grad()
def initial_model(config: DeepseekV3Config, seed: int) -> DeepseekV3ForCausalLM:
    """Float32 weights to begin with.

    A standard deviation of 1 / sqrt(fan in): at the usual 0.02 a model this narrow does not learn to
    look anything up.
    """
    model = DeepseekV3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() != 2:  # norms
            weight.fill_(1.0)
            continue
        fan_in = config.hidden_size if "embed_tokens" in name else weight.shape[1]
        weight.normal_(0.0, 1.0 / math.sqrt(fan_in), generator=generator)
    return model


def make_tokenizer() -> Tokenizer:
    """One token per byte, with the byte as its id: byte-level BPE without a single merge."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def _byte_symbols() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level vocabularies (GPT-2's table).

    A byte that Latin-1 prints stands for itself; the others take code points from 256 on, in order.
    """
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(BYTES) if byte not in prints]
    return {
        chr(byte if byte in prints else BYTES + rest.index(byte)): byte for byte in range(BYTES)
    }


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }


def write(model: DeepseekV3ForCausalLM, directory: Path) -> None:
    """A checkpoint in bfloat16 with its tokenizer, as SGLang and transformers load it."""
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink()  # nothing in it that config.json lacks
    config = json.loads((directory / "config.json").read_text())
    # SGLang reads these from DeepSeek's remote code; transformers' class does not declare them.
    config |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    _write_json(directory / "config.json", config)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config())


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
