"""The record of a page: a header that names it, its payload, a checksum over both.

    block 0 of a segment  magic, schema, random id of the segment, checksum of those
    then records, each    header, padded to a block | payload | padding to a block

A block is 4 KiB, that of file systems: punching a record out frees exactly its own, and a payload
starts on a page boundary of the file, so one ``preadv`` brings it straight into the caller's buffer.
A page of DeepSeek-V3 is 4.5 MB, so this costs a thousandth.

Checksums are xxh3: 128 bits over all of header and payload, 64 bits over the header alone, so that a
scan need not read payloads. They have to find what disks, cables and half-finished writes do, at the
speed of memory, which no cryptographic digest comes near (blake2b: 1 GB/s). They stop nobody who
may write to the directory, and nothing kept beside the data could: such a one forges the checksum, too.

A record carries the id of its segment and its own offset. Bytes of a page that look like a record are
therefore never taken for one when a scan looks for the next header behind a damaged one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from ..lower import PageName, TierKey, Worth

SCHEMA = 1
BLOCK = 4096
ID_BYTES = 16
DIGEST_BYTES = 32
MOST_HEADER_BYTES = 1 << 24  # what a header may claim to have, so that damage asks for no memory
_MAGIC = b"TESSPAGE"
_SEGMENT_MAGIC = b"TESSSEGM"
# magic, checksum, header checksum | schema, header, payload, offset | tokens, mark, layout, hits |
# start, shared, segment, manifest, namespace, parent, key
_HEAD = struct.Struct("<8s16s8s I I Q Q I I I I Q B 16s 32s 32s 32s 32s")
_SEGMENT = struct.Struct("<8s8s I 16s")
_SUMMED = 8 + 16  # the checksum covers what follows it
_HEADER_SUMMED = _SUMMED + 8


class Damaged(Exception):
    """What is there is not the record that was written. ``reason`` is one word, for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself."""

    header_bytes: int  # with padding
    payload_bytes: int
    offset: int  # in its segment
    segment: bytes  # id
    manifest: bytes
    name: PageName
    layout: bytes
    worth: Worth
    checksum: bytes

    @property
    def record_bytes(self) -> int:
        """All that it takes on the disk."""
        return self.header_bytes + rounded(self.payload_bytes)


def rounded(size: int) -> int:
    """Up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def header_size(name: PageName, layout: bytes) -> int:
    """Bytes of the header of a page of that name, with padding."""
    return rounded(_HEAD.size + len(name.tokens) + len(name.mark) + len(layout))


def pack(
    name: PageName,
    worth: Worth,
    payload: memoryview,
    *,
    segment: bytes,
    offset: int,
    manifest: bytes,
    layout: bytes,
) -> bytearray:
    """The header of a record, padded; the payload follows it as it is."""
    size = header_size(name, layout)
    block = bytearray(size)
    block[_HEAD.size :] = (name.tokens + name.mark + layout).ljust(size - _HEAD.size, b"\0")
    _HEAD.pack_into(
        block,
        0,
        _MAGIC,
        b"",
        b"",
        SCHEMA,
        size,
        len(payload),
        offset,
        len(name.tokens),
        len(name.mark),
        len(layout),
        min(worth.hits, 0xFFFFFFFF),
        worth.start,
        int(worth.shared),
        segment,
        manifest,
        name.namespace,
        name.parent,
        name.key,
    )
    view = memoryview(block)
    block[_SUMMED:_HEADER_SUMMED] = xxhash.xxh3_64_digest(view[_HEADER_SUMMED:])
    total = checksum(view)
    total.update(payload)
    block[8:_SUMMED] = total.digest()
    return block


def checksum(header: memoryview) -> xxhash.xxh3_128:
    """The checksum of a record, to be fed with its payload."""
    return xxhash.xxh3_128(header[_SUMMED:])


def claimed_size(block: memoryview) -> int:
    """How many bytes the header that starts here has. ``block`` holds BLOCK bytes of it or more.

    Raises:
        Damaged: ``hole`` where all is zero, else ``header``.
    """
    magic, _, _, schema, size, *_ = _HEAD.unpack_from(block)
    if magic != _MAGIC:
        raise Damaged("hole" if not any(block[:BLOCK]) else "header")
    if schema != SCHEMA or size % BLOCK or not BLOCK <= size <= MOST_HEADER_BYTES:
        raise Damaged("header")
    return int(size)


def parse(block: memoryview, segment: bytes, offset: int) -> Header:
    """A whole header that was found there.

    Raises:
        Damaged: ``hole`` where all is zero; ``header`` where it is not as written; ``place`` where it
            was written to another place.
    """
    if claimed_size(block) != len(block):
        raise Damaged("header")
    _, total, sum_, _, size, payload, own, tokens, mark, layout, hits, start, shared, *ids = (
        _HEAD.unpack_from(block)
    )
    if xxhash.xxh3_64_digest(block[_HEADER_SUMMED:]) != sum_:
        raise Damaged("header")
    if _HEAD.size + tokens + mark + layout > size:
        raise Damaged("header")
    in_segment, manifest, namespace, parent, key = ids
    if in_segment != segment or own != offset:
        raise Damaged("place")
    texts = bytes(block[_HEAD.size : _HEAD.size + tokens + mark + layout])
    name = PageName(
        namespace,
        TierKey(parent),
        TierKey(key),
        texts[:tokens],
        texts[tokens : tokens + mark],
    )
    worth = Worth(start, bool(shared), hits)
    described = texts[tokens + mark :]
    return Header(size, payload, offset, segment, manifest, name, described, worth, total)


def segment_block(segment: bytes) -> bytes:
    """The first block of a segment."""
    block = _SEGMENT.pack(_SEGMENT_MAGIC, b"", SCHEMA, segment)
    sum_ = xxhash.xxh3_64_digest(block[16:])
    return _SEGMENT.pack(_SEGMENT_MAGIC, sum_, SCHEMA, segment).ljust(BLOCK, b"\0")


def name_tag(name: PageName) -> int:
    """64 bits of all of a name but its key: tells names apart whose keys collide. Signed, for sqlite.

    Only a hint for look-ups: whoever reads compares the names themselves.
    """
    framed = b"%d,%d,%d:" % (len(name.namespace), len(name.parent), len(name.tokens))
    parts = (framed, name.namespace, name.parent, name.tokens, name.mark)
    return int.from_bytes(xxhash.xxh3_64_digest(b"".join(parts)), "little", signed=True)
