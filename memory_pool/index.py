"""The content index: sealed pages, found by what they contain.

One structure serves plain prefixes and spans. A page hangs below its parent page; a chain begins at
the key of its namespace. Three rules make a hit safe:

* *Hash to discover, bytes to verify.* A key only nominates a page. It is used when its parent is
  the very page the chain came through and its namespace, mark and token bytes are equal; otherwise
  the look-up is a miss and ``collisions`` goes up.
* *Sealed pages do not change.* The index holds full pages only, and hands them out for reading. Who
  needs a part of one copies it (:class:`Fork`).
* *Leaves go first.* A page is evicted only when nothing hangs below it and nobody holds it, in the
  order of a policy on a logical clock, so that every tensor-parallel rank picks the same victims.

Two kinds of reference keep a page: a *lock* belongs to a running request and is never broken; a
*hold* belongs to a request that waits for its turn and yields when running requests would otherwise
starve (:meth:`ContentIndex.evict` with ``break_holds``). Either is taken at the end of a path and
keeps everything before it.

Costs: a key is computed and looked up once a *run* (:mod:`memory_pool.runs`), its pages are compared
at once. A radix tree's edges do the same; rejected were one look-up per page (an order of magnitude
slower on long prompts) and one hash of a whole prefix per look-up (nothing to verify, nothing shared).
"""

from __future__ import annotations

import heapq
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from .eviction import PROTECTED_HITS, EvictionQueue, evictable, held_leaf, policy
from .invariants import check
from .keys import (
    NO_MARK,
    TOKEN_BYTES,
    Chain,
    HashFunction,
    Mark,
    PageKey,
    Tokens,
    VisibleSpan,
    below_page,
    page_key,
    sibling_order,
    xxh3_128,
)
from .lower import KEY_BYTES
from .runs import (
    Counters,
    Fork,
    Match,
    PageIds,
    Path,
    Published,
    Run,
    Segment,
    common_rows,
    leading,
)

# Of pages that two requests computed alike: (sealed ids, own ids) -> which hold the same latents
CompareLatents = Callable[[PageIds, npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
# Of pages that are about to go, still in the index: (run, first of them in the chain, physical pages)
OnEvict = Callable[[Run, int, PageIds], None]


_first = attrgetter("first")


class ContentIndex:
    """Sealed pages by content. Not thread safe: one scheduler owns it."""

    def __init__(
        self,
        page_size: int,
        *,
        hash_function: HashFunction = xxh3_128,
        eviction_policy: str = "lru",
        protected_hits: int = PROTECTED_HITS,
        smallest_fork: int | None = None,
        compare_latents: CompareLatents | None = None,
        on_evict: OnEvict | None = None,
    ) -> None:
        """An empty index.

        Args:
            page_size: tokens a page.
            hash_function: of page keys; another one is for tests that want collisions.
            eviction_policy: ``lru``, ``lfu`` or ``slru``.
            protected_hits: ``slru`` protects what was used so often.
            smallest_fork: look-ups offer rows of a partly equal page from this many tokens on; None
                for never.
            compare_latents: called for pages that are there already when a request publishes them; a
                page whose latents differ stays private, and so does the chain behind it.
            on_evict: called by :meth:`evict` for each stretch of pages before they go, the ones at the
                end of a chain first; the pages of one call, in row order, are the last of their run
                and go from the last to the first. It may name them (:func:`names.run_names`); it must
                neither change the index nor raise, and what goes does not depend on it.

        Raises:
            ValueError: the policy is unknown, or ``smallest_fork`` is not positive.
        """
        if smallest_fork is not None and smallest_fork < 1:
            raise ValueError(f"smallest_fork must be at least one token, got {smallest_fork}")
        self.page_size = page_size
        self.counters = Counters()
        self.generation = 0
        self.eviction_digest = b""  # of all victims in their order: equal on every rank
        self._hash = hash_function
        self._smallest_fork = sys.maxsize if smallest_fork is None else smallest_fork
        self._compare_latents = compare_latents
        self._on_evict = on_evict
        self._roots: dict[PageKey, Run] = {}
        self._runs: dict[PageKey, Run] = {}
        self._queue = EvictionQueue(policy(eviction_policy, protected_hits))
        self._clock = 0
        self._pages = self._locked = self._held = 0  # held: and not locked

    def chain(
        self,
        root_key: PageKey,
        tokens: array[int] | Tokens | Sequence[int],
        visible: Sequence[VisibleSpan] = (),
    ) -> Chain:
        """A token stream as this index reads it."""
        return Chain(root_key, tokens, self.page_size, visible=visible)

    # --- look-up ---------------------------------------------------------------------------------

    def match(self, chain: Chain, limit: int | None = None) -> Match:
        """Longest run of pages from the start of ``chain`` that the index holds, marked as just used.

        ``limit`` caps the tokens looked at. O(tokens compared) in bulk, and a hash per run.
        """
        root = self._roots.get(chain.root_key)
        if root is None:
            return Match(None, 0)
        tokens = chain.token_count if limit is None else max(0, min(limit, chain.token_count))
        run = self._walk(root, chain, tokens)
        self._touch(run)
        left = tokens - run.end * self.page_size
        if left < self._smallest_fork or not run.children:
            return Match(run, run.end)
        return Match(run, run.end, self._nearest_child(run, chain, left))

    def _walk(self, root: Run, chain: Chain, tokens: int) -> Run:
        """The last run on the way down ``chain``, cut so that it ends where the chain leaves it."""
        size = self.page_size
        run, left = root, tokens
        while left >= size:
            child = self._child(run, chain)
            if child is None:
                break
            pages = child.common_tokens(chain, left) // size
            if not pages:
                self.counters.collisions += 1
                break
            if pages < child.page_count:
                child = self._cut(child, pages)
                if child is None:
                    break
            run = child
            left = tokens - run.end * size
        return run

    def _child(self, parent: Run, chain: Chain) -> Run | None:
        """The run that goes by the name of the chain's next page, if it may follow ``parent``."""
        mark = chain.mark(parent.end)
        key = page_key(self._hash, parent.identity, chain.page_bytes(parent.end), mark)
        run = self._runs.get(key)
        if run is None:
            return None
        if run.parent is not parent or run.mark != mark:
            self.counters.collisions += 1
            return None
        return run

    def _nearest_child(self, parent: Run, chain: Chain, left: int) -> Fork | None:
        """The page below ``parent`` that shares the most leading tokens with the chain's next one.

        Children are ordered by their first page, so it is a neighbour of the place where the chain's
        page would stand. O(log children).
        """
        size, children = self.page_size, parent.children
        page = parent.end
        mark = chain.mark(page)
        at = page * size * TOKEN_BYTES
        wanted = chain.view[at : at + min(size, left) * TOKEN_BYTES].tobytes()
        least = self._smallest_fork
        low, high = 0, len(children)
        if high > 1:
            head = sibling_order(wanted, mark)
            low = bisect_left(children, leading(head), key=_first)
            high = bisect_right(children, leading(head), low, key=_first)
        if high - low > 1:
            place = bisect_left(children, (head, b""), low, high, key=lambda run: run.order(size))
            low, high = max(place - 1, low), min(place + 1, high)
        best: Fork | None = None
        for child in children[low:high]:
            rows = common_rows(child.raw[: size * TOKEN_BYTES], wanted)
            if child.mark or mark:
                rows = min(rows, _visible_alike(child.mark, mark))
            if rows >= least:
                best, least = Fork(child, page, rows), rows + 1
        # An equal page that the walk did not enter goes by a name that is taken: nothing of it is read.
        return best if best is not None and best.rows < size else None

    # --- publication -----------------------------------------------------------------------------

    def publish(
        self,
        chain: Chain,
        page_ids: npt.NDArray[np.int64] | Sequence[int],
        counted: int = 0,
        *,
        shared: bool = False,
    ) -> Published:
        """Seal the first ``len(page_ids)`` pages of ``chain``, stored in those physical pages.

        A page that is already there under another physical page is reported as a duplicate: the
        caller points its row at the sealed one and then frees its own. On a collision, or where
        latents differ, the rest of the chain stays the caller's private property: the result is then
        shorter than asked for. ``counted`` pages were published by this request before, and are not
        counted as used again. ``shared`` says that the chain is a span's body (:meth:`share`).
        """
        own = np.asarray(page_ids, dtype=np.int64)[: chain.page_count]
        root = self._roots.get(chain.root_key) or self._begin_namespace(chain.root_key)
        run = self._walk(root, chain, len(own) * self.page_size)
        pages = run.end
        sealed = Segment(run, 0, pages).page_ids()
        duplicates = np.flatnonzero(sealed != own[:pages])
        if len(duplicates) and self._compare_latents is not None:
            alike = self._compare_latents(sealed[duplicates], own[duplicates])
            if not alike.all():
                first = int(duplicates[int(alike.argmin())])
                self.counters.latent_divergence += 1
                return self.publish(chain, own[:first], counted, shared=shared)
        self.counters.duplicate_pages += len(duplicates)
        if pages < len(own):
            run = self._append(run, chain, own)
        self._use(run, counted)
        if shared:
            _share(run)
        if not run.end:
            self._end_namespace(run)
            return Published(None, 0, 0, duplicates, own[duplicates])
        return Published(run, run.end, pages, duplicates, own[duplicates])

    def share(self, path: Path) -> None:
        """Note that a path leads to the ends of spans' bodies, whoever published their pages.

        Lower tiers keep such pages longest. Pages that went meanwhile are skipped.
        """
        if path.generation == self.generation:
            for segment in path.segments:
                if segment.intact:
                    _share(segment.run)

    def _append(self, parent: Run, chain: Chain, own: npt.NDArray[np.int64]) -> Run:
        """New runs for what of ``own`` is not there yet, one from each marked page on."""
        size = self.page_size
        run = parent
        while run.end < len(own):
            start, mark = run.end, chain.mark(run.end)
            end = min(chain.next_mark(start), len(own))
            key = page_key(self._hash, run.identity, chain.page_bytes(start), mark)
            if key in self._runs:  # of another page; at the first one the walk has counted it
                self.counters.collisions += run is not parent
                break
            new = Run(
                chain.root_key,
                key=key,
                parent=run,
                start=start,
                raw=chain.view[start * size * TOKEN_BYTES : end * size * TOKEN_BYTES].tobytes(),
                page_ids=own[start:end].astype(np.int32),
                mark=mark,
            )
            self._runs[key] = new
            run.children.insert(self._place(run, new), new)
            self._pages += new.page_count
            self.counters.published_pages += new.page_count
            run = new
        return run

    def _use(self, run: Run, counted: int) -> None:
        self._touch(run)
        self._queue.offer(run)
        walked: Run | None = run
        while walked is not None and walked.end > counted:
            walked.hits += 1
            walked = walked.parent

    # --- shape -----------------------------------------------------------------------------------

    def _cut(self, run: Run, pages: int) -> Run | None:
        """Split a run behind its first ``pages`` pages; returns the upper part, a new run.

        The lower part keeps its identity, for those who refer to it by its end. None, and nothing
        happens, when its new key is taken by another page.
        """
        size = self.page_size
        parent = run.parent
        assert parent is not None and 0 < pages < run.page_count
        identity = below_page(int(run.page_ids[pages - 1]))
        at = pages * size * TOKEN_BYTES
        key = page_key(self._hash, identity, run.raw[at : at + size * TOKEN_BYTES])
        if key in self._runs:
            self.counters.collisions += 1
            return None
        place = self._place(parent, run)
        upper = run.split(pages, size, key)
        parent.children[place] = self._runs[upper.key] = upper
        self._runs[key] = run
        return upper

    def _place(self, parent: Run, child: Run) -> int:
        """Where a child stands, or belongs, among those of its parent. O(log children)."""
        children, size = parent.children, self.page_size
        low = bisect_left(children, child.first, key=_first)
        high = bisect_right(children, child.first, low, key=_first)
        if low == high or (high - low == 1 and children[low] is child):
            return low
        return bisect_left(children, child.order(size), low, high, key=lambda run: run.order(size))

    def _begin_namespace(self, root_key: PageKey) -> Run:
        run = self._roots[root_key] = Run(
            root_key,
            key=PageKey(b""),
            parent=None,
            start=0,
            raw=b"",
            page_ids=np.empty(0, np.int32),
            mark=NO_MARK,
        )
        return run

    def _end_namespace(self, run: Run) -> None:
        """Forget the beginning of a namespace that has no pages."""
        if not run.children and self._roots.get(run.root_key) is run:
            del self._roots[run.root_key]
            run.alive = False

    # --- references ------------------------------------------------------------------------------

    def path(
        self, segments: Iterable[Segment] = (), *, counted: int = 0, fork: Fork | None = None
    ) -> Path:
        """A path of this generation."""
        return Path(tuple(segments), self.generation, counted, fork)

    def lock(self, path: Path) -> int:
        """A running request reads the path. Returns the number of pages newly locked."""
        if path.generation != self.generation:
            return 0
        before = self._locked
        for segment in path.segments:
            assert segment.intact, "locked a page that was evicted"
            run: Run | None = segment.run
            while run is not None:
                run.locks += 1
                if run.locks > 1:
                    break
                self._locked += run.page_count
                if run.holds:
                    self._held -= run.page_count
                run = run.parent
        return self._locked - before

    def unlock(self, path: Path) -> int:
        """Undo one :meth:`lock`. A path of an earlier generation is a no-op. Returns pages freed."""
        if path.generation != self.generation:
            return 0
        before = self._locked
        for segment in reversed(path.segments):
            run: Run | None = segment.run
            while run is not None:
                assert run.locks > 0, "unlocked a page that is not locked"
                run.locks -= 1
                if run.locks:
                    break
                self._locked -= run.page_count
                if run.holds:
                    self._held += run.page_count
                self._queue.offer(run)
                run = run.parent
        return before - self._locked

    def hold(self, path: Path) -> None:
        """A waiting request wants to find the path when its turn comes."""
        if path.generation != self.generation:
            return
        for segment in path.segments:
            assert segment.intact, "held a page that was evicted"
            run: Run | None = segment.run
            while run is not None:
                run.holds += 1
                if run.holds > 1:
                    break
                if not run.locks:
                    self._held += run.page_count
                run = run.parent

    def release(self, path: Path) -> None:
        """Undo one :meth:`hold`; what was evicted meanwhile is skipped."""
        if path.generation != self.generation:
            return
        for segment in reversed(path.segments):
            if segment.intact:
                self._release(segment.run)

    def _release(self, last: Run) -> None:
        run: Run | None = last
        while run is not None:
            assert run.holds > 0, "released a page that is not held"
            run.holds -= 1
            if run.holds:
                break
            if not run.locks:
                self._held -= run.page_count
                self._queue.offer(run)
            run = run.parent

    @property
    def hold_epoch(self) -> tuple[int, int]:
        """Changes whenever a held page may have gone: while it stands, held paths are intact."""
        return self.generation, self.counters.broken_holds

    def intact(self, path: Path) -> bool:
        """Whether every page of the path is still in the index."""
        return path.generation == self.generation and all(s.intact for s in path.segments)

    # --- eviction --------------------------------------------------------------------------------

    def evict(self, page_count: int, *, break_holds: bool = False) -> npt.NDArray[np.int64]:
        """Drop up to ``page_count`` pages from the ends of chains, in the order of the policy.

        ``break_holds`` lets it go on with held pages once nothing else is left. Returns the physical
        pages in the order they went, which are the caller's to free, each exactly once.
        """
        victims: list[PageIds] = []
        left = page_count
        while left > 0:
            run = self._queue.pop()
            if run is None:
                break
            victims.append(self._trim(run, left))
            left -= len(victims[-1])
        if break_holds and left > 0:
            victims += self._evict_held(left)
        if not victims:
            return np.empty(0, np.int64)
        gone = np.concatenate(victims).astype(np.int64)
        self.eviction_digest = xxh3_128(self.eviction_digest + gone.tobytes())
        return gone

    def _evict_held(self, left: int) -> Iterator[PageIds]:
        """Held leaves in the order of the policy. O(runs): the last resort."""
        priority = self._queue.priority
        leaves: list[Any] = [
            (priority(run), number, run)
            for number, run in enumerate(self._runs.values())
            if held_leaf(run)
        ]
        heapq.heapify(leaves)
        number = len(self._runs)
        while left > 0:
            run = self._queue.pop()  # the parent of a dropped page may be nobody's
            if run is None:
                if not leaves:
                    return
                run = heapq.heappop(leaves)[2]
                self.counters.broken_holds += 1
                self._break_holds(run)
            parent = run.parent
            pages = self._trim(run, left)
            left -= len(pages)
            yield pages
            if parent is not None and held_leaf(parent):
                number += 1
                heapq.heappush(leaves, (priority(parent), number, parent))

    def _break_holds(self, run: Run) -> None:
        """Nobody waits for the run's end any more; it is a leaf, so no child does either."""
        run.holds = 1
        self._release(run)

    def _trim(self, run: Run, most: int) -> PageIds:
        """Take up to ``most`` pages off the end of a run; with its last one the run goes."""
        assert evictable(run)
        kept = max(run.page_count - most, 0)
        if self._on_evict is not None:
            self._on_evict(run, run.start + kept, run.page_ids[kept:])
        gone = run.shorten(kept, self.page_size) if kept else run.page_ids
        self._pages -= len(gone)
        self.counters.evicted_pages += len(gone)
        if kept:
            self._queue.offer(run)
            return gone[::-1]
        parent = run.parent
        assert parent is not None
        del self._runs[run.key]
        del parent.children[self._place(parent, run)]
        run.alive = False
        if parent.page_count:
            self._queue.offer(parent)
        else:
            self._end_namespace(parent)
        return gone[::-1]

    def reset(self) -> None:
        """Forget everything. Paths handed out before turn into no-ops; nothing is freed here."""
        for run in (*self._runs.values(), *self._roots.values()):
            run.alive = False
        self._runs.clear()
        self._roots.clear()
        self._queue.clear()
        self._pages = self._locked = self._held = 0
        self.generation += 1

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def page_count(self) -> int:
        """Sealed pages."""
        return self._pages

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
        return self._pages - self._locked - self._held

    def runs(self) -> Iterable[Run]:
        """All runs that have pages."""
        return self._runs.values()

    def check_invariants(self) -> None:
        """Assert everything that must hold between operations. O(pages)."""
        check(self._runs, self._roots, self)
        for run in self._runs.values():
            above = run.parent
            assert above is not None
            assert run.names is None or len(run.names) == run.page_count * KEY_BYTES
            assert run.names is None or above.names is not None or not above.page_count
            assert not run.shared or above.shared or not above.page_count, "shared below others"

    # --- internals -------------------------------------------------------------------------------

    def _touch(self, last: Run) -> None:
        self._clock += 1
        run: Run | None = last
        while run is not None:
            run.tick = self._clock
            run = run.parent


def _share(last: Run) -> None:
    run: Run | None = last
    while run is not None and run.page_count and not run.shared:
        run.shared = True
        run = run.parent


def _visible_alike(one: Mark, other: Mark) -> int:
    """Tokens of a page before what becomes visible inside it first differs."""
    if one == other:
        return 1 << 62
    for first, second in zip(one, other, strict=False):
        if first != second:
            return min(first[0], second[0])
    longer = one if len(one) > len(other) else other
    return longer[min(len(one), len(other))][0]
