"""Going on from a page boundary (case 11), and that each part of the state is needed for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from v4_model import (
    PAGE,
    TOLERANCE,
    Twin,
    difference,
    model,
    opened,
    own_cache,
    pieces,
    poison,
    reference,
    slot_rows,
    storage,
    tokens,
)

from tessera_sglang.memory_pool.paged import PageIds
from tessera_sglang.v4 import LayerStorage, Request, Work, run
from tessera_sglang.v4.parts import StateMissing

PROMPT, ANSWER = 8 * PAGE, 6
IDS = tokens(PROMPT + ANSWER, seed=20)
CSA_LAYERS, HCA_LAYERS, ALL_LAYERS = (1, 3), (2,), (0, 1, 2, 3)


def parts(start: int) -> list[torch.Tensor]:
    """What comes behind ``start``: the prompt page by page, then token by token."""
    return pieces(IDS[start:PROMPT], PAGE) * (start < PROMPT) + pieces(IDS[PROMPT:], 1)


@functools.cache
def uninterrupted() -> torch.Tensor:
    past = own_cache()
    return torch.cat([reference(piece, past) for piece in parts(0)])


def go_on(store: LayerStorage, request: Request, pieces_left: list[torch.Tensor]) -> torch.Tensor:
    assert request.reserve(sum(len(piece) for piece in pieces_left))
    return torch.cat([run(model(), store, [Work(request, piece)])[0] for piece in pieces_left])


def donated(store: LayerStorage) -> tuple[PageIds, int]:
    """Pages of the prompt, each with its saved state, and the slot in which they were computed.

    The slot is another request's by then, and whatever nobody owns is NaN.
    """
    donor = opened(Twin.open(store)).request
    logits = []
    for piece in parts(0):
        assert donor.reserve(len(piece))
        logits += run(model(), store, [Work(donor, piece)], save_every_tokens=PAGE)
    assert difference(torch.cat(logits), uninterrupted()) <= TOLERANCE
    slot, pages = donor.slot, donor.close()
    poison(store.pool)
    stranger = Request.open(store.pool)
    assert stranger is not None
    assert stranger.slot == slot
    go_on(store, stranger, [tokens(150, seed=99)])
    store.pool.paged.free(pages[PROMPT // PAGE :])
    return pages[: PROMPT // PAGE], slot


def test_a_prefix_is_restored_at_every_page_boundary() -> None:
    """Case 11: another slot, poisoned; equal to the run that was never interrupted."""
    store = storage(pages=24, slots=11)
    pages, slot = donated(store)
    for boundary in range(1, len(pages) + 1):
        request = Request.open(store.pool, pages[:boundary])
        assert request is not None
        assert request.slot != slot
        length = boundary * PAGE
        assert request.length == length
        found = go_on(store, request, parts(length))
        assert difference(found, uninterrupted()[length:]) <= TOLERANCE, f"from {length} on"
        store.pool.check_invariants()
        store.pool.free(request.close())
        poison(store.pool)
    assert sorted(store.pool.arena.saved_pages()) == sorted(pages), "reading used nothing up"


def test_two_requests_go_on_from_one_page_in_one_pass() -> None:
    store = storage(pages=24, slots=11)
    pages, _ = donated(store)
    requests = [Request.open(store.pool, pages[:5]) for _ in range(2)]
    tails = [tokens(30, seed=seed) for seed in (31, 32)]
    work = []
    for request, ids in zip(requests, tails, strict=True):
        assert request is not None
        assert request.reserve(len(ids))
        work.append(Work(request, ids))
    found = run(model(), store, work)
    past = own_cache()
    reference(IDS[: 5 * PAGE].expand(2, -1), past)
    for mine, theirs in zip(found, reference(torch.stack(tails), past), strict=True):
        assert difference(mine, theirs) <= TOLERANCE
    store.pool.check_invariants()


def test_a_page_without_a_state_is_not_gone_on_from() -> None:
    store = storage(pages=24, slots=11)
    pages, _ = donated(store)
    store.pool.arena.drop(pages[4:6])
    running = store.pool.arena.running
    with pytest.raises(StateMissing, match=rf"page {pages[5]}: go on from the last of the 6 pages"):
        Request.open(store.pool, pages[:6])
    assert store.pool.arena.running == running, "the slot was given back"
    assert store.pool.match_limit(pages[:6]) == 4
    request = Request.open(store.pool, pages[:4])
    assert request is not None
    found = go_on(store, request, parts(4 * PAGE))
    assert difference(found, uninterrupted()[4 * PAGE :]) <= TOLERANCE


def test_pages_of_two_blocks_are_gone_on_from_as_well() -> None:
    """SGLang's own V4 pages have 256 tokens."""
    store = storage(pages=6, slots=4, page_tokens=2 * PAGE)
    donor = opened(Twin.open(store)).request
    assert donor.reserve(4 * PAGE)
    for piece in parts(0)[:4]:
        run(model(), store, [Work(donor, piece)], save_every_tokens=2 * PAGE)
    pages = donor.close()
    poison(store.pool)
    assert sorted(store.pool.arena.saved_pages()) == sorted(pages)
    for boundary in (1, 2):
        request = Request.open(store.pool, pages[:boundary])
        assert request is not None
        length = boundary * 2 * PAGE
        found = go_on(store, request, parts(length)[:3])
        assert difference(found, uninterrupted()[length : length + 3 * PAGE]) <= TOLERANCE
        store.pool.free(request.close())
        store.pool.check_invariants()


# --- each part is needed -------------------------------------------------------------------------

Loss = Callable[[LayerStorage, Request], None]


def rows_lost(plane: str, layers: tuple[int, ...], region: str) -> Loss:
    """What a request reads that never had this part."""

    def lose(store: LayerStorage, request: Request) -> None:
        for layer in layers:
            rows = slot_rows(store, layer, plane, region, request.slot)
            rows[:] = 0

    return lose


def entries_lost(plane: str, layers: tuple[int, ...]) -> Loss:
    def lose(store: LayerStorage, request: Request) -> None:
        last = request.pages[request.length // PAGE - 1]
        for layer in layers:
            store.pool.paged.tensor(layer, plane)[last] = 0

    return lose


WHOLE_PAGES: dict[str, Loss] = {
    "window content": rows_lost("window", ALL_LAYERS, "content"),
    "window rope": rows_lost("window", ALL_LAYERS, "rope"),
    "CSA overlap, series": rows_lost("overlap", CSA_LAYERS, "series"),
    "CSA overlap, gate": rows_lost("overlap", CSA_LAYERS, "gate"),
    "indexer overlap, series": rows_lost("index_overlap", CSA_LAYERS, "series"),
    "indexer overlap, gate": rows_lost("index_overlap", CSA_LAYERS, "gate"),
    "CSA entries": entries_lost("entries", CSA_LAYERS),
    "HCA entry": entries_lost("entries", HCA_LAYERS),
    "indexer keys": entries_lost("index", CSA_LAYERS),
}
INSIDE_A_GROUP: dict[str, Loss] = {
    "CSA buffer, series": rows_lost("tail", CSA_LAYERS, "series"),
    "CSA buffer, gate": rows_lost("tail", CSA_LAYERS, "gate"),
    "indexer buffer, series": rows_lost("index_tail", CSA_LAYERS, "series"),
    "indexer buffer, gate": rows_lost("index_tail", CSA_LAYERS, "gate"),
    "HCA buffer, series": rows_lost("tail", HCA_LAYERS, "series"),
    "HCA buffer, gate": rows_lost("tail", HCA_LAYERS, "gate"),
}
BOUNDARY = 4
AFTER = tokens(PAGE + 6, seed=21)


@functools.cache
def shared_pages() -> tuple[LayerStorage, PageIds]:
    store = storage(pages=24, slots=11)
    return store, donated(store)[0]


def at_boundary(extra: torch.Tensor) -> tuple[LayerStorage, Request]:
    """A request that goes on from the fourth page and takes some tokens more."""
    store, pages = shared_pages()
    request = Request.open(store.pool, pages[:BOUNDARY])
    assert request is not None
    if len(extra):
        go_on(store, request, [extra])
    return store, request


def answers(extra: torch.Tensor, lose: Loss | None) -> torch.Tensor:
    store, request = at_boundary(extra)
    kept = {
        (layer, plane): store.pool.paged.tensor(layer, plane).clone()
        for layer, plane in (
            (1, "entries"),
            (1, "index"),
            (2, "entries"),
            (3, "entries"),
            (3, "index"),
        )
    }
    if lose is not None:
        lose(store, request)
    found = go_on(store, request, [AFTER[:PAGE], *pieces(AFTER[PAGE:], 1)])
    store.pool.free(request.close())
    for (layer, plane), rows in kept.items():
        store.pool.paged.tensor(layer, plane).copy_(rows)
    return found


NOTHING, ODD = tokens(0), tokens(67, seed=22)  # 67: a CSA group of 3 and an HCA group of 67


@pytest.mark.parametrize("lost", WHOLE_PAGES)
def test_at_a_boundary_nothing_can_be_left_out(lost: str) -> None:
    """The test that would fail if a part of the state were not saved, or not restored."""
    whole = answers(NOTHING, None)
    assert difference(answers(NOTHING, None), whole) == 0, "the part, and not chance"
    assert difference(answers(NOTHING, WHOLE_PAGES[lost]), whole) > 100 * TOLERANCE


@pytest.mark.parametrize("lost", INSIDE_A_GROUP)
def test_inside_a_group_its_tokens_are_needed(lost: str) -> None:
    assert difference(answers(ODD, INSIDE_A_GROUP[lost]), answers(ODD, None)) > 100 * TOLERANCE


@pytest.mark.parametrize("lost", INSIDE_A_GROUP)
def test_at_a_boundary_groups_in_the_making_are_empty(lost: str) -> None:
    """Why they are never saved: what they hold there is not read."""

    def fill(store: LayerStorage, request: Request) -> None:
        INSIDE_A_GROUP[lost](store, request)
        for layer, plane in (
            (1, "tail"),
            (1, "index_tail"),
            (2, "tail"),
            (3, "tail"),
            (3, "index_tail"),
        ):
            for region in ("series", "gate"):
                slot_rows(store, layer, plane, region, request.slot)[:] = float("nan")

    assert difference(answers(NOTHING, fill), answers(NOTHING, None)) == 0


@pytest.mark.parametrize("plane", ["window", "overlap", "index_overlap"])
def test_a_state_that_was_not_restored_is_missed_and_not_read(plane: str) -> None:
    """The tags: stale bytes of whoever had the slot are no state."""
    store, request = at_boundary(NOTHING)
    ring = store.pool.arena.ring(1, plane)
    positions = np.arange(request.length - ring.plane.rows, request.length)
    assert ring.forget(np.full(len(positions), request.slot), positions) == len(positions)
    assert request.reserve(8)
    with pytest.raises(StateMissing, match=f"does not hold '{plane}'"):
        run(model(), store, [Work(request, AFTER[:8])])
    store.pool.free(request.close())
    store.pool.check_invariants()


@pytest.mark.parametrize("entries", [-1, 1])
def test_a_wrong_count_of_entries_is_missed(entries: int) -> None:
    """Counts are not stored: they are the length, and the window's tags know that."""
    store, request = at_boundary(NOTHING)
    request.length += entries * PAGE
    assert request.reserve(8)
    with pytest.raises(StateMissing, match="does not hold"):
        run(model(), store, [Work(request, AFTER[:8])])
    request.length -= entries * PAGE
    store.pool.free(request.close())


def test_a_request_behind_a_prefix_starts_there() -> None:
    """Started at position 0 over the same pages it would answer something else."""
    store, pages = shared_pages()
    fresh = Request.open(store.pool)
    assert fresh is not None
    found = go_on(store, fresh, [AFTER[:PAGE], *pieces(AFTER[PAGE:], 1)])
    assert difference(found, answers(NOTHING, None)) > 100 * TOLERANCE
    store.pool.free(fresh.close())
    store.pool.check_invariants(sealed=pages)
