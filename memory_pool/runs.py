"""What the content index is made of, and the plain records that it hands out.

A *run* is a stretch of sealed pages of one chain that have always been used together: the unit that
is compared, counted and queued for eviction, so that 32k tokens cost one comparison and not 512. A run
is cut where a request's path ends inside it, and shortened from its end by eviction. Whatever the
index says of pages follows from runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .keys import (
    NO_MARK,
    TOKEN_BYTES,
    Chain,
    Mark,
    PageKey,
    Tokens,
    address_of,
    below_page,
    below_root,
    sibling_order,
)

PageIds = npt.NDArray[np.int32]  # physical pages of the paged tier


class Run:
    """Sealed pages ``start .. end`` of a chain; with no pages, the beginning of a namespace.

    Only the index changes one. Children hang below the last page.
    """

    __slots__ = (
        "_address",
        "alive",  # cleared when its last page is evicted, and by a reset
        "children",  # runs below the last page, ordered by `order`
        "end",
        "first",  # the beginning of `order`, as a number: most siblings differ in it
        "hits",  # publications that passed through
        "holds",  # paths of waiting requests that end here, and children that are held
        "identity",  # what the keys of its children are derived from
        "key",  # of the first page; empty for the beginning of a namespace
        "locks",  # paths of running requests that end here, and children that are locked
        "mark",  # of the first page; no other page of a run has one
        "memo",  # whatever the owner of the index derived from `page_ids`; gone when they change
        "page_ids",
        "parent",
        "queued",  # has an entry in the eviction queue
        "root_key",
        "start",  # pages before it
        "tick",  # last use, on the logical clock
        "tokens",
    )

    def __init__(
        self,
        root_key: PageKey,
        *,
        key: PageKey,
        parent: Run | None,
        start: int,
        tokens: Tokens,
        page_ids: PageIds,
        mark: Mark,
    ) -> None:
        self.root_key = root_key
        self.parent = parent
        self.children: list[Run] = []
        self.locks = self.holds = self.hits = self.tick = 0
        self.queued = False
        self.alive = True
        self._keep(tokens, page_ids)
        self._span(key, start, start + len(page_ids), mark)
        self.identity = below_page(int(page_ids[-1])) if len(page_ids) else below_root(root_key)

    def _span(self, key: PageKey, start: int, end: int, mark: Mark) -> None:
        self.key = key
        self.start = start
        self.end = end
        self.mark = mark
        self.memo: Any = None
        self.first = leading(sibling_order(self.tokens[:1], mark))

    def _keep(self, tokens: Tokens, page_ids: PageIds) -> None:
        """Hold these pages; of a larger array only while it is less than twice as large."""
        base = tokens.base
        if isinstance(base, np.ndarray) and base.nbytes > 2 * tokens.nbytes:
            tokens = tokens.copy()
            page_ids = page_ids.copy()
        self.tokens = tokens
        self.page_ids = page_ids
        self._address = address_of(tokens)

    def split(self, upper_pages: int, page_size: int, key: PageKey, identity: bytes) -> Run:
        """Give the first pages to a new run above, which is returned; the rest goes by ``key``.

        ``identity`` is that of the last page given away.
        """
        upper = Run.__new__(Run)
        upper.root_key, upper.parent, upper.identity = self.root_key, self.parent, identity
        upper.key, upper.mark, upper.first = self.key, self.mark, self.first
        upper.start, upper.end = self.start, self.start + upper_pages
        upper.tick, upper.hits = self.tick, self.hits
        upper.locks, upper.holds = int(self.locks > 0), int(self.holds > 0)
        upper.queued, upper.alive, upper.memo, upper.children = False, True, None, [self]
        tokens, page_ids, cut = self.tokens, self.page_ids, upper_pages * page_size
        upper._keep(tokens[:cut], page_ids[:upper_pages])
        self._keep(tokens[cut:], page_ids[upper_pages:])
        self.parent = upper
        self._span(key, upper.end, self.end, NO_MARK)
        return upper

    def shorten(self, pages: int, page_size: int) -> PageIds:
        """Let go of all but the first ``pages`` pages; returns the others, in row order."""
        gone = self.page_ids[pages:]
        self._keep(self.tokens[: pages * page_size], self.page_ids[:pages])
        self.end = self.start + pages
        self.identity = below_page(int(self.page_ids[-1]))
        self.memo = None
        return gone

    @property
    def page_count(self) -> int:
        """Pages in this run."""
        return self.end - self.start

    def order(self, page_size: int) -> tuple[bytes, PageKey]:
        """Its place among its siblings: those that begin alike stand together."""
        return sibling_order(self.tokens[:page_size], self.mark), self.key

    def common_tokens(self, chain: Chain, limit: int) -> int:
        """How many of its first tokens are those of ``chain`` at the same place, at most ``limit``.

        All at once. Stops before a page of the chain that has a mark this run lacks. ``limit`` must
        not reach past the end of the chain.
        """
        size = chain.page_size
        count = min(len(self.tokens), limit)
        if chain.marked:
            count = min(count, (chain.next_mark(self.start) - self.start) * size)
        at = self.start * size
        if _same_bytes(self._address, chain.address + at * TOKEN_BYTES, count * TOKEN_BYTES):
            return count
        return int((self.tokens[:count] == chain.tokens[at : at + count]).argmin())


_memcmp = ctypes.PyDLL(None).memcmp  # a tenth of what a vectorised comparison costs to call
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def _same_bytes(one: int, other: int, count: int) -> bool:
    return not _memcmp(one, other, count)


def joined(parts: list[PageIds]) -> PageIds:
    """One array of several, without a copy where there is one."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def leading(order: bytes) -> int:
    """The first token of an order, as a number that sorts as its bytes do."""
    return int.from_bytes(order[:TOKEN_BYTES], "big")


# The records below are made once and never changed. They are not frozen, because that triples the time
# it takes to make one, and a look-up of a short prompt makes three.


@dataclass(slots=True)
class Fork:
    """A sealed page of which a request needs the first rows only: to be copied, not read in place."""

    run: Run
    page: int  # of the chain, the first one of ``run`` when made
    rows: int  # leading tokens of the page that the request shares

    @property
    def page_id(self) -> int | None:
        """The physical page, None when it was evicted meanwhile."""
        run: Run | None = self.run
        while run is not None and self.page < run.start:
            run = run.parent  # the run was cut since
        if run is None or not run.alive or not run.start <= self.page < run.end:
            return None
        return int(run.page_ids[self.page - run.start])


@dataclass(frozen=True, slots=True)
class Copied:
    """The first rows of a page that a request owns, copied from a sealed one."""

    page_id: int
    rows: int


@dataclass(slots=True)
class Segment:
    """Pages ``first .. end`` of a chain that a request reads; a lock keeps all pages before ``end``.

    ``end`` is where ``run`` ended when the segment was made. A run that was cut later keeps its end.
    """

    run: Run
    first: int
    end: int

    def page_ids(self) -> PageIds:
        """Physical pages in order, int32; not to be written to."""
        return joined([pages for _, pages in self.parts()])

    def parts(self) -> Iterator[tuple[Run, PageIds]]:
        """The runs that the pages lie in, in row order, each with those pages of it that are read."""
        run = self.run
        if run.start <= self.first:
            yield run, run.page_ids[self.first - run.start :]
            return
        runs = [run]
        while run.start > self.first and run.parent is not None:
            run = run.parent
            runs.append(run)
        yield run, run.page_ids[self.first - run.start :]
        for run in runs[-2::-1]:
            yield run, run.page_ids

    @property
    def intact(self) -> bool:
        """Whether all its pages are still there."""
        return self.run.alive and self.run.end == self.end


@dataclass(slots=True)
class Path:
    """Pages that a request reads, in row order, of one generation of the index."""

    segments: tuple[Segment, ...]
    generation: int
    counted: int = 0  # pages of the last segment's chain whose use was counted already
    fork: Fork | None = None  # rows to be had behind the last page, by copying them
    copied: Copied | None = None  # rows that were, the request's own

    def __len__(self) -> int:
        return sum(segment.end - segment.first for segment in self.segments)

    def page_ids(self) -> PageIds:
        """Physical pages in row order, int32; not to be written to."""
        return joined([pages for segment in self.segments for _, pages in segment.parts()])


@dataclass(slots=True)
class Match:
    """Outcome of a look-up: the first ``pages`` pages are there, up to the end of ``run``."""

    run: Run | None
    pages: int
    fork: Fork | None = None

    def segments(self, first: int = 0) -> tuple[Segment, ...]:
        """The pages from ``first`` on, as part of a path; nothing when there are none."""
        if self.run is None or self.pages <= first:
            return ()
        return (Segment(self.run, first, self.pages),)


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of a publication: the first ``pages`` pages of the chain are in the index."""

    run: Run | None
    pages: int
    # Pages of the chain that were there under another physical page, and the caller's copies of
    # them: to be repointed, then freed.
    duplicate_pages: npt.NDArray[np.int64]
    duplicate_ids: npt.NDArray[np.int64]

    def segments(self) -> tuple[Segment, ...]:
        """What was published, as part of a path."""
        return (Segment(self.run, 0, self.pages),) if self.run is not None and self.pages else ()


@dataclass(slots=True)
class Counters:
    """Only grow; read by the metrics. In pages, unless they say otherwise."""

    published_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    broken_holds: int = 0
    collisions: int = 0  # look-ups and publications
    latent_divergence: int = 0
