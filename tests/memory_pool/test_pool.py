"""The two tiers together: everything adds up, and the tier that is short is the one relieved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from geometries import plain, windowed
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_sglang.memory_pool.handles import StaleHandle
from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import Namespace
from tessera_sglang.memory_pool.pool import TierView, TwoTierPool


@dataclass
class Shelf:
    """An index that is three lists of pages, least recently used first."""

    loose: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    locked: list[int] = field(default_factory=list)

    @property
    def pages(self) -> np.ndarray:
        return np.array(self.loose + self.held + self.locked, dtype=np.int32)

    @property
    def page_count(self) -> int:
        return len(self.pages)

    @property
    def locked_pages(self) -> int:
        return len(self.locked)

    @property
    def held_pages(self) -> int:
        return len(self.held)

    @property
    def evictable_pages(self) -> int:
        return len(self.loose)

    def evict(self, page_count: int, /, *, break_holds: bool = False) -> np.ndarray:
        victims = (self.loose + (self.held if break_holds else []))[:page_count]
        self.loose = [page for page in self.loose if page not in victims]
        self.held = [page for page in self.held if page not in victims]
        return np.array(victims, dtype=np.int64)


def run(pool: TwoTierPool, shelf: Shelf, pages: int, *, save: bool = True) -> list[int]:
    """A request of that many pages comes, saves its state with its last page, seals them and goes."""
    drawn, slots = pool.paged.allocate(pages), pool.arena.allocate(1)
    assert drawn is not None
    assert slots is not None
    if not pool.arena.empty:
        tokens = pages * pool.geometry.page_tokens
        pool.arena.ring(1, "window").write_rows(np.full(tokens, slots[0]), np.arange(tokens))
        assert pool.save(int(slots[0]), int(drawn[-1]), tokens) == save
    pool.arena.free(slots)
    shelf.loose += drawn.tolist()
    return [int(page) for page in drawn]


def views(pool: TwoTierPool, shelf: Shelf) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pool.check_invariants(shelf, shelf.pages)
    view = pool.view(shelf)
    return dataclasses.astuple(view.paged)[1:], dataclasses.astuple(view.arena)[1:]


# --- accounting ----------------------------------------------------------------------------------


def test_everything_adds_up() -> None:
    """Case 1: P=32, ten pages, over the content index itself."""
    pool, index = TwoTierPool(plain(32), pages=10, slots=0), ContentIndex(32)
    root = Namespace("model").root_key()
    requests = [list(range(100)), [*range(64), *range(500, 536)]]
    for tokens in requests:
        drawn = pool.paged.allocate(-(-len(tokens) // 32))
        assert drawn is not None
        published = index.publish(index.chain(root, tokens), drawn[: len(tokens) // 32])
        pool.free(published.duplicate_ids)
        pool.free(drawn[len(tokens) // 32 :])
    view = pool.view(index).paged
    assert (view.available, view.evictable, view.protected, view.in_use) == (6, 4, 0, 0)

    match = index.match(index.chain(root, requests[0]))
    path = index.path(match.segments())
    index.lock(path)
    short = pool.paged.allocate(1)
    assert short is not None
    assert index.publish(index.chain(root, list(range(20))), short[:0]).pages == 0
    view = pool.view(index).paged
    assert (view.available, view.evictable, view.protected, view.in_use) == (5, 1, 3, 1)
    pool.free(short)
    index.unlock(path)

    view = pool.view(index).paged
    assert (view.available + view.evictable + view.protected) * 32 == 320
    relief = pool.relieve(index, pages=10)
    assert relief.enough
    assert len(set(relief.evicted.tolist())) == 4
    assert pool.paged.available == 10
    pool.check_invariants(index)


def test_each_unit_is_counted_once() -> None:
    pool, shelf = TwoTierPool(windowed(4, 4), pages=10, slots=4), Shelf()
    first, second = run(pool, shelf, 3), run(pool, shelf, 2)
    shelf.loose.remove(first[0])
    shelf.locked.append(first[0])
    shelf.loose.remove(second[0])
    shelf.held.append(second[0])
    assert pool.paged.allocate(1) is not None
    assert pool.arena.allocate(1) is not None
    assert views(pool, shelf) == ((4, 3, 2, 1), (1, 2, 0, 1))


@pytest.mark.parametrize("counts", [(1, 1, 1, 0), (2, 1, 1, 1), (5, -1, 0, 0)])
def test_a_tier_that_does_not_add_up_is_a_bug(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(AssertionError, match="does not add up"):
        TierView(4, *counts)


def test_an_index_that_maps_what_the_pool_does_not_own_is_found() -> None:
    """Case 19: the reserved page in particular."""
    pool, shelf = TwoTierPool(plain(4), pages=4, slots=0), Shelf()
    run(pool, shelf, 2)
    for wrong in ([0], [3], [1, 1]):
        with pytest.raises(AssertionError):
            pool.check_invariants(sealed=np.array(wrong))
    pool.check_invariants(shelf, shelf.pages)


# --- relief --------------------------------------------------------------------------------------


def test_short_of_slots_drops_states_and_no_page() -> None:
    """Case 14: the window tier is full, the paged tier is nearly empty."""
    pool, shelf = TwoTierPool(windowed(4, 4), pages=50, slots=3), Shelf()
    requests = [run(pool, shelf, 2) for _ in range(2)]
    assert pool.arena.allocate(1) is not None
    assert views(pool, shelf) == ((46, 4, 0, 0), (0, 2, 0, 1))
    relief = pool.relieve(shelf, slots=1)
    assert (relief.enough, relief.evicted.tolist(), relief.dropped_states) == (True, [], 1)
    assert views(pool, shelf) == ((46, 4, 0, 0), (1, 1, 0, 1))
    assert [pool.match_limit(np.array(pages)) for pages in requests] == [0, 2], "the older went"


def test_short_of_pages_evicts_pages_and_their_states() -> None:
    """Case 14, the other way round."""
    pool, shelf = TwoTierPool(windowed(4, 4), pages=5, slots=9), Shelf()
    old, new = run(pool, shelf, 2), run(pool, shelf, 2)
    relief = pool.relieve(shelf, pages=3)
    assert (relief.enough, relief.evicted.tolist(), relief.dropped_states) == (True, old, 1)
    assert views(pool, shelf) == ((3, 2, 0, 0), (8, 1, 0, 0))
    assert pool.match_limit(np.array(new)) == 2


def test_what_is_not_short_is_left_alone() -> None:
    pool, shelf = TwoTierPool(windowed(4, 4), pages=5, slots=3), Shelf()
    run(pool, shelf, 2)
    before = views(pool, shelf)
    assert pool.relieve(shelf, pages=3, slots=2).enough
    assert views(pool, shelf) == before


@pytest.mark.parametrize(("pages", "slots"), [(5, 0), (0, 4), (4, 4), (5, 2)])
def test_only_who_does_not_fit_is_refused(pages: int, slots: int) -> None:
    """Case 14: where relief is not enough, nothing is given up."""
    pool, shelf = TwoTierPool(windowed(4, 4), pages=5, slots=4), Shelf()
    run(pool, shelf, 2)
    shelf.locked.append(shelf.loose.pop(0))
    assert pool.arena.allocate(1) is not None
    before = views(pool, shelf)
    assert not pool.relieve(shelf, pages=pages, slots=slots).enough
    assert views(pool, shelf) == before
    assert pool.relieve(shelf, pages=4, slots=3).enough


def test_holds_are_broken_only_for_those_who_may() -> None:
    pool, shelf = TwoTierPool(windowed(4, 4), pages=4, slots=4), Shelf()
    run(pool, shelf, 3)
    shelf.held, shelf.loose = shelf.loose, []
    assert not pool.relieve(shelf, pages=2).enough
    assert pool.relieve(shelf, pages=2, break_holds=True).enough
    assert shelf.page_count == 2


def test_slots_that_evicted_pages_leave_count_as_relief() -> None:
    pool, shelf = TwoTierPool(windowed(4, 4), pages=4, slots=3), Shelf()
    old, new = run(pool, shelf, 2), run(pool, shelf, 2)
    assert pool.restore(old[1], int(pool.arena.allocate(1)[0])), "now the newer state is the older"
    relief = pool.relieve(shelf, pages=2, slots=1)
    assert (relief.evicted.tolist(), relief.dropped_states) == (old, 1)
    assert pool.match_limit(np.array(new)) == 2


def test_no_state_is_dropped_where_evicted_pages_left_more_slots_than_are_short() -> None:
    pool, shelf = TwoTierPool(windowed(4, 4), pages=5, slots=5), Shelf()
    pages = [run(pool, shelf, 1)[0] for _ in range(4)]
    assert pool.arena.allocate(1) is not None
    relief = pool.relieve(shelf, pages=3, slots=1)
    assert (relief.evicted.tolist(), relief.dropped_states) == (pages[:2], 2)
    assert sorted(pool.arena.saved_pages()) == pages[2:]


def test_a_state_that_is_wanted_is_not_dropped_to_make_room_for_who_wants_it() -> None:
    pool, shelf = TwoTierPool(windowed(4, 4), pages=9, slots=2), Shelf()
    wanted = run(pool, shelf, 2)
    assert pool.arena.allocate(1) is not None
    assert not pool.relieve(shelf, slots=1, keep=np.array(wanted)).enough
    assert pool.match_limit(np.array(wanted)) == 2
    assert pool.relieve(shelf, slots=1).enough


def test_requests_beyond_those_that_may_run_are_refused() -> None:
    pool, shelf = TwoTierPool(windowed(4, 4), pages=9, slots=5, running=1), Shelf()
    run(pool, shelf, 2)
    assert not pool.relieve(shelf, slots=2).enough
    assert pool.arena.allocate(1) is not None
    before = views(pool, shelf)
    assert not pool.relieve(shelf, slots=1).enough
    assert views(pool, shelf) == before


# --- reachability --------------------------------------------------------------------------------


def test_pages_can_be_gone_on_from_up_to_the_last_saved_state() -> None:
    """Case 11: a match that the window does not cover is shortened."""
    pool, shelf = TwoTierPool(windowed(4, 4), pages=9, slots=3), Shelf()
    pages = run(pool, shelf, 3) + run(pool, shelf, 2)
    for stop, limit in ((0, 0), (2, 0), (3, 3), (4, 3), (5, 5)):
        assert pool.match_limit(np.array(pages[:stop], dtype=np.int32)) == limit


@pytest.mark.parametrize("by_tokens", [True, False])
def test_a_state_goes_with_its_page(by_tokens: bool) -> None:
    """Case 11: whoever gets the page next finds no state with it."""
    pool = TwoTierPool(windowed(4, 4), pages=3, slots=2)
    shelf = Shelf()
    pages = np.array(run(pool, shelf, 2))
    if by_tokens:
        tokens = (pages[:, None] * 4 + np.arange(4)).reshape(-1)
        assert pool.free_tokens(tokens[:6]).tolist() == [pages[0]]
        assert pool.match_limit(pages[1:]) == 1
        assert pool.free_tokens(tokens[6:]).tolist() == [pages[1]]
    else:
        pool.free(pages)
    again = pool.paged.allocate(2)
    assert again is not None
    assert sorted(again.tolist()) == pages.tolist()
    assert pool.match_limit(again) == 0
    pool.check_invariants()


def test_a_state_belongs_to_a_page_that_somebody_owns() -> None:
    pool = TwoTierPool(windowed(4, 4), pages=3, slots=2)
    slots = pool.arena.allocate(1)
    assert slots is not None
    pool.arena.ring(1, "window").write_rows(np.full(4, slots[0]), np.arange(4))
    with pytest.raises(AssertionError, match="nobody owns"):
        pool.save(int(slots[0]), 2, 4)
    with pytest.raises(AssertionError, match="nobody owns"):
        pool.restore(2, int(slots[0]))


def test_a_flush_takes_back_both_tiers() -> None:
    """Case 6: what was handed out before is stale, not wrong."""
    pool, shelf = TwoTierPool(windowed(4, 4), pages=3, slots=2), Shelf()
    page = run(pool, shelf, 2)[0]
    handle = pool.paged.handle(0, "kv", page)
    assert pool.table.resolve(handle).nbytes == 16
    pool.clear()
    pool.check_invariants()
    assert views(pool, Shelf()) == ((3, 0, 0, 0), (2, 0, 0, 0))
    assert pool.paged.allocate(3) is not None
    with pytest.raises(StaleHandle):
        pool.table.resolve(handle)


def test_without_arena_planes_the_arena_costs_nothing() -> None:
    pool, shelf = TwoTierPool(plain(4), pages=3, slots=7), Shelf()
    pages = run(pool, shelf, 2)
    assert pool.arena.nbytes == 0
    assert pool.nbytes == pool.paged.nbytes == 4 * pool.geometry.page_bytes
    assert views(pool, shelf) == ((1, 2, 0, 0), (0, 0, 0, 0))
    assert pool.relieve(shelf, slots=100).enough
    assert pool.match_limit(np.array(pages)) == 2


def test_a_pool_is_big_enough_for_somebody() -> None:
    with pytest.raises(ValueError, match="plain: a pool needs at least one page, got 0"):
        TwoTierPool(plain(4), pages=0, slots=1)
    with pytest.raises(ValueError, match="carries 48 bytes of windows and tails"):
        TwoTierPool(windowed(4, 4), pages=1, slots=0)
    with pytest.raises(ValueError, match="one for each that runs; got 2 for 3"):
        TwoTierPool(windowed(4, 4), pages=1, slots=2, running=3)


def test_a_byte_that_nobody_accounts_for_is_found() -> None:
    pool = TwoTierPool(plain(4), pages=3, slots=0)
    pool.table.register("extra", torch.zeros(8, dtype=torch.uint8), 8)
    with pytest.raises(AssertionError, match="nobody accounts for"):
        pool.check_invariants()


requests = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 3), st.booleans()), max_size=30
)


@given(requests)
@settings(max_examples=150, deadline=None)
def test_relief_gives_what_it_promises_and_no_more(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """Cases 1 and 14, at random: requests come, stay or go; the pool is refilled by relief alone."""
    pool, shelf = TwoTierPool(windowed(4, 4), pages=8, slots=3), Shelf()
    for kind, pages, slots, hold in steps:
        before = pool.view(shelf)
        states = set(pool.arena.saved_pages().tolist())
        sealed = set(shelf.pages.tolist())
        relief = pool.relieve(shelf, pages=pages, slots=slots, break_holds=hold)
        spare = before.paged.evictable + (len(sealed) - before.paged.evictable) * hold
        spare -= len(shelf.locked) * hold
        fits = pages <= before.paged.available + spare
        fits &= slots <= before.arena.available + before.arena.evictable
        assert relief.enough == fits
        after = pool.view(shelf)
        gone = set(relief.evicted.tolist())
        assert set(shelf.pages.tolist()) == sealed - gone
        assert len(gone) == (max(0, pages - before.paged.available) if fits else 0)
        assert after.paged.available == before.paged.available + len(gone)
        lost = states - set(pool.arena.saved_pages().tolist())
        assert len(lost) == relief.dropped_states
        assert states & gone <= lost
        if lost - gone:
            assert after.arena.available == slots, "a state too many went"
        if fits and slots and pages <= after.paged.available:
            run(pool, shelf, pages, save=after.arena.available + after.arena.evictable > 1)
        if kind == 0 and shelf.loose:
            shelf.locked.append(shelf.loose.pop())
        elif kind == 1 and shelf.loose:
            shelf.held.append(shelf.loose.pop())
        elif kind == 2:
            shelf.loose += shelf.locked + shelf.held
            shelf.locked, shelf.held = [], []
        pool.check_invariants(shelf, shelf.pages)
