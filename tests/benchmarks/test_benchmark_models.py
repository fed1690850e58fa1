"""Models of the benchmarks: the shapes they are named after, from a seed, whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import models
from benchmarks.models import SHAPES, ready

SMALL = replace(
    SHAPES["deepseek-v3"],
    hidden=64,
    heads=2,
    query_rank=32,
    latent=32,
    rope=16,
    nope=16,
    value=16,
    mlp=64,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "SHAPES", {"small": SMALL})
    return tmp_path / "benchmarks"


# hidden, heads, query rank of the published config.json; the rest is the same in all of them
PUBLISHED = {
    "deepseek-v2-lite": (2048, 16, None),
    "deepseek-v3": (7168, 128, 1536),
    "kimi-k2": (7168, 64, 1536),
}


@pytest.mark.parametrize("name", models.HEAD_SHAPES)
def test_head_shapes_are_the_published_ones(name: str) -> None:
    shape = SHAPES[name]
    assert (shape.hidden, shape.heads, shape.query_rank) == PUBLISHED[name]
    assert (shape.latent, shape.rope, shape.nope, shape.value) == (512, 64, 128, 128)


def test_a_model_loads_and_follows_from_its_seed(cache: Path) -> None:
    from transformers import AutoTokenizer, DeepseekV3ForCausalLM

    folder = ready("small")
    assert folder == cache / "small"
    assert DeepseekV3ForCausalLM.from_pretrained(folder).config.kv_lora_rank == 32
    assert AutoTokenizer.from_pretrained(folder).encode("a", add_special_tokens=False) == [97]

    def weights(at: Path) -> bytes:
        return (at / "model.safetensors").read_bytes()

    first, other = weights(folder), weights(ready("small", seed=1))
    assert first != other
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert weights(ready("small")) == first


def test_what_was_interrupted_leaves_nothing_and_is_made_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(models, "_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ready("small")
    assert list(cache.iterdir()) == []
    assert (ready("small") / "model.safetensors").is_file()


def test_a_model_of_other_shapes_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ready("small") / "config.json"
    before, kept = config.read_text(), config.stat().st_mtime_ns
    assert ready("small") == config.parent
    assert config.stat().st_mtime_ns == kept, "one that is there is left alone"
    monkeypatch.setattr(models, "SHAPES", {"small": replace(SMALL, heads=4)})
    assert (ready("small") / "config.json").read_text() != before
