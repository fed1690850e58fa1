"""Index, pool and arena together, driven as a scheduler drives them, against plain dictionaries.

Every token leaves a value behind that names everything before it, in its page and in its window. What a
request may read must hold the values of its own tokens, whatever was matched, forked, restored,
evicted, aborted or flushed in between, and whatever keys collide.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from geometries import plain, windowed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from index_helpers import short_hash

from tessera_sglang.memory_pool.geometry import Geometry
from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import HashFunction, Namespace, PageKey, xxh3_128
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.memory_pool.runs import Path, Run

PAGE = 4
PAGES = 18
SLOTS = 5
RUNNING = 3
WINDOW = 6
POISON = -1

# Texts that share their first pages, one of them but for a few tokens.
TEXT_TOKENS = 22
TEXTS = [
    [*range(TEXT_TOKENS)],
    [*range(9), *range(50, 50 + TEXT_TOKENS - 9)],
    [*range(14), *range(70, 70 + TEXT_TOKENS - 14)],
    [*range(90, 90 + TEXT_TOKENS)],
]
ROOTS = [Namespace("model", cache_salt=str(number)).root_key() for number in range(2)]


def value(root: bytes, tokens: list[int]) -> int:
    """What the last of these tokens leaves behind: a name of all of them."""
    return zlib.crc32(root + np.array(tokens, np.int64).tobytes()) & 0x7FFFFFFF


@dataclass(eq=False)
class Request:
    """A running request: its row, and what of it is the index's."""

    root: PageKey
    tokens: list[int]
    path: Path
    slot: int
    pages: list[int] = field(default_factory=list)  # physical, in row order
    protected: int = 0  # pages that the index owns
    computed: int = 0  # tokens

    def values(self) -> list[int]:
        return [value(self.root, self.tokens[: end + 1]) for end in range(self.computed)]


class EngineMachine(RuleBasedStateMachine):
    """Requests of two namespaces over one pool."""

    geometry: Geometry
    hash_function: HashFunction

    def __init__(self) -> None:
        super().__init__()
        empty = self.geometry.slot_bytes == 0
        self.pool = TwoTierPool(
            self.geometry, pages=PAGES, slots=0 if empty else SLOTS, running=0 if empty else RUNNING
        )
        self.index = ContentIndex(
            PAGE, hash_function=self.hash_function, smallest_fork=1 if empty else None
        )
        self.running: list[Request] = []
        self.held: list[Path] = []
        self.stale: list[Path] = []
        self.kv = self.pool.paged.tensor(0, "kv").view(torch.int32)
        self.kv.fill_(POISON)
        self.operations = 0

    # --- what a model reads and writes -----------------------------------------------------------

    def paged_values(self, pages: list[int], tokens: int) -> list[int]:
        found = self.kv[torch.tensor(pages, dtype=torch.int64)].flatten()
        return [int(number) for number in found[:tokens]]

    def window_values(self, request: Request) -> dict[int, int]:
        """Position to value, of what can be read around the end of a request."""
        positions = np.arange(request.computed - WINDOW - 2, request.computed + 3)
        ring = self.pool.arena.ring(1, "window")
        rows, there = ring.read_rows(np.full(len(positions), request.slot), positions)
        found = self.pool.arena.tensor(1, "window").view(torch.int32)[torch.from_numpy(rows), 0]
        return dict(zip(positions[there].tolist(), found.numpy()[there].tolist(), strict=True))

    def write(self, request: Request, count: int) -> None:
        start, end = request.computed, request.computed + count
        values = [value(request.root, request.tokens[: at + 1]) for at in range(start, end)]
        for at, number in zip(range(start, end), values, strict=True):
            self.kv[request.pages[at // PAGE], at % PAGE] = number
        if not self.pool.arena.empty:
            ring = self.pool.arena.ring(1, "window")
            rows = ring.write_rows(np.full(count, request.slot), np.arange(start, end))
            window = self.pool.arena.tensor(1, "window").view(torch.int32)
            window[torch.from_numpy(rows), 0] = torch.tensor(values, dtype=torch.int32)
        request.computed = end

    # --- the life of a request -------------------------------------------------------------------

    prompts = st.builds(
        lambda number, length, tail: TEXTS[number][:length] + tail,
        number=st.integers(0, len(TEXTS) - 1),
        length=st.integers(5, TEXT_TOKENS),
        tail=st.lists(st.integers(0, 1), max_size=3),
    )

    @rule(namespace=st.integers(0, 1), tokens=prompts)
    def arrive(self, namespace: int, tokens: list[int]) -> None:
        self.admit(ROOTS[namespace], tokens)

    @rule(namespace=st.integers(0, 1), tokens=prompts, chunk=st.integers(3, TEXT_TOKENS))
    def serve(self, namespace: int, tokens: list[int], chunk: int) -> None:
        """A request from its arrival to its end, as far as there is room."""
        request = self.admit(ROOTS[namespace], tokens)
        while request is not None and request.computed < len(tokens):
            if not self.extend(request, chunk):
                self.give_back(request)
                return
            self.publish(request)
        if request is not None:
            self.give_back(request)

    def admit(self, root: PageKey, tokens: list[int]) -> Request | None:
        """Match, lock, find room, and start from what was found; None where there is no room."""
        index, pool = self.index, self.pool
        chain = index.chain(root, tokens)
        found = index.match(chain, len(tokens) - 1)
        matched = [int(page) for segment in found.segments() for page in segment.page_ids()]
        assert len(matched) == found.pages
        assert found.pages * PAGE < len(tokens)
        usable = pool.match_limit(np.array(matched, np.int64))
        if usable < found.pages:  # cut where a state was saved; keys may collide with the cut's
            found = index.match(chain, usable * PAGE)
            usable = usable if found.pages == usable else 0
        path = index.path(found.segments() if usable else ())
        matched = matched[:usable]
        index.lock(path)
        fork = found.fork if usable == found.pages else None
        keep = np.array(matched[-1:], np.int64)
        relief = pool.relieve(index, pages=1 if fork else 0, slots=1, break_holds=True, keep=keep)
        if not relief.enough:
            index.unlock(path)
            return None
        slots = pool.arena.allocate(1)
        assert slots is not None
        request = Request(root, tokens, path, int(slots[0]), matched, len(matched))
        request.computed = len(matched) * PAGE
        if matched:
            assert pool.restore(matched[-1], request.slot), "matched what can not be gone on from"
        if fork is not None and fork.page_id is not None:
            own = pool.paged.allocate(1)
            assert own is not None
            pool.paged.copy_rows(fork.page_id, int(own[0]), fork.rows)
            request.pages.append(int(own[0]))
            request.computed += fork.rows
            assert request.computed < len(tokens), "the last token is always computed"
        self.running.append(request)
        return request

    @rule(choice=st.integers(0, 1 << 16), count=st.integers(1, 2 * PAGE))
    def compute(self, choice: int, count: int) -> None:
        request = self.chosen(choice)
        if request is not None:
            self.extend(request, count)

    def extend(self, request: Request, count: int) -> bool:
        """A chunk of a prefill, or a step; refused where there is no room, and nothing is lost."""
        count = min(count, len(request.tokens) - request.computed)
        needed = -(-(request.computed + count) // PAGE) - len(request.pages)
        if needed > 0:
            if not self.pool.relieve(self.index, pages=needed, break_holds=True).enough:
                return False
            own = self.pool.paged.allocate(needed)
            assert own is not None
            request.pages += own.tolist()
        self.write(request, count)
        return True

    @rule(choice=st.integers(0, 1 << 16))
    def checkpoint(self, choice: int) -> None:
        request = self.chosen(choice)
        if request is not None:
            self.publish(request)

    def publish(self, request: Request) -> None:
        index, pool = self.index, self.pool
        full = request.computed // PAGE
        chain = index.chain(request.root, request.tokens[: request.computed])
        published = index.publish(chain, request.pages[:full], counted=request.path.counted)
        if len(published.duplicate_pages):
            assert published.duplicate_pages[0] >= request.protected
            sealed = published.segments()[0].page_ids()
            request.pages[: published.pages] = [int(page) for page in sealed]
            pool.free(published.duplicate_ids)
        path = index.path(published.segments(), counted=published.pages)
        index.lock(path)
        index.unlock(request.path)
        request.path = path
        request.protected = max(request.protected, published.pages)
        if request.computed == published.pages * PAGE and published.pages:
            pool.save(request.slot, request.pages[published.pages - 1], request.computed)

    @rule(choice=st.integers(0, 1 << 16))
    def finish(self, choice: int) -> None:
        request = self.chosen(choice)
        if request is not None:
            self.publish(request)
            self.give_back(request)

    @rule(choice=st.integers(0, 1 << 16))
    def abort(self, choice: int) -> None:
        request = self.chosen(choice)
        if request is not None:
            self.give_back(request)

    @rule(choice=st.integers(0, 1 << 16))
    def retract(self, choice: int) -> None:
        request = self.chosen(choice)
        if request is not None:
            self.give_back(request)
            self.admit(request.root, request.tokens)

    def give_back(self, request: Request) -> None:
        self.pool.free(np.array(request.pages[request.protected :], np.int64))
        self.pool.arena.free(np.array([request.slot] if request.slot else [], np.int64))
        self.index.unlock(request.path)
        self.running.remove(request)

    def chosen(self, choice: int) -> Request | None:
        return self.running[choice % len(self.running)] if self.running else None

    # --- everything else -------------------------------------------------------------------------

    @rule(namespace=st.integers(0, 1), tokens=prompts)
    def hold(self, namespace: int, tokens: list[int]) -> None:
        found = self.index.match(self.index.chain(ROOTS[namespace], tokens))
        self.held.append(self.index.path(found.segments()))
        self.index.hold(self.held[-1])

    @rule(choice=st.integers(0, 1 << 16))
    def release(self, choice: int) -> None:
        if self.held:
            self.index.release(self.held.pop(choice % len(self.held)))

    @rule(count=st.integers(1, PAGES), break_holds=st.booleans())
    def evict(self, count: int, break_holds: bool) -> None:
        index, paged = self.index, self.pool.paged
        sparable = index.evictable_pages + (index.held_pages if break_holds else 0)
        wanted = paged.available + count
        sealed = index.page_count
        relief = self.pool.relieve(index, pages=wanted, break_holds=break_holds)
        assert relief.enough == (count <= sparable)
        assert sealed - index.page_count == (count if relief.enough else 0)

    @rule()
    def flush(self) -> None:
        for request in list(self.running):
            self.stale.append(request.path)
            self.give_back(request)
        self.stale += self.held
        self.held = []
        self.index.reset()
        self.pool.clear()
        self.kv.fill_(POISON)

    @rule()
    def use_paths_of_an_earlier_generation(self) -> None:
        for path in self.stale:
            if path.generation != self.index.generation:
                assert self.index.lock(path) == self.index.unlock(path) == 0
                self.index.hold(path)
                self.index.release(path)

    # --- what must hold --------------------------------------------------------------------------

    @invariant()
    def count(self) -> None:
        self.operations += 1

    @invariant()
    def every_page_and_slot_has_one_owner(self) -> None:
        self.index.check_invariants()
        sealed = [int(page) for run in self.index.runs() for page in run.page_ids]
        self.pool.check_invariants(self.index, np.array(sealed, np.int64))
        own = [page for request in self.running for page in request.pages[request.protected :]]
        assert sorted(sealed + own) == sorted({*sealed, *own}), "a page has two owners"
        assert len(sealed) + len(own) + self.pool.paged.available == PAGES
        assert 0 not in sealed + own
        assert self.pool.arena.running == (0 if self.pool.arena.empty else len(self.running))

    @invariant()
    def sealed_pages_hold_what_their_names_say(self) -> None:
        for run in self.index.runs():
            tokens = tokens_before(run) + run.tokens.tolist()
            start = run.start * PAGE
            wanted = [value(run.root_key, tokens[: at + 1]) for at in range(start, len(tokens))]
            assert self.paged_values(run.page_ids.tolist(), len(wanted)) == wanted

    @invariant()
    def requests_read_their_own_tokens(self) -> None:
        for request in self.running:
            assert self.paged_values(request.pages, request.computed) == request.values()
            if not self.pool.arena.empty:
                values = request.values()
                first = max(0, request.computed - WINDOW)
                wanted = {at: values[at] for at in range(first, request.computed)}
                assert self.window_values(request) == wanted


def tokens_before(run: Run) -> list[int]:
    parts: list[list[int]] = []
    above = run.parent
    while above is not None:
        parts.append(above.tokens.tolist())
        above = above.parent
    return [token for part in reversed(parts) for token in part]


GEOMETRIES = {"pages only": plain(PAGE), "with an arena": windowed(PAGE, WINDOW)}
HASHES = {"128 bits": xxh3_128, "8 bits": short_hash(8), "3 bits": short_hash(3)}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize(
    "operations", [1_000, pytest.param(35_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_nobody_reads_what_is_not_theirs(geometry: str, hash_name: str, operations: int) -> None:
    """The six long runs are 210,000 operations."""

    class Machine(EngineMachine):
        hash_function = staticmethod(HASHES[hash_name])
        done = 0

        def teardown(self) -> None:
            type(self).done += self.operations

    Machine.geometry = GEOMETRIES[geometry]
    while Machine.done < operations:  # programs are as long as hypothesis likes
        profile = settings(
            max_examples=operations // 40, stateful_step_count=50, deadline=None, database=None
        )
        run_state_machine_as_test(Machine, settings=profile)
