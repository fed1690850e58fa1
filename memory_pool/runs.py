"""What the content index is made of, and the plain records that it hands out.

A *run* is a stretch of sealed pages of one chain that have always been used together: the unit that
is compared, counted and queued for eviction, so that 32k tokens cost one comparison and not 512. A run
is cut where a request's path ends inside it, and shortened from its end by eviction. Whatever the
index says of pages follows from runs.
"""

from __future__ import annotations

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
    below_page,
    below_root,
    sibling_order,
)
from .lower import KEY_BYTES, PageName

PageIds = npt.NDArray[np.int32]  # physical pages of the paged tier


class Run:
    """Sealed pages ``start .. end`` of a chain; with no pages, the beginning of a namespace.

    Only the index changes one. Children hang below the last page.
    """

    __slots__ = (
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
        "names",  # tier keys of its pages, KEY_BYTES each; None until asked for (`names.run_keys`)
        "page_ids",
        "parent",
        "queued",  # has an entry in the eviction queue
        "raw",  # token bytes, int64 each
        "root_key",
        "shared",  # pages of a span's body, as far as anybody said so; then so are those above
        "start",  # pages before it
        "tick",  # last use, on the logical clock
    )

    def __init__(
        self,
        root_key: PageKey,
        *,
        key: PageKey,
        parent: Run | None,
        start: int,
        raw: bytes,
        page_ids: PageIds,
        mark: Mark,
    ) -> None:
        self.root_key = root_key
        self.parent = parent
        self.children: list[Run] = []
        self.locks = self.holds = self.hits = self.tick = 0
        self.queued = False
        self.alive = True
        self.shared = False
        self.key = key
        self.start = start
        self.end = start + len(page_ids)
        self.raw = raw
        self.page_ids = page_ids
        self.memo: Any = None
        self.names: bytes | None = None
        self.mark = mark
        self.first = leading(sibling_order(raw[:TOKEN_BYTES], mark))
        self.identity = below_page(int(page_ids[-1])) if len(page_ids) else below_root(root_key)

    def split(self, upper_pages: int, page_size: int, key: PageKey) -> Run:
        """Give the first pages to a new run above, which is returned; the rest goes by ``key``."""
        cut = upper_pages * page_size * TOKEN_BYTES
        upper = Run(
            self.root_key,
            key=self.key,
            parent=self.parent,
            start=self.start,
            raw=self.raw[:cut],
            page_ids=self.page_ids[:upper_pages],
            mark=self.mark,
        )
        upper.tick, upper.hits, upper.shared = self.tick, self.hits, self.shared
        upper.locks, upper.holds = int(self.locks > 0), int(self.holds > 0)
        upper.children.append(self)
        self.parent, self.key, self.start, self.mark = upper, key, upper.end, NO_MARK
        self.raw, self.page_ids = self.raw[cut:], self.page_ids[upper_pages:]
        self.first = leading(self.raw[:TOKEN_BYTES])
        self.memo = None
        if self.names is not None:
            named = upper_pages * KEY_BYTES
            upper.names, self.names = self.names[:named], self.names[named:]
        return upper

    def shorten(self, pages: int, page_size: int) -> PageIds:
        """Let go of all but the first ``pages`` pages; returns the others, in row order."""
        gone = self.page_ids[pages:]
        self.raw = self.raw[: pages * page_size * TOKEN_BYTES]
        self.page_ids = self.page_ids[:pages].copy()
        self.end = self.start + pages
        self.identity = below_page(int(self.page_ids[-1]))
        self.memo = None
        if self.names is not None:
            self.names = self.names[: pages * KEY_BYTES]
        return gone

    @property
    def page_count(self) -> int:
        """Pages in this run."""
        return self.end - self.start

    @property
    def tokens(self) -> Tokens:
        """Token ids, int64 [pages * page size], read only."""
        return np.frombuffer(self.raw, np.int64) if self.raw else np.empty(0, np.int64)

    def order(self, page_size: int) -> tuple[bytes, PageKey]:
        """Its place among its siblings: those that begin alike stand together."""
        return sibling_order(self.raw[: page_size * TOKEN_BYTES], self.mark), self.key

    def common_tokens(self, chain: Chain, limit: int) -> int:
        """How many of its first tokens are those of ``chain`` at the same place, at most ``limit``.

        All at once. Stops before a page of the chain that has a mark this run lacks. ``limit`` must
        not reach past the end of the chain.
        """
        size = chain.page_size
        count = min((self.end - self.start) * size, limit)
        if chain.marked:
            count = min(count, (chain.next_mark(self.start) - self.start) * size)
        at = self.start * size * TOKEN_BYTES
        if count <= _COPIED_TOKENS and self.raw.startswith(
            chain.view[at : at + count * TOKEN_BYTES].tobytes()
        ):
            return count
        own = np.frombuffer(self.raw, np.int64, count)
        equal = own == np.frombuffer(chain.view, np.int64, count, at)
        first = int(equal.argmin())
        return count if equal[first] else first


# Up to here a copy and a comparison of bytes take less time than numpy needs to begin.
_COPIED_TOKENS = 8192


def leading(order: bytes) -> int:
    """The first token of an order, as a number that sorts as its bytes do."""
    return int.from_bytes(order[:TOKEN_BYTES], "big")


def common_rows(one: bytes, other: bytes) -> int:
    """Leading tokens that two runs of token bytes share."""
    width = min(len(one), len(other))
    differ = int.from_bytes(one[:width], "little") ^ int.from_bytes(other[:width], "little")
    lowest = (differ & -differ).bit_length() - 1 if differ else width * 8
    return lowest // (TOKEN_BYTES * 8)


def joined(parts: list[PageIds]) -> PageIds:
    """One array of several, without a copy where there is one."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


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


@dataclass(slots=True)
class Load:
    """Pages in host memory that continue a match: to be copied into pages of the request's own."""

    names: list[PageName]
    page: int  # of the chain, the first of them
    rows: int  # leading tokens of them that the request may take


@dataclass(frozen=True, slots=True)
class Copied:
    """Rows behind a match in a request's own pages, copied from a sealed page or from host memory."""

    page_ids: PageIds  # int32 [pages]
    rows: int  # the last page may be partly filled
    loaded: bool  # from host memory


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
    load: Load | None = None  # or more of them, from host memory
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
    known: int  # of these, there before
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
