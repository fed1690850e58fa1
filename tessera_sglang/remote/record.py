"""What a value in a shared engine holds: a header that names the page, the page, and a checksum.

    header, HEADER_BYTES with padding | page | padding to a block

All values of a model have one size, which engines with registered buffers need. Whoever may write to
the engine may write anything, so a value is served only where it is whole and says that it is the very
page that was asked for. The checksum finds damage; it stops nobody who forges values on purpose.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

from tessera_sglang.memory_pool.lower import PageName

SCHEMA = 1
BLOCK = 4096  # engines that bypass the page cache want sizes and addresses in whole blocks
HEADER_BYTES = BLOCK  # room for 64 tokens and some 40 spans that become visible inside the page
DIGEST_BYTES = 32
_MAGIC = b"TESSREMO"
# magic, checksum | schema, header, page, tokens, mark | manifest, namespace, parent, key
_HEAD = struct.Struct("<8s16s I I Q I I 32s 32s 32s 32s")
_SUMMED = 8 + 16  # the checksum covers what follows it

_KEY_FRAME = b"tessera-remote-1"


class Rejected(Exception):
    """A value is not the page that was asked for. ``reason`` is one word, for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def record_bytes(page_bytes: int) -> int:
    """Size of every value, in bytes."""
    return HEADER_BYTES + -(-page_bytes // BLOCK) * BLOCK


def key_text(manifest: bytes, name: PageName) -> str:
    """Key of a page in the engine: 64 hexadecimal digits.

    A digest of the manifest's digest, the namespace (itself a digest, so that no salt is in clear) and
    the page's name; each is framed by its length.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_KEY_FRAME)
    for part in (manifest, name.namespace, name.key):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.hexdigest()


def fits(name: PageName) -> bool:
    """Whether the header has room for the name."""
    return (
        len(name.namespace) == len(name.parent) == len(name.key) == DIGEST_BYTES
        and _HEAD.size + len(name.tokens) + len(name.mark) <= HEADER_BYTES
    )


def pack(name: PageName, page: memoryview, *, manifest: bytes, into: memoryview) -> None:
    """Write a record to ``into`` (``record_bytes(len(page))`` bytes). The name must fit."""
    texts = name.tokens + name.mark
    into[_HEAD.size : HEADER_BYTES] = texts.ljust(HEADER_BYTES - _HEAD.size, b"\0")
    _HEAD.pack_into(into, 0, *_fields(name, len(page), manifest, b""))
    into[HEADER_BYTES : HEADER_BYTES + len(page)] = page
    end = HEADER_BYTES + len(page)
    into[end:] = bytes(len(into) - end)
    into[8:_SUMMED] = xxhash.xxh3_128_digest(into[_SUMMED:])


def verified(record: memoryview, name: PageName, page_bytes: int, *, manifest: bytes) -> memoryview:
    """The page inside a record: a view of ``page_bytes`` bytes.

    Raises:
        Rejected: ``format`` where it is no record of ours; ``checksum`` where it is not as it was
            written; ``manifest`` or ``name`` where it is whole, but of another model or page.
    """
    magic, sum_, schema, header, page, tokens, mark, *ids = _HEAD.unpack_from(record)
    if magic != _MAGIC or schema != SCHEMA:
        raise Rejected("format")
    if xxhash.xxh3_128_digest(record[_SUMMED:]) != sum_:
        raise Rejected("checksum")
    if ids[0] != manifest:
        raise Rejected("manifest")
    if (magic, sum_, schema, header, page, tokens, mark, *ids) != _fields(
        name, page_bytes, manifest, sum_
    ):
        raise Rejected("name")
    if record[_HEAD.size : _HEAD.size + tokens + mark] != name.tokens + name.mark:
        raise Rejected("name")
    return record[HEADER_BYTES : HEADER_BYTES + page_bytes]


def _fields(name: PageName, page_bytes: int, manifest: bytes, sum_: bytes) -> tuple[object, ...]:
    return (
        *(_MAGIC, sum_, SCHEMA, HEADER_BYTES, page_bytes, len(name.tokens), len(name.mark)),
        *(manifest, name.namespace, name.parent, name.key),
    )
