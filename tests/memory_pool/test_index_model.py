"""Random operations on the content index against a model that is a plain dict.

The model keeps ``path -> page`` where a path is everything that makes a page what it is: the
namespace and, page by page, tokens and mark. A hit that rests on a hash alone is therefore an
error. Physical pages come from a free list and go back to it exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tessera_sglang.memory_pool.index import ContentIndex, Page, Path
from tessera_sglang.memory_pool.keys import Chain, HashFunction, Namespace, PageKey, VisibleSpan
from tessera_sglang.memory_pool.keys import xxh3_128 as full_hash

PAGE_TOKENS = 2
PHYSICAL_PAGES = 24
MAX_PAGES = 5

Name = tuple[object, ...]  # namespace, then (tokens, mark) of each page from the first to this one


def shortened(bits: int) -> HashFunction:
    mask = (1 << bits) - 1
    return lambda data: bytes([xxhash.xxh3_64_intdigest(data) & mask])


@dataclass(frozen=True)
class Stream:
    """Tokens of a request, and the page in which a span becomes visible to it, if any."""

    namespace: int
    pages: tuple[int, ...]
    mark_page: int | None


@dataclass
class Entry:
    page_id: int
    key: PageKey
    tick: int
    locks: int = 0
    holds: int = 0


class IndexMachine(RuleBasedStateMachine):
    """Requests of two namespaces on one index."""

    hash_function: HashFunction

    def __init__(self) -> None:
        super().__init__()
        self.index = ContentIndex(PAGE_TOKENS, hash_function=self.hash_function)
        self.model: dict[Name, Entry] = {}
        self.free = list(range(PHYSICAL_PAGES))
        self.clock = self.collisions = 0
        self.locked: list[tuple[Path, list[Name]]] = []
        self.held: list[tuple[Path, list[Name]]] = []
        self.stale: list[Path] = []

    def names(self, stream: Stream) -> list[Name]:
        parts = [(tokens, number == stream.mark_page) for number, tokens in enumerate(stream.pages)]
        return [(stream.namespace, *parts[: number + 1]) for number in range(len(parts))]

    def chain(self, stream: Stream) -> Chain:
        tokens = [token for page in stream.pages for token in (page, 7)]
        marks = [stream.mark_page] if stream.mark_page is not None else []
        visible = [VisibleSpan(n * PAGE_TOKENS, PageKey(b"body"), 0, PAGE_TOKENS, 0) for n in marks]
        root = Namespace("model", cache_salt=str(stream.namespace)).root_key()
        return Chain(root, tokens, PAGE_TOKENS, visible=visible, hash_function=self.hash_function)

    def touch(self, names: list[Name]) -> None:
        self.clock += 1
        for name in names:
            self.model[name].tick = self.clock

    def taken(self, name: Name, key: PageKey) -> bool:
        """Whether another page goes by this key."""
        return any(e.key == key and n != name for n, e in self.model.items())

    def match(self, stream: Stream) -> tuple[tuple[Page, ...], list[Name]]:
        """The longest run the model holds is what the index must find: no less, and no other."""
        chain, names = self.chain(stream), self.names(stream)
        expected = next((n for n, name in enumerate(names) if name not in self.model), len(names))
        if expected < len(names):
            self.collisions += self.taken(names[expected], chain.key(expected))
        pages = self.index.match(chain)
        found = names[:expected]
        assert [p.page_id for p in pages] == [self.model[name].page_id for name in found]
        assert [p.tokens for p in pages] == [chain.tokens(n) for n in range(expected)]
        self.touch(found)
        return pages, found

    def leaves(self, *, held: bool) -> list[Name]:
        """What may go now, least recently used first."""
        parents = {name[:-1] for name in self.model}
        loose = [n for n, e in self.model.items() if not e.locks and (e.holds > 0) == held]
        leaves = [name for name in loose if name not in parents]
        return sorted(leaves, key=lambda name: self.model[name].tick)

    streams = st.builds(
        Stream,
        namespace=st.integers(0, 1),
        pages=st.lists(st.integers(0, 2), min_size=1, max_size=MAX_PAGES).map(tuple),
        mark_page=st.none() | st.integers(0, MAX_PAGES - 1),
    )

    @rule(stream=streams)
    def look_up(self, stream: Stream) -> None:
        self.match(stream)

    @rule(stream=streams, own=st.integers(0, MAX_PAGES))
    def publish(self, stream: Stream, own: int) -> None:
        """Of what is there, the row holds the first ``own`` pages; the rest it computed itself."""
        chain, names = self.chain(stream), self.names(stream)
        if len(self.free) < len(names):
            return
        row, drawn = [], []
        for number, name in enumerate(names):
            if number < own and name in self.model:
                row.append(self.model[name].page_id)
            else:
                row.append(self.free.pop())
                drawn.append(row[-1])
        published = self.index.publish(chain, row)

        duplicates, sealed = [], []
        for number, name in enumerate(names):
            if name in self.model:
                if self.model[name].page_id != row[number]:
                    duplicates.append((number, row[number]))
            elif self.taken(name, chain.key(number)):
                self.collisions += 1
                break
            else:
                self.model[name] = Entry(row[number], chain.key(number), 0)
                drawn.remove(row[number])
            sealed.append(name)
        assert published.duplicates == tuple(duplicates)
        assert [p.page_id for p in published.pages] == [self.model[n].page_id for n in sealed]
        self.free += drawn  # duplicates, and what stayed private
        self.touch(sealed)

    @rule(stream=streams)
    def lock(self, stream: Stream) -> None:
        pages, names = self.match(stream)
        fresh = sum(self.model[name].locks == 0 for name in names)
        self.locked.append((self.index.path(pages), names))
        assert self.index.lock(self.locked[-1][0]) == fresh
        for name in names:
            self.model[name].locks += 1

    @rule(choice=st.integers(0, 1 << 16))
    def unlock(self, choice: int) -> None:
        if not self.locked:
            return
        path, names = self.locked.pop(choice % len(self.locked))
        for name in names:
            self.model[name].locks -= 1
        assert self.index.unlock(path) == sum(self.model[name].locks == 0 for name in names)

    @rule(stream=streams)
    def hold(self, stream: Stream) -> None:
        pages, names = self.match(stream)
        self.held.append((self.index.path(pages), names))
        self.index.hold(self.held[-1][0])
        for name in names:
            self.model[name].holds += 1

    @rule(choice=st.integers(0, 1 << 16))
    def release(self, choice: int) -> None:
        if not self.held:
            return
        path, names = self.held.pop(choice % len(self.held))
        kept = [n for p, n in zip(path.pages, names, strict=True) if p.alive]
        assert self.index.intact(path) == (len(kept) == len(names))
        self.index.release(path)
        for name in kept:
            self.model[name].holds -= 1

    @rule(count=st.integers(0, PHYSICAL_PAGES), break_holds=st.booleans())
    def evict(self, count: int, break_holds: bool) -> None:
        by_page = {entry.page_id: name for name, entry in self.model.items()}
        victims = self.index.evict(count, break_holds=break_holds)
        for page_id in victims:
            free_leaves = self.leaves(held=False)
            held_leaves = self.leaves(held=True) if break_holds else []
            name = by_page[page_id]
            assert name == (free_leaves or held_leaves)[0], "unheld first, in the order of use"
            del self.model[name]
        assert len(victims) <= count
        if len(victims) < count:
            assert not self.leaves(held=False)
            assert not (break_holds and self.leaves(held=True))
        self.free += victims

    @rule()
    def reset(self) -> None:
        self.stale = [path for path, _ in (*self.locked, *self.held)]
        self.free += [entry.page_id for entry in self.model.values()]
        self.index.reset()
        self.model.clear()
        self.locked, self.held = [], []

    @rule()
    def use_paths_of_an_earlier_generation(self) -> None:
        for path in self.stale:
            assert self.index.lock(path) == self.index.unlock(path) == 0
            self.index.hold(path)
            self.index.release(path)

    @invariant()
    def index_and_model_agree(self) -> None:
        self.index.check_invariants()
        entries = self.model.values()
        pages = sorted((p.page_id, p.locks, p.holds, p.tick) for p in self.index.pages())
        assert pages == sorted((e.page_id, e.locks, e.holds, e.tick) for e in entries)
        locked = sum(e.locks > 0 for e in entries)
        held = sum(e.holds > 0 and not e.locks for e in entries)
        assert (self.index.locked_pages, self.index.held_pages) == (locked, held)
        assert self.index.evictable_pages == len(entries) - locked - held
        assert self.index.counters.collisions == self.collisions
        owned = [entry.page_id for entry in entries]
        assert sorted(self.free + owned) == list(range(PHYSICAL_PAGES)), "one owner for each"


HASHES = {"128 bits": full_hash, "8 bits": shortened(8), "4 bits": shortened(4)}


@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize(
    "examples", [100, pytest.param(2000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_the_index_is_a_dict_of_paths(examples: int, hash_name: str) -> None:
    class Machine(IndexMachine):
        hash_function = staticmethod(HASHES[hash_name])

    profile = settings(max_examples=examples, stateful_step_count=50, deadline=None, database=None)
    run_state_machine_as_test(Machine, settings=profile)
