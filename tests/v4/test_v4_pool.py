"""Requests that share one pool: they come, go on from each other's pages, and give both tiers back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from v4_engine import Engine
from v4_model import PAGE, TOLERANCE, Twin, opened, shuffled, storage, tokens

from tessera_sglang.memory_pool.ring import eviction_frontier

TRUNK = tokens(3 * PAGE, seed=40)
BRANCHES = [tokens(2 * PAGE, seed=seed) for seed in range(41, 45)]


def prompt(random: np.random.Generator) -> torch.Tensor:
    """Shares a page to five with others, or none."""
    trunk = TRUNK[: PAGE * int(random.integers(0, 4))]
    branch = BRANCHES[random.integers(4)][: int(random.integers(100, 2 * PAGE))]
    return torch.cat([trunk, branch, tokens(int(random.integers(1, 30)), int(random.integers(99)))])


@pytest.mark.parametrize("seed", [0, 1])
def test_requests_come_and_go_at_random(seed: int) -> None:
    """Too few pages and slots for all: what is short is relieved, and every logit stays right."""
    engine, random = Engine(storage(pages=8, slots=5, running=3)), shuffled(seed)
    for _ in range(90):
        choice = random.random()
        if choice < 0.3 or not engine.running:
            engine.start(prompt(random))
        else:
            one = engine.running[random.integers(len(engine.running))]
            if choice > 0.95:
                engine.finish(one, publish=False)  # aborted
            elif not engine.step(one):
                engine.finish(one)
        engine.check()
    while engine.running:
        if not engine.step(engine.running[0]):
            engine.finish(engine.running[0])
        engine.check()
    counts = (engine.hit_pages, engine.evicted, engine.dropped, engine.refused)
    assert min(counts) > 0, counts


def test_interleaved_requests_do_not_see_each_other() -> None:
    """Case 11: equal ids at the same positions in three slots, and then other ids in the same slots."""
    store = storage(pages=14, slots=3)
    for turn in range(2):
        prompts = [tokens(length, seed=50 + turn + length) for length in (390, 135, 262)]
        twins = [opened(Twin.open(store)) for _ in prompts]
        fed = [0] * len(twins)
        while any(done < len(ids) for done, ids in zip(fed, prompts, strict=True)):
            for place, (twin, ids) in enumerate(zip(twins, prompts, strict=True)):
                piece = ids[fed[place] : fed[place] + 31 + 20 * place]
                if len(piece):
                    assert twin.feed(piece) <= TOLERANCE
                    fed[place] += len(piece)
        store.pool.check_invariants()
        for twin in twins:
            store.pool.free(twin.close())
        assert store.pool.paged.available == 14
        assert store.pool.arena.available == 3


def test_no_room_in_the_arena_refuses_the_one_who_asks() -> None:
    store = storage(slots=2)
    assert opened(Twin.open(store)).request.slot != opened(Twin.open(store)).request.slot
    assert Twin.open(store) is None
    store.pool.check_invariants()


def test_no_room_in_the_pages_changes_nothing() -> None:
    store = storage(pages=2)
    request = opened(Twin.open(store)).request
    assert request.reserve(PAGE + 1)
    assert not request.reserve(2 * PAGE + 1)
    assert (len(request.pages), store.pool.paged.available) == (2, 0)


# --- cases 12 to 14 at V4's geometry -------------------------------------------------------------


def test_the_frontier_of_a_v4_window() -> None:
    """Case 12: page and window are both 128; the last page is never all evicted."""
    geometry = storage().pool.geometry
    window = geometry.layers[0].plane("window").rows
    frontier = {
        length: eviction_frontier(length, window=window, page_tokens=geometry.page_tokens)
        for length in (128, 129, 255, 256, 257, 500, 1024)
    }
    assert frontier == {128: 0, 129: 0, 255: 0, 256: 128, 257: 128, 500: 256, 1024: 896}


def test_rows_that_left_the_window_free_nothing() -> None:
    """Case 13: of three rows that are there and two that are not, three are freed."""
    store = storage()
    twin = opened(Twin.open(store))
    twin.feed(tokens(200, seed=60))
    ring, slot = store.pool.arena.ring(0, "window"), twin.request.slot
    assert ring.forget(np.full(5, slot), np.array([199, 0, 150, 71, 72])) == 3
    assert store.pool.arena.available + store.pool.arena.running == store.pool.arena.size
    store.pool.check_invariants()


def test_the_tier_that_is_short_is_relieved() -> None:
    """Case 14: slots full of states, pages free. A state goes and no page does."""
    engine = Engine(storage(pages=20, slots=4, running=2))
    ids = tokens(3 * PAGE + 40, seed=61)
    first = engine.start(ids)
    assert first is not None
    while engine.step(first):
        pass
    engine.finish(first)
    assert engine.store.pool.arena.saved == 3
    others = [engine.start(tokens(60, seed=seed)) for seed in (62, 63)]
    assert None not in others
    assert (engine.dropped, engine.evicted) == (1, 0)
    assert engine.start(ids) is None, "two run already: only the one who does not fit is refused"
    assert engine.store.pool.arena.saved == 2
    for other in others:
        engine.finish(other)
    again = engine.start(torch.cat([ids[: 2 * PAGE], tokens(50, seed=64)]))
    assert again is not None
    assert again.hit_pages == 2
    while engine.step(again):
        pass
    engine.check()


def test_short_of_pages_takes_the_states_along() -> None:
    """Case 14, the other way round: pages short, slots free."""
    engine = Engine(storage(pages=4, slots=9, running=2))
    first = engine.start(tokens(3 * PAGE, seed=65))
    assert first is not None
    while engine.step(first):
        pass
    engine.finish(first)
    second = engine.start(tokens(2 * PAGE + 5, seed=66))
    assert second is not None
    while engine.step(second):
        pass
    assert second.twin.request.length == 2 * PAGE + 5
    assert (engine.evicted, engine.dropped) == (2, 2)
    engine.check()
