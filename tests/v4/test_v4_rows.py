"""Slots of request rows: restored, kept, given back, and never with another text's state."""

from __future__ import annotations

import numpy as np
import pytest
from v4_model import PAGE, model, poison, storage, tokens

from tessera_sglang.v4 import LayerStorage
from tessera_sglang.v4.forward import advance, cut
from tessera_sglang.v4.parts import StateMissing
from tessera_sglang.v4_serving.rows import Rows, Turn


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def owned(count: int = 16, **sizes: int) -> LayerStorage:
    """A pool whose pages are all somebody else's to hand out."""
    store = storage(pages=count, **sizes)  # type: ignore[arg-type]
    store.pool.paged.allocate(count)
    return store


def serve(store: LayerStorage, rows: Rows, *turns: Turn, seed: int = 0) -> None:
    """What the model class does, without its logits."""
    for turn, request in zip(turns, rows.begin(turns), strict=True):
        ids = tokens(turn.start + turn.tokens, seed)[turn.start :]
        for piece in cut(ids, turn.start, PAGE):
            advance(model().model, store, [request], piece[None])
            if request.length % PAGE == 0:
                assert request.save()


def test_a_row_keeps_its_slot_until_it_is_released() -> None:
    store = owned(slots=4)
    rows = Rows(store.pool)
    serve(store, rows, Turn(1, 0, 200, pages(3, 5)))
    serve(store, rows, Turn(1, 200, 1, pages(3, 5)))
    assert (len(rows), store.pool.arena.running) == (1, 1)
    rows.release([1, 2])
    assert (len(rows), store.pool.arena.running) == (0, 0)
    assert store.pool.arena.saved_pages().tolist() == [3]
    serve(store, rows, Turn(1, PAGE, 30, pages(3, 9)))
    with pytest.raises(RuntimeError, match=r"row 1 goes on at 150 tokens, .* stands at 158"):
        rows.begin([Turn(1, 150, 1, pages(3, 9))])
    store.pool.check_invariants()


def test_a_page_that_is_written_anew_loses_its_state() -> None:
    """Its row was aborted, and SGLang gave the page to another row."""
    store = owned(slots=4)
    rows = Rows(store.pool)
    serve(store, rows, Turn(1, 0, PAGE, pages(7)))
    rows.release([1])
    serve(store, rows, Turn(2, 0, 5, pages(7)), seed=1)
    assert len(store.pool.arena.saved_pages()) == 0
    with pytest.raises(StateMissing):
        rows.begin([Turn(3, PAGE, 5, pages(7, 8))])


def test_a_new_row_does_not_take_the_state_that_another_one_begins_from() -> None:
    store = owned(slots=4, running=3)
    rows = Rows(store.pool)
    for number, page in enumerate((11, 12, 13)):  # the first is the oldest
        serve(store, rows, Turn(1, 0, PAGE, pages(page)), seed=number)
        rows.release([1])
    serve(store, rows, Turn(9, 0, 1, pages(1)))
    assert store.pool.arena.available == 0
    poison(store.pool)
    serve(
        store,
        rows,
        Turn(2, 0, 1, pages(2)),
        Turn(3, PAGE, 1, pages(11, 3)),
    )
    assert 11 in store.pool.arena.saved_pages()
    store.pool.check_invariants()


def test_rows_that_begin_inside_a_page_are_refused() -> None:
    with pytest.raises(RuntimeError, match="inside a page of 128"):
        Rows(owned(slots=4).pool).begin([Turn(1, 70, 1, pages(1))])


def test_a_flush_forgets_everything() -> None:
    store = owned(slots=4)
    rows = Rows(store.pool)
    serve(store, rows, Turn(1, 0, 200, pages(3, 5)))
    rows.clear()
    assert (len(rows), store.pool.arena.available) == (0, 4)
    store.pool.check_invariants()


def test_a_state_goes_over_to_the_page_that_is_kept() -> None:
    store = owned(slots=6)
    rows, arena = Rows(store.pool), store.pool.arena
    serve(store, rows, Turn(1, 0, 2 * PAGE, pages(3, 5)))
    serve(store, rows, Turn(2, 0, PAGE, pages(4)))
    arena.hand_over(pages(4, 5, 9), pages(3, 6, 8))
    assert sorted(arena.saved_pages().tolist()) == [3, 4, 6]
    arena.drop(pages(4, 5))
    store.pool.check_invariants()
    rows.release([1, 2])
    serve(store, rows, Turn(3, 2 * PAGE, 1, pages(3, 6, 7)))
