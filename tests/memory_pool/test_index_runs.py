"""Runs: what cutting and trimming them must not change, and what they cost."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from index_helpers import chain, evict, find, hit, mark, match, pages, publish, sizes, store

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import xxh3_128

PAGE = 4


@pytest.fixture
def index() -> ContentIndex:
    """One run of six pages, 1 .. 6."""
    index = ContentIndex(PAGE)
    store(index, range(24), range(1, 7))
    return index


def lengths(index: ContentIndex) -> list[int]:
    index.check_invariants()
    return sorted(run.page_count for run in index.runs())


# --- cuts ----------------------------------------------------------------------------------------


def test_a_run_is_cut_where_a_path_ends(index: ContentIndex) -> None:
    assert lengths(index) == [6]
    assert hit(index, range(24)) == [1, 2, 3, 4, 5, 6]
    assert lengths(index) == [6]
    assert hit(index, range(16)) == [1, 2, 3, 4]
    assert lengths(index) == [2, 4]
    store(index, [*range(12), *range(50, 54)], [1, 2, 3, 9])
    assert lengths(index) == [1, 1, 2, 3]
    assert hit(index, range(24)) == [1, 2, 3, 4, 5, 6]


def test_a_lock_that_was_taken_before_a_cut_counts_behind_it(index: ContentIndex) -> None:
    path = find(index, range(24))
    assert index.lock(path) == 6
    start = find(index, range(8))
    assert sizes(index) == (6, 0, 0)
    assert index.lock(start) == 0
    assert evict(index, 9, break_holds=True) == []
    assert index.unlock(path) == 4
    assert sizes(index) == (2, 0, 4)
    assert index.unlock(start) == 2


def test_a_hold_that_was_taken_before_a_cut_counts_behind_it(index: ContentIndex) -> None:
    path = find(index, range(24))
    index.hold(path)
    start = find(index, range(8))
    index.hold(start)
    assert sizes(index) == (0, 6, 0)
    index.release(path)
    assert sizes(index) == (0, 2, 4)
    assert evict(index, 9) == [6, 5, 4, 3]
    assert index.intact(start)
    index.release(start)
    assert sizes(index) == (0, 0, 2)


def test_a_path_reads_the_same_pages_however_often_it_is_cut(index: ContentIndex) -> None:
    whole = find(index, range(24))
    parts = [index.path(match(index, range(24)).segments(first)) for first in range(7)]
    cut = random.Random(1)
    for pages_left in cut.sample(range(1, 6), 5):
        hit(index, range(24), pages_left * PAGE)
        assert pages(whole) == [1, 2, 3, 4, 5, 6]
        assert [pages(part) for part in parts] == [[*range(first, 7)] for first in range(1, 8)]
        assert index.intact(whole)
        assert len(whole) == 6
    assert lengths(index) == [1] * 6


def test_a_cut_moves_nothing_in_the_order_of_eviction(index: ContentIndex) -> None:
    store(index, range(100, 108), [11, 12])
    path = find(index, range(24), 16)  # the first four pages are used now, the last two are not
    index.lock(path)
    assert evict(index, 9) == [6, 5, 12, 11]
    index.unlock(path)
    assert evict(index, 9) == [4, 3, 2, 1]


# --- trims ---------------------------------------------------------------------------------------


def test_releasing_what_was_trimmed_changes_nothing(index: ContentIndex) -> None:
    path = find(index, range(24))
    index.hold(path)
    assert evict(index, 2, break_holds=True) == [6, 5]
    assert sizes(index) == (0, 0, 4)
    again = find(index, range(24))
    index.hold(again)
    for _ in range(2):
        index.release(path)
        assert sizes(index) == (0, 4, 0)
    index.release(again)
    assert sizes(index) == (0, 0, 4)


def test_what_grows_behind_a_trimmed_run_is_not_what_was_there(index: ContentIndex) -> None:
    path = find(index, range(24))
    assert evict(index, 2) == [6, 5]
    assert not index.intact(path)
    store(index, range(24), [1, 2, 3, 4, 15, 16])
    assert not index.intact(path)
    assert hit(index, range(24)) == [1, 2, 3, 4, 15, 16]
    assert lengths(index) == [2, 4]


def test_trimming_page_by_page_is_trimming_at_once(index: ContentIndex) -> None:
    assert [evict(index, 1) for _ in range(7)] == [[6], [5], [4], [3], [2], [1], []]
    assert lengths(index) == []


# --- memory --------------------------------------------------------------------------------------


def test_a_trimmed_run_lets_its_tokens_go() -> None:
    index = ContentIndex(64)
    tokens = np.arange(64 * 4096)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index.publish(index.chain(b"root", tokens), np.arange(4096))
    full = tracemalloc.get_traced_memory()[0] - before
    assert full > tokens.nbytes
    index.evict(3000)
    assert tracemalloc.get_traced_memory()[0] - before < full / 2
    index.evict(1000)
    assert tracemalloc.get_traced_memory()[0] - before < full / 10
    tracemalloc.stop()


def test_a_cut_run_lets_its_tokens_go() -> None:
    """Whichever part stays."""
    index = ContentIndex(64)
    tokens = np.arange(64 * 4096)
    name = index.chain(b"root", tokens)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index.publish(name, np.arange(4096))
    for pages_left in (64, 1024, 2048, 4000):
        index.match(name, pages_left * 64)
    assert tracemalloc.get_traced_memory()[0] - before < 1.2 * tokens.nbytes
    for kept in (4000, 1024, 64):
        index.evict(index.page_count - kept)
        stored = kept * 64 * 8
        assert tracemalloc.get_traced_memory()[0] - before < 2.2 * stored + 20_000
    tracemalloc.stop()


def test_a_run_keeps_nothing_of_its_publisher(index: ContentIndex) -> None:
    """Neither the row nor the tokens of the request, which go on to change."""
    tokens, row = np.arange(100, 108), np.array([8, 9])
    index.publish(index.chain(b"root", tokens), row)
    tokens[:], row[:] = 0, 0
    found = index.match(index.chain(b"root", np.arange(100, 108)))
    assert pages(index.path(found.segments())) == [8, 9]


# --- costs ---------------------------------------------------------------------------------------


def test_a_run_costs_one_hash() -> None:
    calls = []

    def counting(data: bytes) -> bytes:
        calls.append(len(data))
        return xxh3_128(data)

    def hashes(action: object) -> int:
        calls.clear()
        action()  # type: ignore[operator]
        return len(calls)

    index = ContentIndex(PAGE, hash_function=counting)
    long, longer = range(400), range(800)
    assert hashes(lambda: store(index, long, range(100))) == 2  # not there; its name
    assert hashes(lambda: hit(index, long)) == 1
    assert hashes(lambda: hit(index, longer)) == 2  # what comes behind is not there
    assert hashes(lambda: hit(index, long[:200])) == 2  # a cut names the part below
    assert hashes(lambda: hit(index, long)) == 2
    assert hashes(lambda: hit(index, range(5, 400))) == 1
    assert max(calls) <= 33 + 8 * PAGE, "a hash covers a page and what it hangs below"


@pytest.mark.parametrize("visible_at", [0, 3])
def test_thousands_of_pages_with_equal_tokens_and_other_marks_hang_below_one(
    visible_at: int,
) -> None:
    index, count = ContentIndex(PAGE), 3000
    order = random.Random(2).sample(range(count), count)
    index.lock(store(index, range(4), [count]))
    for number in order:
        publish(index, range(8), [count, number], mark(4 + visible_at, number))
    index.check_invariants()
    for number in order[:100]:
        assert hit(index, range(8), None, mark(4 + visible_at, number)) == [count, number]
    assert hit(index, range(8)) == [count]
    assert evict(index, count) == order[100:] + order[:100]
    index.check_invariants()


def test_a_chain_of_many_marks_is_a_run_for_each() -> None:
    index = ContentIndex(PAGE)
    visible = [mark(at) for at in range(2, 400, 6)]
    path = store(index, range(400), range(100), *visible)
    starts = sorted(run.start for run in index.runs())
    assert starts == sorted({0, *(span.at // PAGE for span in visible)})
    assert all(a < b for a, b in pairwise(starts))
    assert pages(path) == hit(index, range(400), None, *visible) == list(range(100))
    assert hit(index, range(400), None, *visible[:-1]) == list(range(visible[-1].at // PAGE))
    assert index.lock(path) == 100
    assert chain(index, range(400), visible).page_count == 100
    assert index.unlock(path) == 100
    assert evict(index, 100) == list(range(99, -1, -1))
