"""The content index: sealed pages, found by what they contain.

One structure serves plain prefixes and spans. A page hangs below its parent page; a chain begins at
the key of its namespace. Three rules make a hit safe:

* *Hash to discover, bytes to verify.* A key only nominates a page. It is used when its parent is
  the very page the chain came through and its namespace, token bytes and mark are equal; otherwise
  the look-up is a miss and ``collisions`` goes up.
* *Sealed pages do not change.* The index holds full pages only, and hands them out for reading.
* *Leaves go first.* A page is evicted only when nothing hangs below it and nobody holds it, in the
  order of a logical clock, so that every tensor-parallel rank picks the same victims.

Two kinds of reference keep a page: a *lock* belongs to a running request and is never broken; a
*hold* belongs to a request that waits for its turn and yields when running requests would otherwise
starve (:meth:`ContentIndex.evict` with ``break_holds``).

Locks and holds are taken on whole paths, from the first page to the last, which is why an unlocked
page can not have a locked one below it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .keys import Chain, HashFunction, PageKey, VisibleSpan, xxh3_128


class Page:
    """A sealed page. Everything but the counters is fixed when it is published."""

    __slots__ = (
        "alive",  # index: cleared on eviction and reset
        "children",  # index: pages whose parent is this one
        "holds",  # index: waiting requests
        "key",
        "locks",  # index: running requests
        "mark",
        "page_id",  # physical page of the paged tier
        "parent",
        "queued",  # index: has an entry in the eviction queue
        "root_key",  # namespace of the chain
        "tick",  # index: last use on the logical clock
        "tokens",
    )

    def __init__(self, chain: Chain, number: int, parent: Page | None, page_id: int) -> None:
        self.key = chain.key(number)
        self.root_key = chain.root_key
        self.parent = parent
        self.tokens = chain.tokens(number)
        self.mark = chain.mark(number)
        self.page_id = page_id
        self.locks = 0
        self.holds = 0
        self.children = 0
        self.tick = 0
        self.queued = False
        self.alive = True


@dataclass(frozen=True, slots=True)
class Path:
    """Pages that a request reads, in row order, of one generation of the index."""

    pages: tuple[Page, ...]
    generation: int
    kept: tuple[Page, ...] = ()  # read by nobody, but parents of pages that are

    @property
    def all_pages(self) -> tuple[Page, ...]:
        """Every page that a lock on this path must keep."""
        return self.kept + self.pages

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of :meth:`ContentIndex.publish`, page by page from the start of the chain."""

    pages: tuple[Page, ...]  # now in the index, the caller's own or those that were there before
    # (chain page, physical page) of the caller's copies: to be repointed, then freed
    duplicates: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Counters:
    """Only grow; read by the metrics."""

    published_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    broken_holds: int = 0
    collisions: int = 0


@dataclass(slots=True)
class ContentIndex:
    """Sealed pages by content. Not thread safe: one scheduler owns it.

    ``page_size`` is in tokens. ``hash_function`` exists for tests that want collisions.
    """

    page_size: int
    hash_function: HashFunction = xxh3_128
    counters: Counters = field(default_factory=Counters)
    generation: int = 0
    eviction_digest: bytes = b""  # of all victims in their order: equal on every rank
    _pages: dict[PageKey, Page] = field(default_factory=dict)
    _queue: list[tuple[int, int, Page]] = field(default_factory=list)
    _serial: int = 0
    _clock: int = 0
    _locked: int = 0
    _held: int = 0  # held and not locked

    # --- look-up ---------------------------------------------------------------------------------

    def chain(
        self,
        root_key: PageKey,
        tokens: array[int] | Sequence[int],
        visible: Iterable[VisibleSpan] = (),
    ) -> Chain:
        """Page names of a token stream, as this index hashes them."""
        return Chain(
            root_key, tokens, self.page_size, visible=visible, hash_function=self.hash_function
        )

    def match(self, chain: Chain, limit: int | None = None) -> tuple[Page, ...]:
        """Longest run of pages from the start of ``chain`` that the index holds.

        ``limit`` caps the number of pages. Marks what it returns as just used.
        O(pages returned + 1), one hash and one compare each.
        """
        stop = chain.page_count if limit is None else min(limit, chain.page_count)
        found: list[Page] = []
        parent: Page | None = None
        for number in range(stop):
            page = self._pages.get(chain.key(number))
            if page is None:
                break
            if not _same(page, parent, chain, number):
                self.counters.collisions += 1
                break
            found.append(page)
            parent = page
        self._touch(found)
        return tuple(found)

    # --- publication -----------------------------------------------------------------------------

    def publish(self, chain: Chain, page_ids: Sequence[int]) -> Published:
        """Seal the first ``len(page_ids)`` pages of ``chain``, stored in those physical pages.

        A page that is already there under another physical page is reported in ``duplicates``: the
        caller points its row at the sealed one and then frees its own. On a collision the rest of
        the chain stays the caller's private property: the result is then shorter than asked for.
        """
        pages: list[Page] = []
        duplicates: list[tuple[int, int]] = []
        parent: Page | None = None
        for number in range(min(len(page_ids), chain.page_count)):
            key = chain.key(number)
            page = self._pages.get(key)
            if page is None:
                page = Page(chain, number, parent, page_ids[number])
                self._pages[key] = page
                if parent is not None:
                    parent.children += 1
                self.counters.published_pages += 1
            elif not _same(page, parent, chain, number):
                self.counters.collisions += 1
                break
            elif page.page_id != page_ids[number]:
                duplicates.append((number, page_ids[number]))
                self.counters.duplicate_pages += 1
            pages.append(page)
            parent = page
        self._touch(pages)
        if pages:
            self._offer(pages[-1])
        return Published(tuple(pages), tuple(duplicates))

    # --- references ------------------------------------------------------------------------------

    def path(self, pages: Iterable[Page] = (), kept: Iterable[Page] = ()) -> Path:
        """A path of this generation."""
        return Path(tuple(pages), self.generation, tuple(kept))

    def lock(self, path: Path) -> int:
        """A running request reads the path. Returns the number of pages newly locked."""
        if path.generation != self.generation:
            return 0
        before = self._locked
        for page in path.all_pages:
            assert page.alive, "locked a page that was evicted"
            if page.locks == 0:
                self._locked += 1
                self._held -= page.holds > 0
            page.locks += 1
        return self._locked - before

    def unlock(self, path: Path) -> int:
        """Undo one :meth:`lock`. A path of an earlier generation is a no-op. Returns pages freed."""
        if path.generation != self.generation:
            return 0
        before = self._locked
        for page in reversed(path.all_pages):
            assert page.locks > 0, "unlocked a page that is not locked"
            page.locks -= 1
            if page.locks == 0:
                self._locked -= 1
                self._held += page.holds > 0
                self._offer(page)
        return before - self._locked

    def hold(self, path: Path) -> None:
        """A waiting request wants to find the path when its turn comes."""
        if path.generation != self.generation:
            return
        for page in path.all_pages:
            assert page.alive, "held a page that was evicted"
            self._held += page.holds == 0 and page.locks == 0
            page.holds += 1

    def release(self, path: Path) -> None:
        """Undo one :meth:`hold`; pages that were evicted meanwhile are skipped."""
        if path.generation != self.generation:
            return
        for page in reversed(path.all_pages):
            if not page.alive:
                continue
            assert page.holds > 0, "released a page that is not held"
            page.holds -= 1
            if page.holds == 0 and page.locks == 0:
                self._held -= 1
                self._offer(page)

    @property
    def hold_epoch(self) -> tuple[int, int]:
        """Changes whenever a held page may have gone: while it stands, held paths are intact."""
        return self.generation, self.counters.broken_holds

    def intact(self, path: Path) -> bool:
        """Whether every page of the path is still in the index. O(pages)."""
        return path.generation == self.generation and all(p.alive for p in path.all_pages)

    # --- eviction --------------------------------------------------------------------------------

    def evict(self, page_count: int, *, break_holds: bool = False) -> list[int]:
        """Drop up to ``page_count`` pages, least recently used leaves first.

        ``break_holds`` lets it go on with held pages once nothing else is left. Returns the physical
        pages, which are the caller's to free, each exactly once.
        """
        freed: list[int] = []
        while len(freed) < page_count:
            page = self._pop_leaf()
            if page is None:
                break
            freed.append(self._drop(page))
        if break_holds and len(freed) < page_count:
            freed += self._evict_held(page_count - len(freed))
        return freed

    def _pop_leaf(self) -> Page | None:
        while self._queue:
            tick, _, page = heapq.heappop(self._queue)
            page.queued = False
            if not _evictable(page):
                continue  # offered again when that changes
            if page.tick != tick:
                self._offer(page)  # used since it was queued
                continue
            return page
        return None

    def _evict_held(self, page_count: int) -> list[int]:
        """Held leaves, least recently used first, one by one. O(pages): the last resort."""
        leaves = [
            (page.tick, number, page)
            for number, page in enumerate(self._pages.values())
            if _held_leaf(page)
        ]
        heapq.heapify(leaves)
        number = len(self._pages)
        freed: list[int] = []
        while len(freed) < page_count:
            page = self._pop_leaf()  # the parent of a dropped page may be nobody's
            if page is None:
                if not leaves:
                    break
                page = heapq.heappop(leaves)[2]
                self.counters.broken_holds += 1
            freed.append(self._drop(page))
            if page.parent is not None and _held_leaf(page.parent):
                number += 1
                heapq.heappush(leaves, (page.parent.tick, number, page.parent))
        return freed

    def _drop(self, page: Page) -> int:
        assert page.alive and page.locks == 0 and page.children == 0
        del self._pages[page.key]
        page.alive = False
        self._held -= page.holds > 0
        self.counters.evicted_pages += 1
        self.eviction_digest = xxh3_128(self.eviction_digest + page.key)
        if page.parent is not None:
            page.parent.children -= 1
            self._offer(page.parent)
        return page.page_id

    def reset(self) -> None:
        """Forget everything. Paths handed out before turn into no-ops; nothing is freed here."""
        for page in self._pages.values():
            page.alive = False
        self._pages.clear()
        self._queue.clear()
        self._locked = self._held = 0
        self.generation += 1

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def page_count(self) -> int:
        """Sealed pages."""
        return len(self._pages)

    @property
    def locked_pages(self) -> int:
        """Pages that running requests read."""
        return self._locked

    @property
    def held_pages(self) -> int:
        """Pages kept for waiting requests and read by no running one."""
        return self._held

    @property
    def evictable_pages(self) -> int:
        """Pages that :meth:`evict` can drop without breaking a hold."""
        return len(self._pages) - self._locked - self._held

    def pages(self) -> Iterable[Page]:
        """All sealed pages, oldest publication first."""
        return self._pages.values()

    # --- internals -------------------------------------------------------------------------------

    def _touch(self, pages: Sequence[Page]) -> None:
        self._clock += 1
        for page in pages:
            page.tick = self._clock

    def _offer(self, page: Page) -> None:
        """Queue a page for eviction if it could go now."""
        if _evictable(page) and not page.queued:
            page.queued = True
            self._serial += 1
            heapq.heappush(self._queue, (page.tick, self._serial, page))

    def check_invariants(self) -> None:
        """Assert everything that must hold between operations. O(pages)."""
        children: dict[int, int] = {}
        physical: set[int] = set()
        locked = held = 0
        for key, page in self._pages.items():
            assert page.key == key and page.alive
            assert page.page_id not in physical, f"physical page {page.page_id} has two owners"
            physical.add(page.page_id)
            assert page.locks >= 0 and page.holds >= 0
            locked += page.locks > 0
            held += page.holds > 0 and page.locks == 0
            if page.parent is not None:
                assert page.parent.alive, "a page outlived its parent"
                children[id(page.parent)] = children.get(id(page.parent), 0) + 1
                assert not page.locks or page.parent.locks, "a locked page below an unlocked one"
            assert page.queued or not _evictable(page), "an evictable page is not queued"
        for page in self._pages.values():
            assert page.children == children.get(id(page), 0), "wrong child count"
        assert locked == self._locked and held == self._held, "counts drifted"


def _same(page: Page, parent: Page | None, chain: Chain, number: int) -> bool:
    return (
        page.parent is parent
        and page.root_key == chain.root_key
        and page.tokens == chain.tokens(number)
        and page.mark == chain.mark(number)
    )


def _held_leaf(page: Page) -> bool:
    return page.alive and page.holds > 0 and not page.locks and not page.children


def _evictable(page: Page) -> bool:
    return page.alive and not page.locks and not page.holds and not page.children
