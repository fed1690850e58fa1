"""Stores that the disk tests open, and what must hold of whatever they answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tier_helpers import PAGE_BYTES, content, pages, worths

from tessera_sglang.memory_pool.disk import NO_SYNC, DiskStore, Sync
from tessera_sglang.memory_pool.lower import PageName

MANIFEST = b'{"model":"m"}'
LAYOUT = b'{"regions":[]}'
LONG = os.environ.get("TESSERA_LONG") == "1"
RECORD_BYTES = 8192  # of a page of PAGE_BYTES: a block of header, a block of payload


def opened(
    path: Path,
    *,
    manifest: bytes = MANIFEST,
    capacity_bytes: int = 64 << 20,
    segment_bytes: int = 1 << 20,
    fsync: Sync = NO_SYNC,
    retry_s: float = 30.0,
    sample: int = 8,
) -> DiskStore:
    """A store of pages as tier_helpers makes them."""
    return DiskStore.open(
        path,
        manifest=manifest,
        page_bytes=PAGE_BYTES,
        layout=LAYOUT,
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        fsync=fsync,
        retry_s=retry_s,
        sample=sample,
    )


def write(store: DiskStore, names: Sequence[PageName], *, shared: bool = False) -> list[bool]:
    """Store the pages of those names."""
    names = list(names)
    return store.write(names, memoryview(pages(names).numpy()), worths(names, shared=shared))


def read(store: DiskStore, names: Sequence[PageName]) -> list[bool]:
    """Which of the pages landed; those are byte for byte as they were written."""
    buffer = bytearray(b"\xaa" * (len(names) * PAGE_BYTES))
    landed = store.read(list(names), memoryview(buffer))
    for number, name in enumerate(names):
        if landed[number]:
            got = bytes(buffer[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])
            assert got == content(name), f"page {number} came back wrong"
    return landed


def on_disk(path: Path) -> int:
    """Bytes that segments and quarantine really take."""
    found = [*(path / "segments").iterdir(), *(path / "quarantine").iterdir()]
    return sum(each.stat().st_blocks * 512 for each in found)


def segment_paths(path: Path) -> list[Path]:
    """The segments of a store."""
    return sorted((path / "segments").iterdir())


def python(*arguments: str, seed: str = "0") -> subprocess.Popen[str]:
    """Another process, in which these helpers can be imported."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
