"""What the content index is made of, and the plain records that it hands out.

A *run* is a stretch of sealed pages of one chain that have always been used together: the unit that
is compared, counted and queued for eviction, so that 32k tokens cost one comparison and not 512. A run
is cut where a request's path ends inside it, and shortened from its end by eviction. Whatever the
index says of pages follows from runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .keys import Chain, Mark, PageKey, Tokens, below_page, below_root, sibling_order

PageIds = npt.NDArray[np.int32]  # physical pages of the paged tier


class Run:
    """Sealed pages ``start .. end`` of a chain; with no pages, the beginning of a namespace.

    Only the index changes one. Children hang below the last page.
    """

    __slots__ = (
        "alive",  # cleared when its last page is evicted, and by a reset
        "children",  # runs below the last page, ordered by their first page
        "end",
        "hits",  # publications that passed through
        "holds",  # paths of waiting requests that end here, and children that are held
        "key",  # of the first page; empty for the beginning of a namespace
        "locks",  # paths of running requests that end here, and children that are locked
        "mark",  # of the first page; no other page of a run has one
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
        self.key = key
        self.parent = parent
        self.start = start
        self.end = start + len(page_ids)
        self.tokens = tokens
        self.page_ids = page_ids
        self.mark = mark
        self.children: list[Run] = []
        self.locks = self.holds = self.hits = self.tick = 0
        self.queued = False
        self.alive = True

    @property
    def page_count(self) -> int:
        """Pages in this run."""
        return self.end - self.start

    @property
    def identity(self) -> bytes:
        """What the keys of its children are derived from."""
        if self.page_count:
            return below_page(int(self.page_ids[-1]))
        return below_root(self.root_key)

    def head(self, page_size: int) -> bytes:
        """What orders it among its siblings."""
        return sibling_order(self.tokens[:page_size], self.mark)

    def common_tokens(self, chain: Chain, limit: int) -> int:
        """How many of its first tokens are those of ``chain`` at the same place, at most ``limit``.

        One vectorised comparison. Stops before a page of the chain that has a mark this run lacks.
        """
        size = chain.page_size
        count = min(len(self.tokens), limit, (chain.next_mark(self.start) - self.start) * size)
        at = self.start * size
        equal = self.tokens[:count] == chain.tokens[at : at + count]
        first = int(equal.argmin()) if count else 0
        return count if count and equal[first] else first


def compact(tokens: Tokens) -> Tokens:
    """A view that owns its memory, or of memory less than twice its size."""
    base = tokens.base
    if isinstance(base, np.ndarray) and base.nbytes > 2 * tokens.nbytes:
        return tokens.copy()
    return tokens


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Segment:
    """Pages ``first .. end`` of a chain that a request reads; a lock keeps all pages before ``end``.

    ``end`` is where ``run`` ended when the segment was made. A run that was cut later keeps its end.
    """

    run: Run
    first: int
    end: int

    def page_ids(self) -> PageIds:
        """Physical pages in order, int32."""
        found: list[PageIds] = []
        run: Run | None = self.run
        while run is not None and run.end > self.first:
            found.append(run.page_ids[max(self.first - run.start, 0) :])
            run = run.parent
        return np.concatenate(found[::-1]) if found else np.empty(0, np.int32)

    @property
    def intact(self) -> bool:
        """Whether all its pages are still there."""
        return self.run.alive and self.run.end == self.end


@dataclass(frozen=True, slots=True)
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
        """Physical pages in row order, int32."""
        if len(self.segments) == 1:
            return self.segments[0].page_ids()
        parts = [segment.page_ids() for segment in self.segments]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """Outcome of a look-up: the first ``pages`` pages are there, up to the end of ``run``."""

    run: Run | None
    pages: int
    fork: Fork | None = None

    def segments(self, first: int = 0) -> Iterator[Segment]:
        """The pages from ``first`` on, as part of a path; nothing when there are none."""
        if self.run is not None and self.pages > first:
            yield Segment(self.run, first, self.pages)


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of a publication: the first ``pages`` pages of the chain are in the index."""

    run: Run | None
    pages: int
    # Pages of the chain that were there under another physical page, and the caller's copies of
    # them: to be repointed, then freed.
    duplicate_pages: npt.NDArray[np.int64]
    duplicate_ids: npt.NDArray[np.int64]

    def segments(self) -> Iterator[Segment]:
        """What was published, as part of a path."""
        if self.run is not None and self.pages:
            yield Segment(self.run, 0, self.pages)


@dataclass(slots=True)
class Counters:
    """Only grow; read by the metrics. In pages, unless they say otherwise."""

    published_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    broken_holds: int = 0
    collisions: int = 0  # look-ups and publications
    latent_divergence: int = 0
