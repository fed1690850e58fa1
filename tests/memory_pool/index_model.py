"""Random operations on the content index against a model that is a plain dict.

The model keeps ``name -> page`` where a name is everything that makes a page what it is: the
namespace and, page by page, tokens and mark. A hit that rests on a hash alone is therefore an error.
Everything is stated page by page; that pages come in runs shows in one place only: the first page of
each has a key, and where short hashes give that key to another page, a look-up ends earlier. Physical
pages come from a free list and go back to it exactly once; each holds a number that stands for its
latents.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import (
    NO_MARK,
    Chain,
    HashFunction,
    Mark,
    Namespace,
    PageKey,
    VisibleSpan,
    below_page,
    below_root,
    page_key,
)
from tessera_sglang.memory_pool.runs import Fork, Match, Path

PHYSICAL_PAGES = 16
MAX_PAGES = 5
ROOTS = [Namespace("model", cache_salt=salt).root_key() for salt in ("one", "other")]

Part = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]  # tokens; (token, span) of the mark
Name = tuple[object, ...]  # namespace, then the part of each page from the first to this one


@dataclass(frozen=True)
class Stream:
    """What a request asks for: pages, and a last partial one."""

    namespace: int
    parts: tuple[Part, ...]
    tail: Part = ((), ())

    @property
    def names(self) -> list[Name]:
        return [(self.namespace, *self.parts[: n + 1]) for n in range(len(self.parts))]

    def chain(self, index: ContentIndex) -> Chain:
        parts = (*self.parts, self.tail)
        tokens = [token for part in parts for token in part[0]]
        visible = [
            VisibleSpan(page * index.page_size + at, b"body", span, 8, 0)
            for page, part in enumerate(parts)
            for at, span in part[1]
        ]
        return index.chain(ROOTS[self.namespace], tokens, visible)


def common_tokens(one: Part, other: Part) -> int:
    """Leading tokens of two pages that are equal and see the same."""
    for at, tokens in enumerate(zip(one[0], other[0], strict=False)):
        seen = [[mark for mark in part[1] if mark[0] <= at] for part in (one, other)]
        if tokens[0] != tokens[1] or seen[0] != seen[1]:
            return at
    return min(len(one[0]), len(other[0]))


@dataclass(eq=False)
class Page:
    page_id: int
    key: PageKey | None  # of the first page of a run
    tick: int = 0
    hits: int = 0
    locks: int = 0
    holds: int = 0
    alive: bool = True


@dataclass(eq=False)
class Stretch:
    """Part of a path: the pages from ``first`` on; the ones before are kept with it."""

    pages: list[Page]
    first: int = 0
    broken: bool = False


@dataclass(eq=False)
class Reader:
    path: Path
    stretches: list[Stretch]

    @property
    def pages(self) -> list[Page]:
        return [page for stretch in self.stretches for page in stretch.pages]


@dataclass(eq=False)
class Running(Reader):
    """A request that has published its pages and computes more."""

    stream: Stream = field(kw_only=True)


# --- what is drawn -------------------------------------------------------------------------------

Draft = tuple[
    int,  # a page that is there, which the stream goes on from; or a namespace
    list[tuple[int, int]],  # pages behind it: tokens, mark
    tuple[int, int, int],  # a last one: tokens, mark, how much of it
]
Length = tuple[int, int]  # pages, and how much of another: nothing, half of it, all but a token

drafted_parts = st.integers(0, 3), st.integers(0, 7)
drafts = st.tuples(
    st.integers(0, PHYSICAL_PAGES + 1),
    st.lists(st.tuples(*drafted_parts), max_size=3),
    st.tuples(*drafted_parts, st.integers(0, 2)),
)
lengths = st.tuples(st.integers(0, MAX_PAGES), st.integers(0, 2))
choices = st.integers(0, 11)
diverging_pages = st.sampled_from([None, None, *range(MAX_PAGES)])


class IndexMachine(RuleBasedStateMachine):
    """Requests of two namespaces on one index."""

    page_size: int
    hash_function: HashFunction
    policy: str
    smallest_fork = 1

    def __init__(self) -> None:
        super().__init__()
        self.index = ContentIndex(
            self.page_size,
            hash_function=self.hash_function,
            eviction_policy=self.policy,
            smallest_fork=self.smallest_fork,
            compare_latents=self.compare_latents,
        )
        self.model: dict[Name, Page] = {}
        self.latents: dict[int, int] = {}
        self.free = list(range(PHYSICAL_PAGES))
        self.clock = 0
        self.counters: Counter[str] = Counter()
        self.found: list[Reader] = []  # looked up, not kept
        self.locked: list[Reader] = []
        self.held: list[Reader] = []
        self.stale: list[Path] = []
        self.forks: list[tuple[Fork, Page]] = []

    # --- streams ---------------------------------------------------------------------------------

    def tokens(self, length: Length) -> int:
        return length[0] * self.page_size + (0, self.page_size // 2, self.page_size - 1)[length[1]]

    def part(self, pattern: int, mark: int) -> Part:
        """Pages part at their first token, in the middle, at the last one, or not at all."""
        size, middle = self.page_size, self.page_size // 2
        equal = (size, size - 1, middle, 0)[pattern]
        marks = [((0, 0),), ((0, 1),), ((middle, 0),), ((0, 0), (middle, 1))]
        return (
            tuple([0] * equal + [pattern] * (size - equal)),
            marks[mark] if mark < len(marks) else (),
        )

    def stream(self, draft: Draft) -> Stream:
        base, parts, (pattern, mark, length) = draft
        namespace, *known = [(0,), (1,), *self.model][base % (len(self.model) + 2)]
        tokens, marks = self.part(pattern, mark)
        count = self.tokens((0, length))
        tail = tokens[:count], tuple(mark for mark in marks if mark[0] < count)
        parts = (*known, *(self.part(*part) for part in parts))[:MAX_PAGES]
        return Stream(namespace, parts, tail)

    # --- the model -------------------------------------------------------------------------------

    def compare_latents(self, sealed: np.ndarray, own: np.ndarray) -> np.ndarray:
        pairs = zip(sealed.tolist(), own.tolist(), strict=True)
        return np.array([self.latents[one] == self.latents[other] for one, other in pairs])

    def key(self, name: Name, mark: Mark) -> PageKey:
        parent = self.model.get(name[:-1])
        above = below_page(parent.page_id) if parent else below_root(ROOTS[name[0]])
        return page_key(self.hash_function, above, np.array(name[-1][0]).tobytes(), mark)

    def taken(self, key: PageKey) -> bool:
        return any(page.key == key for page in self.model.values())

    def walk(self, stream: Stream, chain: Chain, tokens: int) -> int:
        """Pages that a look-up finds: those that are there, or fewer where a run can not be cut."""
        names, whole = stream.names, tokens // self.page_size
        there = next((n for n in range(whole) if names[n] not in self.model), whole)
        inside = [
            (name, page)
            for name, page in self.model.items()
            if there and name[:-1] == names[there - 1] and page.key is None
        ]
        for name, page in inside:  # one at most: the run goes on
            key = self.key(name, NO_MARK)
            if self.taken(key):
                self.counters["collisions"] += 1
                return max(n for n in range(there) if self.model[names[n]].key is not None)
            page.key = key
        if there < whole and self.taken(self.key(names[there], chain.mark(there))):
            self.counters["collisions"] += 1
        return there

    def best_fork(self, stream: Stream, pages: int, tokens: int) -> int:
        """Most leading tokens that the next page shares with any that hangs where a match ends."""
        after = (*stream.parts, stream.tail)[pages]
        wanted = (after[0][: tokens - pages * self.page_size], after[1])
        above = (stream.namespace, *stream.parts[:pages])
        below = [name[-1] for name in self.model if name[:-1] == above]
        return max((common_tokens(part, wanted) for part in below), default=0)

    def touch(self, pages: list[Page]) -> None:
        self.clock += 1
        for page in pages:
            page.tick = self.clock

    def leaves(self, *, held: bool) -> list[Name]:
        """What may go now, in the order of the policy."""
        order = {
            "lru": lambda page: page.tick,
            "lfu": lambda page: (page.hits, page.tick),
            "slru": lambda page: (page.hits >= 2, page.tick),
        }[self.policy]
        parents = {name[:-1] for name in self.model}
        loose = [n for n, p in self.model.items() if not p.locks and (p.holds > 0) == held]
        return sorted(set(loose) - parents, key=lambda name: order(self.model[name]))

    def break_holds(self, leaf: Page) -> None:
        """Who waits for this page waits no more; the pages before it lose that hold."""
        self.counters["broken_holds"] += 1
        for stretch in (stretch for reader in self.held for stretch in reader.stretches):
            if stretch.pages[-1] is leaf:
                stretch.broken = True
                for page in stretch.pages:
                    page.holds -= 1

    # --- look-ups --------------------------------------------------------------------------------

    def match(self, stream: Stream, limit: int | None) -> tuple[Match, list[Page]]:
        chain = stream.chain(self.index)
        tokens = chain.token_count if limit is None else min(limit, chain.token_count)
        known = any(name[0] == stream.namespace for name in self.model)
        found = self.index.match(chain, limit)
        expected = self.walk(stream, chain, tokens) if known else 0
        assert found.pages == expected
        pages = [self.model[name] for name in stream.names[:expected]]
        if known:
            self.touch(pages)
        self.check_fork(found.fork, stream, expected, tokens)
        return found, pages

    def check_fork(self, fork: Fork | None, stream: Stream, pages: int, tokens: int) -> None:
        best = self.best_fork(stream, pages, tokens)
        if not self.smallest_fork <= best < self.page_size:
            assert fork is None
            return
        assert fork is not None
        assert (fork.rows, fork.page) == (best, pages)
        name, page = next(
            (name, page) for name, page in self.model.items() if page.page_id == fork.page_id
        )
        assert name[:-1] == (stream.namespace, *stream.parts[:pages])
        assert common_tokens(name[-1], (*stream.parts, stream.tail)[pages]) >= best
        self.forks = [*self.forks[-5:], (fork, page)]

    @rule(draft=drafts, limit=st.none() | lengths, first=st.integers(0, 2))
    def look_up(self, draft: Draft, limit: Length | None, first: int) -> None:
        found, pages = self.match(self.stream(draft), self.tokens(limit) if limit else None)
        path = self.index.path(found.segments(first))
        stretches = [Stretch(pages, first)] if len(pages) > first else []
        self.found = [*self.found[-5:], Reader(path, stretches)]

    @precondition(lambda self: self.found)
    @rule(one=choices, other=choices)
    def join(self, one: int, other: int) -> None:
        """A path of several segments, of which two may be the same."""
        first, second = (self.found[n % len(self.found)] for n in (one, other))
        segments = (*first.path.segments[:2], *second.path.segments[:2])
        stretches = [replace(s) for s in (*first.stretches[:2], *second.stretches[:2])]
        self.found.append(Reader(self.index.path(segments), stretches))

    # --- publication -----------------------------------------------------------------------------

    def row(self, stream: Stream, own: int) -> list[int]:
        """Physical pages of a request that shares the first ``own`` of what is there."""
        there = [self.model.get(name) for name in stream.names]
        return [
            page.page_id if page and number < own else self.free.pop()
            for number, page in enumerate(there)
        ]

    def publish(
        self, stream: Stream, own: int, diverging: int | None, counted: int = 0
    ) -> Running | None:
        """Seal a row; ``diverging`` is a page that comes out different than others computed it."""
        names, chain, size = stream.names, stream.chain(self.index), self.page_size
        if len(self.free) < len(names):
            self.evict(len(names) - len(self.free), break_holds=True)
        if len(self.free) < len(names):
            return None
        row = self.row(stream, own)
        drawn = [page_id for page_id in row if page_id not in self.latents]
        self.latents |= dict.fromkeys(drawn, 0)
        if diverging is not None and diverging < len(row) and row[diverging] in drawn:
            self.latents[row[diverging]] = self.clock + 1
        published = self.index.publish(chain, row, counted)

        end, pages = len(names), self.walk(stream, chain, len(names) * size)
        twice = [n for n in range(pages) if self.model[names[n]].page_id != row[n]]
        for n in twice:
            if self.latents[self.model[names[n]].page_id] != self.latents[row[n]]:
                self.counters["latent_divergence"] += 1
                end, pages = n, self.walk(stream, chain, n * size)
                break
        twice = [n for n in twice if n < pages]
        for n in range(pages, end):
            key = None
            if n == pages or chain.mark(n):
                key = self.key(names[n], chain.mark(n))
                if self.taken(key):
                    self.counters["collisions"] += n > pages
                    end = n
                    break
            self.model[names[n]] = Page(row[n], key)
            drawn.remove(row[n])
            self.counters["published_pages"] += 1
        self.counters["duplicate_pages"] += len(twice)
        assert published.pages == end
        assert published.duplicate_pages.tolist() == twice
        assert published.duplicate_ids.tolist() == [row[n] for n in twice]

        sealed = [self.model[name] for name in names[:end]]
        self.touch(sealed)
        for page in sealed[counted:]:
            page.hits += 1
        for page_id in drawn:  # duplicates, and what stayed private
            del self.latents[page_id]
            self.free.append(page_id)
        path = self.index.path(published.segments())
        ends = replace(stream, parts=stream.parts[:end], tail=((), ()))
        return Running(path, [Stretch(sealed)] if sealed else [], stream=ends)

    @rule(
        draft=drafts,
        own=st.integers(0, MAX_PAGES),
        diverging=diverging_pages,
        keep=st.booleans(),
    )
    def finish(self, draft: Draft, own: int, diverging: int | None, keep: bool) -> None:
        """A request publishes its pages, and may go on reading them."""
        running = self.publish(self.stream(draft), own, diverging)
        if keep and running is not None:
            self.take_lock(running)

    def running(self) -> list[Running]:
        return [reader for reader in self.locked if isinstance(reader, Running)]

    @precondition(running)
    @rule(choice=choices, draft=drafts, diverging=diverging_pages)
    def extend(self, choice: int, draft: Draft, diverging: int | None) -> None:
        """A running request publishes what it computed since."""
        running = self.running()
        before = running[choice % len(running)]
        done = len(before.stream.parts)
        more = self.stream(draft)
        parts = (*before.stream.parts, *more.parts)[:MAX_PAGES]
        longer = replace(before.stream, parts=parts, tail=more.tail)
        after = self.publish(longer, done, diverging, counted=done)
        if after is not None:
            assert len(after.stream.parts) >= done
            self.locked.remove(before)
            self.give_lock_back(before)
            self.take_lock(after)

    # --- references ------------------------------------------------------------------------------

    def take_lock(self, reader: Reader) -> None:
        fresh = {page for page in reader.pages if not page.locks}
        assert self.index.lock(reader.path) == len(fresh)
        for page in reader.pages:
            page.locks += 1
        self.locked.append(reader)

    def give_lock_back(self, reader: Reader) -> None:
        for page in reader.pages:
            page.locks -= 1
        loose = {page for page in reader.pages if not page.locks}
        assert self.index.unlock(reader.path) == len(loose)

    def take_hold(self, reader: Reader) -> None:
        self.index.hold(reader.path)
        for page in reader.pages:
            page.holds += 1
        self.held.append(Reader(reader.path, [replace(s) for s in reader.stretches]))

    def give_hold_back(self, reader: Reader) -> None:
        self.index.release(reader.path)
        for stretch in reader.stretches:
            if not stretch.broken:
                for page in stretch.pages:
                    page.holds -= 1

    @precondition(lambda self: self.found)
    @rule(choice=choices, how=st.sampled_from(["lock", "hold", "both"]))
    def keep(self, choice: int, how: str) -> None:
        """A path that was found at any time before, if it is still there."""
        reader = self.found[choice % len(self.found)]
        if not all(page.alive for page in reader.pages):
            return
        if how != "lock":
            self.take_hold(reader)
        if how != "hold":
            self.take_lock(reader)

    @precondition(lambda self: self.locked or self.held)
    @rule(choice=choices)
    def leave(self, choice: int) -> None:
        """A running request ends, or a waiting one no longer waits."""
        choice %= len(self.locked) + len(self.held)
        if choice < len(self.locked):
            self.give_lock_back(self.locked.pop(choice))
        else:
            self.give_hold_back(self.held.pop(choice - len(self.locked)))

    @rule(count=st.integers(0, 8), break_holds=st.booleans())
    def evict(self, count: int, break_holds: bool) -> None:
        names = {page.page_id: name for name, page in self.model.items()}
        epoch, broken = self.index.hold_epoch, self.counters["broken_holds"]
        victims = self.index.evict(count, break_holds=break_holds).tolist()
        for page_id in victims:
            name = names[page_id]
            next_ones = self.leaves(held=False) or (break_holds and self.leaves(held=True))
            assert next_ones
            assert name == next_ones[0], "unheld first, in the order of the policy"
            page = self.model[name]
            if page.holds:
                self.break_holds(page)
            page.alive = False
            del self.model[name], self.latents[page_id]
        assert len(victims) <= count
        if len(victims) < count:
            assert not self.leaves(held=False)
            assert not (break_holds and self.leaves(held=True))
        assert (self.index.hold_epoch == epoch) == (self.counters["broken_holds"] == broken)
        self.counters["evicted_pages"] += len(victims)
        self.free += victims

    @rule(sure=st.integers(0, 3))
    def reset(self, sure: int) -> None:
        if sure < 3:
            return
        self.stale = [reader.path for reader in (*self.locked, *self.held, *self.found)][-4:]
        for page in self.model.values():
            page.alive = False
            self.free.append(page.page_id)
        self.index.reset()
        self.model.clear()
        self.latents.clear()
        self.found, self.locked, self.held = [], [], []

    # --- agreement -------------------------------------------------------------------------------

    def check_all(self) -> None:
        self.index_and_model_hold_the_same_pages()
        self.references_are_counted_where_they_end()
        self.paths_and_forks_name_their_pages()
        self.paths_of_an_earlier_generation_change_nothing()
        self.everything_adds_up()

    @invariant()
    def index_and_model_hold_the_same_pages(self) -> None:
        self.index.check_invariants()
        runs = list(self.index.runs())
        ours = {page.page_id: (name, page) for name, page in self.model.items()}
        assert {int(run.page_ids[0]) for run in runs} == {
            page.page_id for page in self.model.values() if page.key is not None
        }
        for run in runs:
            assert run.parent is not None
            above = int(run.parent.page_ids[-1]) if run.parent.page_count else run.root_key
            for number, page_id in enumerate(run.page_ids.tolist()):
                name, page = ours.pop(page_id)
                parent = self.model.get(name[:-1])
                assert above == (parent.page_id if parent else ROOTS[name[0]])
                start = number * self.page_size
                assert tuple(run.tokens[start : start + self.page_size].tolist()) == name[-1][0]
                marks = run.mark if number == 0 else NO_MARK
                assert [at for at, _ in marks] == [at for at, _ in name[-1][1]]
                assert (run.tick, run.hits) == (page.tick, page.hits)
                assert (run.locks > 0, run.holds > 0) == (page.locks > 0, page.holds > 0)
                above = page_id
        assert not ours

    @invariant()
    def references_are_counted_where_they_end(self) -> None:
        locks = Counter(s.pages[-1].page_id for reader in self.locked for s in reader.stretches)
        holds = Counter(
            s.pages[-1].page_id for reader in self.held for s in reader.stretches if not s.broken
        )
        for run in self.index.runs():
            last = int(run.page_ids[-1])
            assert run.locks == locks[last] + sum(child.locks > 0 for child in run.children)
            assert run.holds == holds[last] + sum(child.holds > 0 for child in run.children)

    @invariant()
    def paths_and_forks_name_their_pages(self) -> None:
        for reader in (*self.found, *self.locked, *self.held):
            alive = all(page.alive for page in reader.pages)
            assert self.index.intact(reader.path) == alive
            if alive:
                expected = [page.page_id for s in reader.stretches for page in s.pages[s.first :]]
                assert reader.path.page_ids().tolist() == expected
                assert len(reader.path) == len(expected)
        for fork, page in self.forks:
            assert fork.page_id == (page.page_id if page.alive else None)

    @invariant()
    def paths_of_an_earlier_generation_change_nothing(self) -> None:
        for path in self.stale:
            assert self.index.lock(path) == self.index.unlock(path) == 0
            self.index.hold(path)
            self.index.release(path)
            assert not self.index.intact(path)

    @invariant()
    def everything_adds_up(self) -> None:
        pages = self.model.values()
        locked = sum(page.locks > 0 for page in pages)
        held = sum(page.holds > 0 and not page.locks for page in pages)
        assert (self.index.locked_pages, self.index.held_pages) == (locked, held)
        assert self.index.evictable_pages == len(pages) - locked - held
        owned = [page.page_id for page in pages]
        assert sorted(self.free + owned) == list(range(PHYSICAL_PAGES)), "one owner for each"
        for counter in self.index.counters.__slots__:
            assert getattr(self.index.counters, counter) == self.counters[counter], counter
