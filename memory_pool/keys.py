"""Names: how a request's tokens become pages that can be found by what they contain.

The key of a page is ``H(identity of the parent page, token bytes, mark)``. Keys only discover; whoever
finds a page by its key compares parent and bytes before using it (:mod:`memory_pool.index`). They
live as long as the process and are never written anywhere.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
import numpy.typing as npt
import xxhash

PageKey = NewType("PageKey", bytes)
HashFunction = Callable[[bytes], bytes]
# What becomes visible inside a page: (token inside the page, bytes that name it), ascending
Mark = tuple[tuple[int, bytes], ...]
Tokens = npt.NDArray[np.int64]

TOKEN_BYTES = 8  # tokens travel through the engine as array("q")
NO_MARK: Mark = ()


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

    def encode(self) -> bytes:
        """What the mark says of the span, whatever its place in the page."""
        return self.body_digest + struct.pack(
            "<QQQ", self.prompt_start, self.body_tokens, self.linked_pages
        )


def as_tokens(tokens: array[int] | Tokens | Sequence[int]) -> Tokens:
    """Token ids, int64 [n]; an ``array("q")`` is read in place and can not grow meanwhile."""
    if isinstance(tokens, array) and tokens.typecode == "q" and tokens:
        return np.frombuffer(tokens, np.int64)
    return np.ascontiguousarray(tokens, np.int64)


class Chain:
    """A token stream as the index reads it: whole pages, and the tokens of a last partial one.

    Made for one look-up or publication. An ``array("q")`` is read in place, not copied, and can not
    grow while the chain lives.
    """

    __slots__ = ("marked", "marks", "page_count", "page_size", "root_key", "token_count", "view")

    def __init__(
        self,
        root_key: PageKey,
        tokens: array[int] | Tokens | Sequence[int],
        page_size: int,
        *,
        visible: Sequence[VisibleSpan] = (),
    ) -> None:
        """``tokens`` are the stream's ids; ``visible`` its spans, ascending by ``at``."""
        flat: Any = as_tokens(tokens)  # mypy knows no buffers before Python 3.12
        self.root_key = root_key
        self.page_size = page_size
        self.token_count = len(flat)
        self.page_count = self.token_count // page_size
        # bytes of all tokens, int64 each
        self.view = memoryview(flat).cast("B") if self.token_count else memoryview(b"")
        self.marks: Mapping[int, Mark] = _marks_by_page(visible, page_size) if visible else {}
        self.marked = sorted(self.marks) if visible else ()

    def page_bytes(self, page: int) -> bytes:
        """Token bytes of one page: ``page_size * TOKEN_BYTES`` of them, fewer for a partial one."""
        width = self.page_size * TOKEN_BYTES
        return self.view[page * width : (page + 1) * width].tobytes()

    def mark(self, page: int) -> Mark:
        """What becomes visible inside the page; empty for a plain page."""
        return self.marks.get(page, NO_MARK)

    def next_mark(self, page: int) -> int:
        """First page after ``page`` that has a mark, or the number of pages and one."""
        return next((marked for marked in self.marked if marked > page), self.page_count + 1)


def page_key(
    hash_function: HashFunction, parent: bytes, token_bytes: bytes, mark: Mark = NO_MARK
) -> PageKey:
    """Key of a page below ``parent`` (:func:`below_root` or :func:`below_page`)."""
    if not mark:
        return PageKey(hash_function(parent + token_bytes))
    return PageKey(hash_function(parent + token_bytes + framed(mark)))


def framed(mark: Mark) -> bytes:
    """A mark as bytes that no other mark has; empty for a plain page."""
    return b"".join(struct.pack("<QQ", at, len(what)) + what for at, what in mark)


def sibling_order(head: bytes, mark: Mark) -> bytes:
    """What orders pages below one parent: those that begin alike, marks included, are neighbours.

    Where something becomes visible, a hash of that and of the token stands for the token.
    """
    if not mark:
        return head
    woven = np.frombuffer(head, np.int64).copy()
    for at, what in mark:
        if at < len(woven):
            seed = int(woven[at]) & (1 << 64) - 1
            woven[at] = xxhash.xxh3_64_intdigest(what, seed=seed) >> 1
    return woven.tobytes()


def below_root(root_key: PageKey) -> bytes:
    """Identity of what the first page of a chain hangs below."""
    return b"n" + root_key


def below_page(page_id: int) -> bytes:
    """Identity of a sealed page as a parent: its physical page, which no other one has meanwhile."""
    return b"p" + struct.pack("<Q", page_id)


def _marks_by_page(visible: Sequence[VisibleSpan], page_size: int) -> Mapping[int, Mark]:
    marks: dict[int, Mark] = {}
    for span in visible:
        page, at = divmod(span.at, page_size)
        marks[page] = (*marks.get(page, NO_MARK), (at, span.encode()))
    return marks
