"""A store's directory for people: what it holds, whether it is whole, tidied up, taken out.

Needs no manifest: it looks at records of every identity. Servers may go on meanwhile.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from . import files, reconcile
from .directory import Directory
from .index import Place
from .record import Damaged, Header
from .segments import Segment, segment_files

Progress = Callable[[int], None]  # of so many more


@dataclass(frozen=True, slots=True)
class Group:
    """Records of one manifest and namespace."""

    manifest: str  # digest, hex
    namespace: str  # root key, hex: salts can not be told from it
    records: int
    shared: int  # of spans' bodies
    tokens: int
    bytes: int  # on the disk, headers included


@dataclass(frozen=True, slots=True)
class Listing:
    """What a directory holds."""

    groups: tuple[Group, ...]
    segments: int
    disk_bytes: int  # of segments, as the file system counts
    quarantined: int  # files
    unreadable: int  # records whose headers could not be read


def attach(path: Path) -> Directory:
    """Open an existing store; the index is made again if it is missing or damaged.

    Raises:
        ValueError: there is none.
        OSError, sqlite3.Error: it can not be read.
    """
    directory = Directory(path, create=False)
    directory.make()
    if not directory.open_index():
        with directory.locked():
            if not directory.open_index():
                reconcile.rebuild(directory)
    return directory


def listing(directory: Directory, progress: Progress = lambda _: None) -> Listing:
    """Sum up by manifest and namespace. Reads the header of every record."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    unreadable = 0
    for _, _, header in _headers(directory, list(directory.index.places()), progress):
        if header is None:
            unreadable += 1
            continue
        group = counts.setdefault((header.manifest.hex(), header.name.namespace.hex()), Counter())
        group["records"] += 1
        group["shared"] += header.worth.shared
        group["tokens"] += len(header.name.tokens) // 8
        group["bytes"] += header.record_bytes
    names = segment_files(directory.segments_path)
    blocks = sum(os.stat(directory.segments_path / name).st_blocks for name in names)
    groups = (
        Group(*which, count["records"], count["shared"], count["tokens"], count["bytes"])
        for which, count in sorted(counts.items())
    )
    kept = len(list(directory.quarantine_path.glob("*.bin")))
    return Listing(tuple(groups), len(names), blocks * 512, kept, unreadable)


def export(
    directory: Directory, to: Path, keys: frozenset[str], progress: Progress = lambda _: None
) -> int:
    """Write payloads as a safetensors file, one tensor a region; returns how many records.

    A region is ``{"name", "dtype", "shape"}`` in the layout's ``regions``, dtypes as safetensors names
    them; where they do not make up the payload, a page is one tensor of U8. Names are ``KEY.REGION``,
    and ``KEY`` alone. ``keys``: beginnings of keys in hex; none for all records. The file is there
    whole or not at all, and holds verified payloads only.

    Raises:
        ValueError: nothing has such a key.
        OSError: it can not be written.
    """
    headers = [
        (segment, header)
        for segment, _, header in _headers(directory, list(directory.index.places()), progress)
        if segment is not None and header is not None and _chosen(header, keys)
    ]
    whole = [(s, h) for s, h in headers if _whole(s, h)]
    if not whole:
        raise ValueError("no whole record is chosen: nothing is exported")
    table, at = {}, 0
    metadata: dict[str, str] = {}
    for _, header in whole:
        key = header.name.key.hex()
        for name, dtype, shape, size in _regions(header):
            table[key + name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        about = {
            "manifest": header.manifest.hex(),
            "namespace": header.name.namespace.hex(),
            "parent": header.name.parent.hex(),
            "tokens": _ids(header.name.tokens),
            "mark": header.name.mark.hex(),
        }
        metadata[key] = json.dumps(about)
    draft = to.with_name(f"{to.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            _write(file, {"__metadata__": metadata, **table}, whole)
        os.replace(draft, to)
    finally:
        draft.unlink(missing_ok=True)
    return len(whole)


def _write(file: BinaryIO, table: dict[str, object], whole: list[tuple[Segment, Header]]) -> None:
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for segment, header in whole:
        into = memoryview(bytearray(header.payload_bytes))
        if not segment.read(header.offset, header.header_bytes, into)[2]:
            raise OSError("a record was evicted while it was exported; try again")
        file.write(into)


def _whole(segment: Segment, header: Header) -> bool:
    try:
        return segment.whole(header)
    except (Damaged, files.Short):
        return False


def _chosen(header: Header, keys: frozenset[str]) -> bool:
    return not keys or any(header.name.key.hex().startswith(key) for key in keys)


def _ids(tokens: bytes) -> list[int]:
    return [
        int.from_bytes(tokens[n : n + 8], "little", signed=True) for n in range(0, len(tokens), 8)
    ]


_SIZES = {
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}


def _regions(header: Header) -> list[tuple[str, str, list[int], int]]:
    """Suffix, dtype, shape and bytes of each tensor of a payload."""
    whole = [("", "U8", [header.payload_bytes], header.payload_bytes)]
    try:
        found = []
        for region in json.loads(header.layout)["regions"]:
            shape = [int(n) for n in region["shape"]]
            size = _SIZES[region["dtype"]]
            for n in shape:
                size *= n
            found.append((f".{region['name']}", str(region["dtype"]), shape, size))
    except (ValueError, KeyError, TypeError):
        return whole
    return found if found and sum(one[3] for one in found) == header.payload_bytes else whole


def _headers(
    directory: Directory, places: list[Place], progress: Progress
) -> Iterator[tuple[Segment | None, Place, Header | None]]:
    for place in places:
        segment = header = None
        try:
            segment = directory.segments.get(place.segment)
            header = segment.header(place.offset)[0]
        except (OSError, Damaged, files.Short):
            pass
        progress(1)
        yield segment, place, header
