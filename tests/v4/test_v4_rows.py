"""Slots of request rows: restored, kept, given back, and never with another text's state."""

from __future__ import annotations

import numpy as np
import pytest
from v4_model import PAGE, model, poison, storage, tokens

from tessera_sglang.attention.layout import Span, lay_out
from tessera_sglang.v4 import LayerStorage
from tessera_sglang.v4.forward import advance
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
    for turn, row in zip(turns, rows.begin(turns), strict=True):
        ids = tokens(turn.start + turn.tokens, seed)[turn.start :]
        for piece in row.pieces(store, ids):
            advance(model().model, store, [row.request], piece[None])
            rows.save(row)


def test_a_row_keeps_its_slot_until_it_is_released() -> None:
    store = owned(slots=4, running=2)
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
    store = owned(slots=4, running=2)
    rows = Rows(store.pool)
    serve(store, rows, Turn(1, 0, PAGE, pages(7)))
    rows.release([1])
    serve(store, rows, Turn(2, 0, 5, pages(7)), seed=1)
    assert len(store.pool.arena.saved_pages()) == 0
    with pytest.raises(StateMissing):
        rows.begin([Turn(3, PAGE, 5, pages(7, 8))])


def test_states_leave_a_slot_for_every_row_that_may_begin() -> None:
    store = owned(slots=5, running=3)
    rows, arena = Rows(store.pool), store.pool.arena
    for number, page in enumerate((11, 12, 13)):  # the first is the oldest
        serve(store, rows, Turn(1, 0, PAGE, pages(page)), seed=number)
        rows.release([1])
    assert sorted(arena.saved_pages()) == [12, 13]
    rows.awaited = lambda: [12]
    serve(store, rows, Turn(1, 0, PAGE, pages(14)), seed=4)
    assert sorted(arena.saved_pages()) == [12, 14]
    rows.awaited = lambda: [12, 14]
    serve(store, rows, Turn(2, 0, PAGE, pages(15)), seed=5)
    assert sorted(arena.saved_pages()) == [12, 14], "all are counted on: this one is not kept"
    poison(store.pool)
    serve(store, rows, Turn(3, PAGE, 1, pages(12, 3)), seed=1)
    assert (len(rows), arena.available) == (3, 0)
    store.pool.check_invariants()


def test_a_row_with_spans_takes_each_run_in_its_place_and_saves_nothing_behind_it() -> None:
    store = owned(slots=8, running=3)
    rows, arena = Rows(store.pool), store.pool.arena
    serve(store, rows, Turn(1, 0, 2 * PAGE, pages(11, 12)))
    rows.release([1])
    layout = lay_out(
        [Span(150, 150 + 2 * PAGE)],
        prompt_tokens=600,
        page_size=PAGE,
        root_tokens=0,
        linked_pages=1,
    )
    assert layout is not None
    rows.awaited = tuple
    row_pages = pages(12, 1, 2, 3, 4)
    for start, count in ((PAGE, 60), (PAGE + 60, 200), (PAGE + 260, 212)):
        serve(store, rows, Turn(7, start, count, row_pages[: -(-(start + count) // PAGE)], layout))
        (row,) = rows.begin([Turn(7, start + count, 1, row_pages, layout)])
        read = start + count - PAGE > 150 + PAGE
        assert [part.shift for part in row.request.parts] == ([150] if read else [])
        assert (12 in rows._kept()) is not read
    assert {1, 2} <= set(arena.saved_pages()), "pages before the run are anybody's"
    assert not {3, 4} & set(arena.saved_pages())
    arena.drop(pages(12))
    with pytest.raises(StateMissing):
        serve(store, rows, Turn(8, PAGE, 472, pages(12, 5, 6, 7, 8), layout))
    store.pool.check_invariants()


def test_rows_that_begin_inside_a_page_are_refused() -> None:
    with pytest.raises(RuntimeError, match="inside a page of 128"):
        Rows(owned(slots=4, running=2).pool).begin([Turn(1, 70, 1, pages(1))])


def test_a_flush_forgets_everything() -> None:
    store = owned(slots=4, running=2)
    rows = Rows(store.pool)
    serve(store, rows, Turn(1, 0, 200, pages(3, 5)))
    rows.clear()
    assert (len(rows), store.pool.arena.available) == (0, 4)
    store.pool.check_invariants()


def test_a_state_goes_over_to_the_page_that_is_kept() -> None:
    store = owned(slots=6, running=2)
    rows, arena = Rows(store.pool), store.pool.arena
    serve(store, rows, Turn(1, 0, 2 * PAGE, pages(3, 5)))
    serve(store, rows, Turn(2, 0, PAGE, pages(4)))
    arena.hand_over(pages(4, 5, 9), pages(3, 6, 8))
    assert sorted(arena.saved_pages().tolist()) == [3, 4, 6]
    arena.drop(pages(4, 5))
    store.pool.check_invariants()
    rows.release([1, 2])
    serve(store, rows, Turn(3, 2 * PAGE, 1, pages(3, 6, 7)))
