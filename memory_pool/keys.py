"""Names of pages: how a run of tokens becomes the key it is found by.

A key is ``H(parent key, token bytes, mark)``, so it names a page together with everything before it.
Keys only discover; whoever finds a page by its key compares parent and bytes before using it
(:mod:`memory_pool.index`). They live as long as the process and are never written anywhere.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

import xxhash

PageKey = NewType("PageKey", bytes)
HashFunction = Callable[[bytes], bytes]

TOKEN_BYTES = 8  # tokens travel through the engine as array("q")
NO_MARK = b""


def xxh3_128(data: bytes) -> bytes:
    """The default hash: fast, unkeyed, not collision resistant; matches are verified."""
    return xxhash.xxh3_128_digest(data)


def page_digest(token_bytes: bytes) -> str:
    """Short name of a page's token ids for reports (int64, little-endian); no key."""
    return hashlib.blake2b(token_bytes, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """What may share pages with what: requests in different namespaces never meet.

    ``model`` names weights, rope, cache schema, dtype, page size and parallel layout; the rest comes
    from the request. Fields are framed by length, so ("ab", "c") and ("a", "bc") differ. The root key
    stands for all of them, so it is a cryptographic hash: a caller may choose salts.
    """

    model: str
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: str | None = None

    def root_key(self) -> PageKey:
        """The key that every chain of this namespace starts from."""
        framed = [b"tessera-namespace-1"]
        for field in (self.model, self.extra_key, self.cache_salt, self.lora_id):
            if field is None:
                framed.append(b"\0")
            else:
                raw = field.encode("utf-8", "surrogatepass")
                framed.append(b"\1" + struct.pack("<Q", len(raw)) + raw)
        return PageKey(hashlib.blake2b(b"".join(framed), digest_size=32).digest())


@dataclass(frozen=True, slots=True)
class VisibleSpan:
    """A span that becomes visible to a chain of remaining tokens; part of the keys from there on."""

    at: int  # index into the remaining tokens of the first one that sees the span
    body_digest: bytes  # cryptographic, of root and body: marks are compared, and so must name them
    prompt_start: int  # prompt offset of the body
    body_tokens: int
    linked_pages: int  # leading pages of the body that the request computed in place

    def encode(self, page_size: int) -> bytes:
        """Bytes of the mark, with the position inside its page."""
        return self.body_digest + struct.pack(
            "<QQQQ", self.at % page_size, self.prompt_start, self.body_tokens, self.linked_pages
        )


class Chain:
    """The pages of a token stream, named one after another as far as anybody asks.

    Whole pages only; a trailing partial page has no name. Hashing is lazy, so that a look-up that
    misses at the first page pays for one page.
    """

    __slots__ = ("_hash", "_keys", "_marks", "_tokens", "page_count", "page_size", "root_key")

    def __init__(
        self,
        root_key: PageKey,
        tokens: array[int] | Sequence[int],
        page_size: int,
        *,
        visible: Iterable[VisibleSpan] = (),
        hash_function: HashFunction = xxh3_128,
    ) -> None:
        flat = tokens if isinstance(tokens, array) else array("q", tokens)
        self.root_key = root_key
        self.page_size = page_size
        self.page_count = len(flat) // page_size
        self._tokens = flat.tobytes()
        self._marks = _marks_by_page(visible, page_size)
        self._hash = hash_function
        self._keys: list[PageKey] = []

    def tokens(self, page: int) -> bytes:
        """Token bytes of one page: ``page_size * TOKEN_BYTES`` of them."""
        width = self.page_size * TOKEN_BYTES
        return self._tokens[page * width : (page + 1) * width]

    def mark(self, page: int) -> bytes:
        """What became visible inside the page; empty for a plain page."""
        return self._marks.get(page, NO_MARK)

    def key(self, page: int) -> PageKey:
        """Key of one page. O(pages not yet named before it)."""
        assert 0 <= page < self.page_count, "only whole pages have names"
        keys = self._keys
        while len(keys) <= page:
            index = len(keys)
            parent = keys[-1] if keys else self.root_key
            keys.append(PageKey(self._hash(parent + self.tokens(index) + self.mark(index))))
        return keys[page]


def _marks_by_page(visible: Iterable[VisibleSpan], page_size: int) -> Mapping[int, bytes]:
    marks: dict[int, bytes] = {}
    for span in visible:
        page = span.at // page_size
        marks[page] = marks.get(page, NO_MARK) + span.encode(page_size)
    return marks
