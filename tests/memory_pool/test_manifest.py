"""What names a model's KV (case 23): the content of its weights and all that decides about its rows."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tessera_sglang.memory_pool import manifest
from tessera_sglang.memory_pool.manifest import Manifest, weights_fingerprint

MANIFEST = Manifest(
    architecture="DeepseekV3ForCausalLM",
    weights="w",
    settings="bfloat16",
    rope="r",
    rows=((64, 192),) * 3,
    kv_dtype="torch.bfloat16",
    page_tokens=64,
    tp_rank=0,
    tp_size=1,
)


def weights(directory: Path, *, seed: int = 0, shards: int = 1) -> Path:
    """Twelve tensors, in files of equal numbers of them."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{n}.weight": torch.randn(40, 50, generator=generator) for n in range(12)}
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, directory / f"model-{shard}.safetensors")
    return directory


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "LlamaForCausalLM"},
        {"weights": "v"},
        {"settings": "bfloat16 awq"},
        {"rope": "s"},
        {"rows": ((64, 192),) * 2},
        {"kv_dtype": "torch.float16"},
        {"page_tokens": 128},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"schema": 2},
    ],
)
def test_each_field_changes_the_digest(change: dict[str, object]) -> None:
    assert dataclasses.replace(MANIFEST, **change).digest != MANIFEST.digest  # type: ignore[arg-type]


def test_the_digest_is_that_of_another_process() -> None:
    code = f"from tessera_sglang.memory_pool.manifest import Manifest\nprint({MANIFEST!r}.digest)"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        said = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        assert said.stdout.strip() == MANIFEST.digest


def test_weights_are_named_by_what_is_in_them(tmp_path: Path) -> None:
    one = weights_fingerprint(weights(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere")
    assert weights_fingerprint(tmp_path / "elsewhere") == one
    assert weights_fingerprint(weights(tmp_path / "sharded", shards=5)) == one
    assert weights_fingerprint(weights(tmp_path / "other", seed=1)) != one


@pytest.mark.parametrize("whole_bytes", [manifest.WHOLE_BYTES, 0], ids=["small", "large"])
def test_a_changed_byte_of_a_sampled_place_is_seen(
    tmp_path: Path, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "WHOLE_BYTES", whole_bytes)
    path = weights(tmp_path / "one") / "model-0.safetensors"
    before = weights_fingerprint(path.parent)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert weights_fingerprint(path.parent) != before


def test_large_weights_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE_BYTES", 0), ("SAMPLED_TENSORS", 3), ("SAMPLE_BYTES", 100)):
        monkeypatch.setattr(manifest, name, value)
    read: list[tuple[int, int]] = []
    original = manifest._read

    def counted(file: object, start: int, size: int, path: Path) -> bytes:
        read.append((start, size))
        return original(file, start, size, path)  # type: ignore[arg-type]

    monkeypatch.setattr(manifest, "_read", counted)
    weights_fingerprint(weights(tmp_path / "one"))
    assert [size for _, size in read[2:]] == [100] * 9, "three places of three tensors"


def test_other_kinds_of_files_and_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights"):
        weights_fingerprint(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"abc" * 999)
    one = weights_fingerprint(tmp_path)
    (tmp_path / "model.bin").rename(tmp_path / "renamed.bin")
    assert weights_fingerprint(tmp_path) == one
    (tmp_path / "renamed.bin").write_bytes(b"abd" * 999)
    assert weights_fingerprint(tmp_path) != one


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x05" + bytes(7) + b"abcde", b"\x02" + bytes(7) + b"[]", b"1"]
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        weights_fingerprint(tmp_path)
