"""Forks: rows of a sealed page that a request shares, though not the whole page."""

from __future__ import annotations

import random

import pytest
from index_helpers import ROOT, evict, hit, mark, match, pages, publish, short_hash, store

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import VisibleSpan
from tessera_sglang.memory_pool.runs import Fork

PAGE = 8
LONG = list(range(32))


@pytest.fixture
def index() -> ContentIndex:
    """LONG on pages 1 .. 4."""
    index = ContentIndex(PAGE, smallest_fork=1)
    store(index, LONG, [1, 2, 3, 4])
    return index


def fork(
    index: ContentIndex, tokens: list[int], limit: int | None = None, *visible: VisibleSpan
) -> tuple[int, int | None] | None:
    """Rows and physical page that a look-up offers behind its pages."""
    found = match(index, tokens, limit, *visible).fork
    index.check_invariants()
    return None if found is None else (found.rows, found.page_id)


# --- what is offered -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", range(PAGE))
@pytest.mark.parametrize("depth", range(4))
def test_the_rows_that_are_equal_are_offered(index: ContentIndex, depth: int, rows: int) -> None:
    equal = LONG[: depth * PAGE + rows]
    offered = (rows, depth + 1) if rows else None
    for tokens in (equal, [*equal, *[99] * 20]):
        assert hit(index, tokens) == [1, 2, 3, 4][:depth]
        assert fork(index, tokens) == offered
        assert fork(index, tokens) == offered, "as before the cut"


def test_rows_are_offered_from_the_smallest_fork_on() -> None:
    for smallest in range(1, PAGE + 2):
        index = ContentIndex(PAGE, smallest_fork=smallest)
        store(index, LONG, [1, 2, 3, 4])
        for rows in range(PAGE):
            expected = (rows, 2) if rows >= smallest else None
            assert fork(index, [*LONG[: PAGE + rows], 99]) == expected


def test_nothing_is_offered_by_default() -> None:
    index = ContentIndex(PAGE)
    store(index, LONG, [1, 2, 3, 4])
    assert fork(index, LONG[:15]) is None


@pytest.mark.parametrize("smallest", [0, -1])
def test_a_fork_has_at_least_one_row(smallest: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        ContentIndex(PAGE, smallest_fork=smallest)


def test_a_limit_caps_the_rows(index: ContentIndex) -> None:
    """A prompt that is entirely cached: all but the last token are offered."""
    for limit in range(33):
        whole, rows = divmod(limit, PAGE)
        assert fork(index, LONG, limit) == ((rows, whole + 1) if rows else None)


def test_nothing_is_offered_behind_the_end_of_a_chain(index: ContentIndex) -> None:
    assert fork(index, [*LONG, 32, 33]) is None
    assert fork(ContentIndex(PAGE, smallest_fork=1), LONG) is None


def test_the_page_that_shares_most_is_offered() -> None:
    index = ContentIndex(PAGE, smallest_fork=1)
    draw = random.Random(3)
    stored = [[draw.randrange(2) * 256 for _ in range(PAGE)] for _ in range(40)]
    ids = {tuple(page): number for number, page in enumerate(stored)}
    for page, number in ids.items():
        store(index, page, [number])
    for _ in range(300):
        wanted = [draw.randrange(2) * 256 for _ in range(draw.randrange(1, PAGE))] + [7] * PAGE
        rows = max(
            next(n for n in range(PAGE + 1) if page[: n + 1] != tuple(wanted[: n + 1]))
            for page in ids
        )
        offered = match(index, wanted).fork
        assert (offered.rows if offered else 0) == rows
        if offered:
            assert offered.page_id in [
                number for page, number in ids.items() if list(page[:rows]) == wanted[:rows]
            ]


def test_an_offer_is_no_use(index: ContentIndex) -> None:
    """Who copies rows keeps no page: it takes its place in the order of eviction."""
    store(index, [99] * PAGE, [9])
    assert fork(index, LONG[:4]) == (4, 1)
    assert evict(index, 9) == [4, 3, 2, 1, 9]


# --- marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(PAGE))
def test_rows_that_see_something_else_are_not_offered(index: ContentIndex, at: int) -> None:
    """Whether it is the chain that sees a span from there on, or the page, or each another."""
    offered = (at, 2) if at else None
    assert fork(index, LONG, None, mark(PAGE + at)) == offered
    assert fork(index, LONG, None, mark(PAGE + at)) == offered, "as before the cut"

    marked = ContentIndex(PAGE, smallest_fork=1)
    store(marked, LONG, [1, 2, 3, 4], mark(PAGE + at))
    assert fork(marked, LONG) == offered
    assert fork(marked, LONG, None, mark(PAGE + at, prompt_start=1)) == offered
    assert fork(marked, [*LONG[:15], 99], None, mark(PAGE + at)) == (7, 2)


def test_a_page_of_the_same_mark_is_found_among_thousands() -> None:
    index, count = ContentIndex(PAGE, smallest_fork=3), 2000
    publish(index, LONG[:PAGE], [count])
    order = random.Random(4).sample(range(count), count)
    for number in order:
        publish(index, LONG[: 2 * PAGE], [count, number], mark(PAGE + 2, number))
    for number in order[:20]:
        question = [*LONG[: PAGE + 6], 99, 99]
        assert fork(index, question, None, mark(PAGE + 2, number)) == (6, number)
        assert fork(index, question[:-2], None, mark(PAGE + 2, number)) == (6, number)
    assert fork(index, LONG, None, mark(PAGE + 2, count)) is None


def test_a_token_that_has_a_mark_is_compared_like_any_other() -> None:
    index = ContentIndex(PAGE, smallest_fork=1)
    for number in range(20):
        store(index, [number, *[50 + number % 3] * 7], [number], mark(0))
    for number in range(20):
        question = [number, 50 + number % 3, 99]
        assert fork(index, question, None, mark(0)) == (2, number)


def test_a_mark_behind_the_rows_does_not_matter(index: ContentIndex) -> None:
    assert fork(index, [*LONG[:12], *[99] * 4], None, mark(13)) == (4, 2)
    assert fork(index, LONG[:12], None, mark(12)) == (4, 2)


# --- the page of an offer ------------------------------------------------------------------------


def offer(index: ContentIndex, tokens: list[int]) -> Fork:
    found = match(index, tokens).fork
    assert found is not None
    return found


def test_an_offer_names_its_page_until_that_is_evicted(index: ContentIndex) -> None:
    offered = offer(index, LONG[:12])
    assert evict(index, 2) == [4, 3]
    assert offered.page_id == 2
    assert evict(index, 1) == [2]
    assert offered.page_id is None
    store(index, LONG, [1, 12, 13, 14])
    assert offered.page_id is None


def test_an_offer_outlives_cuts(index: ContentIndex) -> None:
    offered = offer(index, LONG[:4])
    for tokens in (24, 8, 16):
        assert hit(index, LONG[:tokens]) == [1, 2, 3][: tokens // PAGE]
        assert offered.page_id == 1
    assert evict(index, 3) == [4, 3, 2]
    assert offered.page_id == 1
    assert evict(index, 1) == [1]
    assert offered.page_id is None


def test_an_offer_ends_with_its_generation(index: ContentIndex) -> None:
    offered = offer(index, LONG[:12])
    index.reset()
    assert offered.page_id is None


def test_a_path_carries_its_offer(index: ContentIndex) -> None:
    found = match(index, LONG[:12])
    path = index.path(found.segments(), fork=found.fork)
    assert (pages(path), path.fork) == ([1], found.fork)


def test_a_collision_does_not_spoil_an_offer() -> None:
    """Keys only discover whole pages; rows are compared."""
    index = ContentIndex(PAGE, hash_function=short_hash(0), smallest_fork=1)
    store(index, LONG[:PAGE], [1])
    assert index.match(index.chain(ROOT, [*LONG[:5], 9, 9, 9])).fork == Fork(
        next(iter(index.runs())), 0, 5
    )
    assert index.counters.collisions == 1
