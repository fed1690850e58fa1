"""Segment files: read by anyone, appended to by the one process that holds the lock on it.

A reader keeps files open that it needs, and each thread its own reference: one that was closed under a
thread, its number given to another file, would be read as that. A segment that was deleted meanwhile
stays readable for whoever has it open.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import files
from .record import BLOCK, ID_BYTES, Damaged, Header, checksum, claimed_size, parse, segment_block

# Pieces that a payload is read and summed in: small enough to be summed out of the cache.
PIECE_BYTES = 512 << 10
_NAME = re.compile(rf"([0-9a-f]{{{2 * ID_BYTES}}})-[0-9]+\.seg")
_OPEN_FILES = 128


class Segment:
    """A segment that is open for reading, as long as somebody holds this."""

    __slots__ = ("fd", "id", "name")

    def __init__(self, directory: Path, name: str, flags: int = os.O_RDONLY) -> None:
        """Raises FileNotFoundError where it is not, or has no segment's name; OSError."""
        self.fd = -1
        self.name = name
        self.id = segment_id(name)
        self.fd = os.open(directory / name, flags | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def header(self, offset: int, expected: int = BLOCK) -> tuple[Header, memoryview]:
        """The header there and its bytes; ``expected`` is its size if the caller knows.

        Raises:
            Damaged, files.Short, OSError.
        """
        block = memoryview(bytearray(expected))
        files.read_all(self.fd, [block], offset)
        return self._parsed(block, offset)

    def read(self, offset: int, expected: int, into: memoryview) -> tuple[Header, memoryview, bool]:
        """Read a record of ``expected`` header bytes, its payload straight into ``into``.

        Returns the header, its bytes, and whether the payload is as it was written. ``into`` is
        garbage where not.

        Raises:
            Damaged: the header is not whole, or the payload has another size.
            files.Short, OSError.
        """
        block = memoryview(bytearray(expected))
        piece = into[:PIECE_BYTES]
        files.read_all(self.fd, [block, piece], offset)
        header, found = self._parsed(block, offset)
        if header.header_bytes != expected or header.payload_bytes != len(into):
            return header, found, False
        total = checksum(found)
        total.update(piece)
        for at in range(PIECE_BYTES, len(into), PIECE_BYTES):
            piece = into[at : at + PIECE_BYTES]
            files.read_all(self.fd, [piece], offset + expected + at)
            total.update(piece)
        return header, found, total.digest() == header.checksum

    def whole(self, header: Header) -> bool:
        """Whether the record of that header is as it was written. Reads all of it.

        Raises:
            Damaged, files.Short, OSError.
        """
        into = memoryview(bytearray(header.payload_bytes))
        return self.read(header.offset, header.header_bytes, into)[2]

    def _parsed(self, block: memoryview, offset: int) -> tuple[Header, memoryview]:
        size = claimed_size(block)
        if size != len(block):
            block = memoryview(bytearray(size))
            files.read_all(self.fd, [block], offset)
        return parse(block, self.id, offset), block


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of a segment in which no whole record begins."""

    offset: int
    bytes: int


def scan(segment: Segment, start: int, end: int, *, payloads: bool) -> Iterator[Header | Gap]:
    """Records of a range in order, and what is between them; holes are passed over.

    Args:
        segment: of which headers are read, and with ``payloads`` everything.
        start: where a record begins, or anything; 0 for all of it.
        end: a record ends there at the latest.
        payloads: tell records with another payload than was written as gaps.

    Raises:
        OSError.
    """
    at = max(BLOCK, -(-start // BLOCK) * BLOCK)
    gap = None
    while at < end:
        data = files.next_data(segment.fd, at)
        if data is None or data >= end:
            break
        if data // BLOCK * BLOCK > at:
            if gap is not None:
                yield Gap(gap, at - gap)
                gap = None
            at = data // BLOCK * BLOCK
        try:
            header: Header | None = segment.header(at)[0]
            assert header is not None
            if at + header.record_bytes > end or (payloads and not segment.whole(header)):
                header = None
        except Damaged as damaged:
            header = None
            if damaged.reason == "hole":  # where holes can not be punched, zeros stand for one
                at += BLOCK
                continue
        except files.Short:
            header = None
        if header is None:
            gap = at if gap is None else gap
            at += BLOCK
            continue
        if gap is not None:
            yield Gap(gap, at - gap)
            gap = None
        yield header
        at += header.record_bytes
    if gap is not None:
        yield Gap(gap, end - gap)


class Appended:
    """The segment that this process appends to. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Creates it, locked. Whoever calls keeps others from looking at the directory meanwhile.

        Raises:
            OSError.
        """
        self.id = os.urandom(ID_BYTES)
        self.name = f"{self.id.hex()}-{os.getpid()}.seg"
        self.path = directory / self.name
        self.end = BLOCK
        self.unsynced = BLOCK  # bytes
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            if not files.lock_now(self.fd):
                raise BlockingIOError(f"{self.path} is locked by another process")
            files.write_all(self.fd, [memoryview(segment_block(self.id))], 0)
        except BaseException:
            os.close(self.fd)
            self.path.unlink(missing_ok=True)
            raise

    def append(self, header: memoryview, payload: memoryview) -> int:
        """Write a record at the end and return its size; nothing stays of one that fails.

        Raises:
            OSError.
        """
        padding = -len(payload) % BLOCK
        parts = [header, payload] + ([memoryview(bytes(padding))] if padding else [])
        try:
            files.write_all(self.fd, parts, self.end)
        except OSError:
            os.ftruncate(self.fd, self.end)
            raise
        size = len(header) + len(payload) + padding
        self.end += size
        self.unsynced += size
        return size

    def sync(self) -> None:
        """Make what was appended durable. Raises OSError."""
        if self.unsynced:
            os.fdatasync(self.fd)
            self.unsynced = 0

    def close(self) -> None:
        """Append no more. Syncs nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class OpenSegments:
    """The segments that a process reads from, the last ones used kept open. Any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Segment] = OrderedDict()

    def get(self, name: str) -> Segment:
        """Raises OSError, FileNotFoundError among them."""
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                self._open.move_to_end(name)
                return found
        opened = Segment(self._directory, name)
        with self._lock:
            self._open[name] = opened
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return opened

    def forget(self, name: str) -> None:
        """Close it when its last reader is done."""
        with self._lock:
            self._open.pop(name, None)

    def forget_deleted(self) -> None:
        """Close those that other processes deleted: they take room until nobody has them open."""
        with self._lock:
            for name, segment in list(self._open.items()):
                if not os.fstat(segment.fd).st_nlink:
                    del self._open[name]

    def clear(self) -> None:
        """Close all."""
        with self._lock:
            self._open.clear()


def segment_id(name: str) -> bytes:
    """The id in a segment's file name. Raises FileNotFoundError where it is none of a segment."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise FileNotFoundError(f"{name!r} is not the name of a segment")
    return bytes.fromhex(found[1])


def segment_files(directory: Path) -> list[str]:
    """Names of the segments in a directory; none where that is gone."""
    try:
        return sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []
