"""The arena: a request reads what it wrote, or what was saved for it, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from geometries import CPU, plain, windowed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tessera_sglang.memory_pool.arena import Arena
from tessera_sglang.memory_pool.geometry import Geometry
from tessera_sglang.memory_pool.handles import RegionTable, StaleHandle
from tessera_sglang.memory_pool.ring import PADDING_ROW, eviction_frontier

PAGES = 12
POISON = -777.0


def arena_of(geometry: Geometry, slots: int, running: int | None = None) -> Arena:
    arena = Arena(
        geometry,
        slots=slots,
        running=slots if running is None else running,
        pages=PAGES,
        table=RegionTable(),
        device=CPU,
    )
    poison(arena)
    return arena


def poison(arena: Arena) -> None:
    """What lies in memory that nobody wrote."""
    for layer, plane in ((1, "window"), (1, "tail")):
        if arena.size:
            arena.tensor(layer, plane).view(torch.float32).fill_(POISON)


def open_slot(arena: Arena) -> int:
    slots = arena.allocate(1)
    assert slots is not None
    return int(slots[0])


def write(
    arena: Arena, slot: int, positions: np.ndarray, values: np.ndarray, plane: str = "window"
) -> None:
    """As a kernel would: all rows, wherever they point."""
    rows = arena.ring(1, plane).write_rows(np.full(len(positions), slot), positions)
    tensor = arena.tensor(1, plane).view(torch.float32)
    tensor[torch.from_numpy(rows)] = torch.from_numpy(values.astype(np.float32))[:, None]


def read(arena: Arena, slot: int, positions: np.ndarray, plane: str = "window") -> dict[int, float]:
    """Position to value, of those that can be read."""
    rows, readable = arena.ring(1, plane).read_rows(np.full(len(positions), slot), positions)
    values = arena.tensor(1, plane).view(torch.float32)[torch.from_numpy(rows), 0].numpy()
    assert (rows[~readable] == PADDING_ROW).all()
    return dict(zip(positions[readable].tolist(), values[readable].tolist(), strict=True))


def span(start: int, end: int) -> np.ndarray:
    return np.arange(start, end)


# --- windows -------------------------------------------------------------------------------------


def test_a_window_is_its_last_rows() -> None:
    arena = arena_of(windowed(4, 4), 2)
    slot = open_slot(arena)
    for start, end in ((0, 3), (3, 6), (6, 20), (20, 21)):
        write(arena, slot, span(start, end), span(start, end))
        last = range(max(0, end - 4), end)
        assert read(arena, slot, span(-8, end + 8)) == {p: p for p in last}
        arena.check_invariants()


def test_a_step_longer_than_the_window_keeps_its_end_in_any_order() -> None:
    arena = arena_of(windowed(4, 4), 2)
    slot = open_slot(arena)
    order = np.random.default_rng(0).permutation(10)
    write(arena, slot, order, order)
    assert read(arena, slot, span(0, 12)) == {6: 6, 7: 7, 8: 8, 9: 9}


def test_a_position_written_again_has_its_last_value() -> None:
    """Drafted tokens that were refused: what they pushed out is gone, not wrong."""
    arena = arena_of(windowed(4, 4), 1)
    slot = open_slot(arena)
    write(arena, slot, span(0, 8), span(0, 8))
    write(arena, slot, span(5, 7), span(105, 107))
    write(arena, slot, span(3, 4), span(103, 104))
    assert read(arena, slot, span(0, 9)) == {3: 103, 4: 4, 5: 105, 6: 106}


def test_the_window_is_not_shared_by_accident() -> None:
    """Case 11: A and B in one slot, one after the other; C has A's prompt and another end."""
    arena = arena_of(windowed(4, 4), 1)
    a = open_slot(arena)
    write(arena, a, span(0, 16), span(1, 17))
    arena.free(np.array([a]))
    b = open_slot(arena)
    assert b == a
    assert read(arena, b, span(-4, 20)) == {}, "the predecessor's window shows"
    write(arena, b, span(0, 16), span(200, 216))
    arena.free(np.array([b]))
    c = open_slot(arena)
    assert arena.match_limit(span(1, 5)) == 0, "nothing was saved: all is recomputed"
    assert not arena.restore(4, c)
    assert read(arena, c, span(0, 17)) == {}
    write(arena, c, span(0, 17), np.array([*span(1, 17), 99]))
    assert read(arena, c, span(13, 17)) == {13: 14, 14: 15, 15: 16, 16: 99}


def test_a_saved_window_goes_on_in_another_slot() -> None:
    """Case 11: the same with the state saved at the end of A's fourth page."""
    arena = arena_of(windowed(4, 4), 2)
    a = open_slot(arena)
    write(arena, a, span(0, 16), span(1, 17))
    assert arena.save(a, page=4, length=16)
    arena.check_invariants()
    write(arena, a, span(16, 20), span(50, 54))
    arena.free(np.array([a]))
    b = open_slot(arena)
    write(arena, b, span(0, 16), span(200, 216))
    arena.free(np.array([b]))
    poison_free = arena.tensor(1, "window").view(torch.float32)
    poison_free[b * 4 : b * 4 + 4] = POISON
    c = open_slot(arena)
    assert arena.match_limit(np.array([1, 2, 3, 4, 5])) == 4
    assert arena.restore(4, c)
    arena.check_invariants()
    assert read(arena, c, span(0, 20)) == {12: 13, 13: 14, 14: 15, 15: 16}
    write(arena, c, span(16, 17), np.array([99]))
    assert read(arena, c, span(13, 17)) == {13: 14, 14: 15, 15: 16, 16: 99}
    assert arena.restore(4, c), "what goes on from a state does not change it"
    assert read(arena, c, span(0, 20)) == {12: 13, 13: 14, 14: 15, 15: 16}


@pytest.mark.parametrize(
    ("written", "length", "kept"), [(8, 8, True), (9, 8, False), (7, 8, False)]
)
def test_a_state_is_saved_whole_or_not_at_all(written: int, length: int, kept: bool) -> None:
    arena = arena_of(windowed(8, 4), 2)
    slot = open_slot(arena)
    write(arena, slot, span(0, written), span(0, written))
    assert arena.save(slot, 3, length) == kept
    assert arena.saved == kept
    arena.check_invariants()


def test_what_lies_past_the_boundary_is_not_saved() -> None:
    arena = arena_of(windowed(2, 8), 2)
    slot = open_slot(arena)
    write(arena, slot, span(0, 5), span(0, 5))
    assert arena.save(slot, 3, 4)
    arena.free(np.array([slot]))
    slot = open_slot(arena)
    assert arena.restore(3, slot)
    assert read(arena, slot, span(0, 9)) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_group_in_the_making_is_not_restored() -> None:
    arena = arena_of(windowed(4, 4), 3)
    slot, other = open_slot(arena), open_slot(arena)
    write(arena, slot, span(0, 4), span(0, 4))
    arena.ring(1, "tail").write_rows(np.array([other, other]), np.array([8, 9]))
    assert arena.save(slot, 2, 4)
    assert arena.restore(2, other)
    assert not arena.ring(1, "tail").read_rows(np.array([other, other]), np.array([8, 9]))[1].any()
    tail = arena.tensor(1, "tail").view(torch.float32).view(4, 4, 2)
    assert (tail == POISON).all(), "copied although it is empty at a boundary"


def test_requests_in_the_making_are_as_many_as_run() -> None:
    """Saved states do without the planes that are empty at a boundary."""
    arena = arena_of(windowed(4, 4), 9, running=2)
    assert arena.tensor(1, "window").shape == (10 * 4, 4)
    assert arena.tensor(1, "tail").shape == (3 * 4, 8)
    assert arena.nbytes == arena.expected_bytes == 10 * 4 * 4 + 3 * 4 * 8
    assert arena.allocate(3) is None
    slots = [open_slot(arena), open_slot(arena)]
    assert arena.allocate(1) is None
    assert (arena.available, arena.startable, arena.running) == (7, 0, 2)
    for page, slot in enumerate(slots, start=1):
        write(arena, slot, span(0, 4), span(0, 4))
        assert arena.save(slot, page, 4)
    arena.free(np.array(slots))
    arena.check_invariants()
    assert (arena.available, arena.startable, arena.saved) == (7, 2, 2)
    slot = open_slot(arena)
    handle = arena.handle(1, "tail", slot)
    assert handle.length == 32
    assert handle.offset <= 2 * 32, "found by its tail, not by its slot"
    with pytest.raises(StaleHandle):
        arena.handle(1, "tail", 9)


def test_the_least_recently_used_state_makes_room_for_a_new_one() -> None:
    arena = arena_of(windowed(4, 4), 3)
    slot = open_slot(arena)
    write(arena, slot, span(0, 4), span(0, 4))
    assert [arena.save(slot, page, 4) for page in (1, 2, 1, 3)] == [True] * 4
    assert sorted(arena.saved_pages()) == [1, 3]
    others = [slot]
    while (more := arena.allocate(1)) is None:
        assert arena.drop_oldest(1) == 1
    others.append(int(more[0]))
    assert arena.drop_oldest(9) == 1
    others.append(open_slot(arena))
    assert not arena.save(slot, 4, 4), "requests run in all slots"
    arena.free(np.array(others))
    arena.check_invariants()


def test_a_state_that_is_gone_on_from_was_just_used() -> None:
    arena = arena_of(windowed(4, 4), 4)
    slot = open_slot(arena)
    write(arena, slot, span(0, 4), span(0, 4))
    assert all(arena.save(slot, page, 4) for page in (1, 2, 3))
    assert arena.restore(1, slot)
    assert arena.save(slot, 2, 4), "kept already"
    assert [arena.drop_oldest(1), *arena.saved_pages()] == [1, 1, 2]
    assert [arena.drop_oldest(1), *arena.saved_pages()] == [1, 2]


def test_padding_goes_to_the_reserved_slot() -> None:
    """Case 19: a padded batch scatters into slot 0 and nothing can be read from there."""
    arena = arena_of(windowed(4, 4), 2)
    slot = open_slot(arena)
    ring = arena.ring(1, "window")
    rows = ring.write_rows(np.array([slot, 0, 0]), np.array([0, 0, 7]))
    assert rows.tolist() == [slot * 4, PADDING_ROW, PADDING_ROW]
    assert not ring.read_rows(np.array([0, 0]), np.array([0, 7]))[1].any()
    arena.check_invariants()


def test_nobody_writes_or_reads_a_slot_that_no_request_runs_in() -> None:
    arena = arena_of(windowed(4, 4), 3)
    slot = open_slot(arena)
    write(arena, slot, span(0, 4), span(0, 4))
    assert arena.save(slot, 1, 4)
    saved = np.array([2])
    for foreign in (saved, np.array([3])):
        with pytest.raises(AssertionError, match="no request runs in"):
            arena.ring(1, "window").write_rows(foreign, np.array([4]))
        with pytest.raises(AssertionError, match="no request runs in"):
            arena.ring(1, "window").read_rows(foreign, np.array([3]))
        with pytest.raises(AssertionError, match="no request runs in"):
            arena.free(foreign)
        with pytest.raises(AssertionError, match="no request runs in"):
            arena.restore(1, int(foreign[0]))


def test_rows_without_a_window_slot_free_nothing() -> None:
    """Case 13: three rows of the window and two that are not there."""
    arena = arena_of(windowed(4, 4), 2)
    slot = open_slot(arena)
    write(arena, slot, span(0, 5), span(0, 5))
    ring = arena.ring(1, "window")
    assert ring.forget(np.full(5, slot), np.array([0, 1, 2, 3, 9])) == 3
    assert read(arena, slot, span(0, 9)) == {4: 4}
    arena.check_invariants()


def test_pages_without_a_state_free_nothing() -> None:
    """Case 13: three pages with a saved state and two without."""
    arena = arena_of(windowed(4, 4), 5)
    slot = open_slot(arena)
    for page in (1, 2, 3):
        write(arena, slot, span(4 * page - 4, 4 * page), span(0, 4))
        assert arena.save(slot, page, 4 * page)
    assert arena.available == 1
    assert arena.drop(np.array([1, 2, 3, 7, 8])) == 3
    assert arena.available == 4
    assert arena.drop(np.array([1, 2, 3])) == 0
    arena.check_invariants()


@pytest.mark.parametrize(
    ("length", "window", "page_tokens", "frontier"),
    [(20, 4, 8, 8), (16, 4, 8, 8), (15, 4, 8, 0), (8, 4, 8, 0), (0, 4, 8, 0)]
    + [(40, 12, 8, 24), (41, 16, 8, 24), (48, 16, 8, 32), (500, 128, 128, 256)],
)
def test_the_frontier_holds_back_window_and_page(
    length: int, window: int, page_tokens: int, frontier: int
) -> None:
    """Case 12: P=8, W=4, length 20 gives 8."""
    assert eviction_frontier(length, window=window, page_tokens=page_tokens) == frontier


def test_the_frontier_never_takes_the_window_nor_the_last_page() -> None:
    """Case 12."""
    for page_tokens in range(1, 9):
        for window in range(1, 20):
            for length in range(70):
                found = eviction_frontier(length, window=window, page_tokens=page_tokens)
                last_page = (length - 1) // page_tokens * page_tokens
                assert found % page_tokens == 0
                assert found == 0 or found <= min(length - window, last_page)


def test_without_arena_planes_nothing_is_allocated() -> None:
    table = RegionTable()
    arena = Arena(plain(4), slots=9, running=9, pages=PAGES, table=table, device=CPU)
    assert (arena.nbytes, arena.size, len(table)) == (0, 0, 0)
    slots = arena.allocate(100)
    assert slots is not None
    assert not slots.any()
    assert arena.save(0, 3, 8)
    assert arena.restore(3, 0)
    assert arena.match_limit(span(1, 6)) == 5
    assert arena.drop(span(1, 6)) == arena.drop_oldest(3, span(0, 0)) == 0
    arena.free(slots)
    arena.clear()
    arena.check_invariants()


def test_a_flush_empties_the_arena() -> None:
    table = RegionTable()
    arena = Arena(windowed(4, 4), slots=3, running=3, pages=PAGES, table=table, device=CPU)
    slot = open_slot(arena)
    write(arena, slot, span(0, 4), span(0, 4))
    assert arena.save(slot, 1, 4)
    handle = arena.handle(1, "window", slot)
    assert table.resolve(handle).view(torch.float32).tolist() == [0, 1, 2, 3]
    arena.clear()
    arena.check_invariants()
    assert arena.available == 3
    again = open_slot(arena)
    assert read(arena, again, span(0, 4)) == {}
    with pytest.raises(StaleHandle):
        table.resolve(handle)


# --- against a model -----------------------------------------------------------------------------

WINDOW, TAIL, PAGE, SLOTS, RUNNING = 5, 4, 4, 5, 3


class ArenaMachine(RuleBasedStateMachine):
    """Requests that write, go on, and save; the model is a dict of positions per owner."""

    pages = st.integers(1, SLOTS + 1)

    def __init__(self) -> None:
        super().__init__()
        self.arena = arena_of(windowed(PAGE, WINDOW), SLOTS, RUNNING)
        self.running: dict[int, dict[int, float]] = {}  # slot -> position -> value
        self.tails: dict[int, dict[int, float]] = {}  # the same of the plane that is never saved
        self.lengths: dict[int, int] = {}
        self.saved: dict[int, tuple[int, dict[int, float]]] = {}  # page -> length, window; by use
        self.value = 0.0

    def pick(self, number: int) -> int | None:
        return list(self.running)[number % len(self.running)] if self.running else None

    @rule()
    def start(self) -> None:
        slots = self.arena.allocate(1)
        full = len(self.running) == RUNNING or len(self.running) + len(self.saved) == SLOTS
        assert (slots is None) == full
        if slots is not None:
            self.running[int(slots[0])] = {}
            self.tails[int(slots[0])] = {}
            self.lengths[int(slots[0])] = 0

    @rule(number=st.integers(0, 9), tokens=st.integers(1, 12))
    def step(self, number: int, tokens: int) -> None:
        self.extend(number, tokens)

    def extend(self, number: int, tokens: int) -> None:
        slot = self.pick(number)
        if slot is None:
            return
        positions = span(self.lengths[slot], self.lengths[slot] + tokens)
        values = self.value + 1 + np.arange(tokens)
        self.value += tokens
        written = dict(zip(positions.tolist(), values.tolist(), strict=True))
        self.lengths[slot] += tokens
        for plane, owners, rows in (("window", self.running, WINDOW), ("tail", self.tails, TAIL)):
            write(self.arena, slot, positions, values, plane)
            first = self.lengths[slot] - rows
            owners[slot] = {p: v for p, v in (owners[slot] | written).items() if p >= first}

    @rule(number=st.integers(0, 9), page=pages, fill=st.booleans())
    def save(self, number: int, page: int, fill: bool) -> None:
        """At the last boundary, which may have been left behind; ``fill`` goes to the next first."""
        slot = self.pick(number)
        if slot is None:
            return
        if fill:
            self.extend(number, PAGE - self.lengths[slot] % PAGE)
        length = self.lengths[slot] // PAGE * PAGE
        if not length:
            return
        needed = {p: self.running[slot].get(p) for p in range(max(0, length - WINDOW), length)}
        kept = self.arena.save(slot, page, length)
        if page in self.saved:
            assert kept
            self.saved[page] = self.saved.pop(page)
        else:
            assert kept == (None not in needed.values())
            if kept:
                if len(self.running) + len(self.saved) == SLOTS:
                    del self.saved[next(iter(self.saved))]
                self.saved[page] = (length, {p: v for p, v in needed.items() if v is not None})

    @rule(number=st.integers(0, 9), page=pages)
    def restore(self, number: int, page: int) -> None:
        slot = self.pick(number)
        if slot is None:
            return
        assert self.arena.restore(page, slot) == (page in self.saved)
        if page in self.saved:
            self.saved[page] = self.saved.pop(page)
            self.lengths[slot], window = self.saved[page]
            self.running[slot], self.tails[slot] = dict(window), {}

    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        slot = self.pick(number)
        if slot is not None:
            self.arena.free(np.array([slot]))
            self.arena.tensor(1, "window").view(torch.float32).view(-1, WINDOW)[slot] = POISON
            del self.running[slot], self.tails[slot], self.lengths[slot]

    @rule(pages=st.sets(pages))
    def evict(self, pages: set[int]) -> None:
        gone = pages & self.saved.keys()
        assert self.arena.drop(np.array(sorted(pages), dtype=np.int64)) == len(gone)
        for page in gone:
            del self.saved[page]

    @rule(states=st.integers(0, SLOTS), keep=st.sets(pages))
    def relieve(self, states: int, keep: set[int]) -> None:
        kept = np.array(sorted(keep), dtype=np.int64)
        oldest = [page for page in self.saved if page not in keep]
        assert self.arena.droppable(kept) == len(oldest)
        assert self.arena.drop_oldest(states, kept) == min(states, len(oldest))
        for page in oldest[:states]:
            del self.saved[page]

    @invariant()
    def everyone_reads_their_own(self) -> None:
        self.arena.check_invariants()
        assert self.arena.saved == len(self.saved)
        assert self.arena.running == len(self.running)
        assert sorted(self.arena.saved_pages()) == sorted(self.saved)
        everything = span(-WINDOW, max(self.lengths.values(), default=0) + 2 * WINDOW)
        for slot, window in self.running.items():
            assert read(self.arena, slot, everything) == window
            assert read(self.arena, slot, everything, "tail") == self.tails[slot]


@pytest.mark.parametrize(
    "examples", [100, pytest.param(2000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_every_request_reads_its_own_window(examples: int) -> None:
    """Case 11, at random."""
    profile = settings(max_examples=examples, stateful_step_count=40, deadline=None, database=None)
    run_state_machine_as_test(ArenaMachine, settings=profile)
