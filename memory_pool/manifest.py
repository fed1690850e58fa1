"""What computed KV, in a form that another process can compare: a manifest and its digest.

Records of a lower tier are of one manifest, and a server reads those of its own only. It names the
weights by what is in their files, not by where they lie or what they are called.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

TESSERA_SCHEMA = 1  # goes up when the same fields, tokens and marks would name other bytes
WHOLE_BYTES = 64 << 20  # weights up to this size are hashed completely
SAMPLED_TENSORS = 2048  # of larger ones, evenly spread over the names
SAMPLE_BYTES = 4096  # at the beginning, in the middle and at the end of each
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_MOST_HEADER_BYTES = 100 << 20  # of a safetensors file, as its own readers have it


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that must agree for one server to read another's pages; the namespace is beside it."""

    architecture: str
    weights: str  # `weights_fingerprint`
    settings: (
        str  # what else the server was told that changes what is computed: dtype, quantisation
    )
    rope: str  # digest of all that decides how keys are rotated
    rows: tuple[tuple[int, int], ...]  # of a page, buffer by buffer: rows and bytes of a row
    kv_dtype: str
    page_tokens: int
    tp_rank: int
    tp_size: int
    schema: int = TESSERA_SCHEMA

    def json(self) -> bytes:
        """Canonical: sorted keys, no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """blake2b-256 of :meth:`json`, hex."""
        return hashlib.blake2b(self.json(), digest_size=32, person=b"tessera-model-1").hexdigest()


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int  # in the file
    size: int


def weights_fingerprint(directory: str | Path) -> str:
    """Name of the weights in a directory, hex: of all tensors' names, dtypes and shapes, and of bytes.

    Safetensors are read tensor by tensor in the order of their names, so that neither file names nor
    how tensors are cut into files count. Up to 64 MiB all bytes count; of larger weights 12 KiB of up
    to 2,048 tensors, which a training step or a quantisation changes, and an edit of single values may
    not. Files of other kinds are sampled by file, in the order of their sizes and contents.

    Raises:
        ValueError: there are no weights, or a file is none that can be read.
    """
    path = Path(directory)
    files = sorted(path.glob("*.safetensors"))
    digest = hashlib.blake2b(digest_size=32, person=b"tessera-weights1")
    if files:
        tensors = sorted(tensor for file in files for tensor in _tensors(file))
        for tensor in tensors:
            _add(digest, json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        small = sum(tensor.size for tensor in tensors) <= WHOLE_BYTES
        for tensor in tensors if small else _chosen(tensors):
            with tensor.path.open("rb") as file:
                for part in _parts(tensor.start, tensor.size, whole=small):
                    _add(digest, _read(file, *part, tensor.path))
        return digest.hexdigest()
    others = sorted(file for file in path.iterdir() if file.suffix in OTHER_WEIGHTS)
    if not others:
        raise ValueError(
            f"{path} has no weights (*.safetensors, *{', *'.join(OTHER_WEIGHTS)}) to name what is "
            "stored by; serve the model from a directory that has"
        )
    for sampled in sorted(_sampled_file(file) for file in others):
        _add(digest, sampled)
    return digest.hexdigest()


def _tensors(path: Path) -> Iterator[_Tensor]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", _read(file, 0, 8, path))
            if size > _MOST_HEADER_BYTES:
                raise ValueError(
                    f"{path} is no safetensors file: its header would have {size} bytes"
                )
            header = json.loads(_read(file, 8, size, path))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                yield _Tensor(name, entry["dtype"], shape, path, 8 + size + start, end - start)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no safetensors file: {error!r}") from error


def _chosen(tensors: list[_Tensor]) -> list[_Tensor]:
    if len(tensors) <= SAMPLED_TENSORS:
        return tensors
    last = len(tensors) - 1
    return [tensors[number * last // (SAMPLED_TENSORS - 1)] for number in range(SAMPLED_TENSORS)]


def _parts(start: int, size: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what counts of ``size`` bytes from ``start`` on."""
    if whole or size <= 3 * SAMPLE_BYTES:
        yield start, size
        return
    for offset in (0, (size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES):
        yield start + offset, SAMPLE_BYTES


def _read(file: BinaryIO, start: int, size: int, path: Path) -> bytes:
    file.seek(start)
    found = file.read(size)
    if len(found) != size:
        raise ValueError(f"{path} ends at {start + len(found)} bytes, and {start + size} are named")
    return found


def _sampled_file(path: Path) -> bytes:
    size = os.stat(path).st_size
    digest = hashlib.blake2b(struct.pack("<Q", size), digest_size=32)
    samples = 64
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
        else:
            for number in range(samples):
                start = number * (size - SAMPLE_BYTES) // (samples - 1)
                digest.update(_read(file, start, SAMPLE_BYTES, path))
    return digest.digest()


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)) + part)
