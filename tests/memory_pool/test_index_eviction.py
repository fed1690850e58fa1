"""What keeps a page and which one goes next (cases 6 and 10).

Lists of physical pages are stated exactly: the order of eviction is a specification, because every
tensor-parallel rank must free the same page.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path as FilePath

import pytest

from tessera_sglang.memory_pool.index import ContentIndex, Path
from tessera_sglang.memory_pool.keys import Chain, Namespace

PAGE = 4
ROOT = Namespace("model").root_key()


def chain(tokens: Iterable[int]) -> Chain:
    return Chain(ROOT, list(tokens), PAGE)


def store(index: ContentIndex, tokens: Iterable[int], *page_ids: int) -> Path:
    return index.path(index.publish(chain(tokens), page_ids).pages)


def touch(index: ContentIndex, tokens: Iterable[int]) -> int:
    return len(index.match(chain(tokens)))


def sizes(index: ContentIndex) -> tuple[int, int, int]:
    index.check_invariants()
    return index.locked_pages, index.held_pages, index.evictable_pages


A, B, C = range(100, 108), range(200, 208), range(300, 308)  # two pages each


@pytest.fixture
def index() -> ContentIndex:
    """A on pages 1, 2; B on 3, 4; C on 5, 6; published in that order."""
    index = ContentIndex(PAGE)
    for tokens, page in ((A, 1), (B, 3), (C, 5)):
        store(index, tokens, page, page + 1)
    return index


# --- order ---------------------------------------------------------------------------------------


def test_leaves_go_first_and_the_least_recently_used_chain_first(index: ContentIndex) -> None:
    assert index.evict(2) == [2, 1]
    assert [index.evict(1) for _ in range(5)] == [[4], [3], [6], [5], []]
    assert index.page_count == 0


def test_a_page_that_was_used_goes_later(index: ContentIndex) -> None:
    assert touch(index, A) == 2
    store(index, B, 13, 14)  # publishing again is a use, too
    assert index.evict(6) == [6, 5, 2, 1, 4, 3]


def test_using_the_start_of_a_chain_keeps_the_start_only(index: ContentIndex) -> None:
    assert touch(index, A[:4]) == 1
    assert index.evict(6) == [2, 4, 3, 6, 5, 1]


def test_a_parent_goes_after_its_last_child() -> None:
    index = ContentIndex(PAGE)
    for page, tokens in ((2, B), (3, C)):
        store(index, [*A[:4], *tokens[:4]], 1, page)
    assert index.evict(2) == [2, 3]
    assert index.evict(2) == [1]


def test_the_name_of_an_evicted_page_is_free(index: ContentIndex) -> None:
    assert index.evict(1) == [2]
    store(index, A, 1, 22)
    assert index.evict(9) == [4, 3, 6, 5, 22, 1]


# --- locks and holds -----------------------------------------------------------------------------


def test_a_locked_page_never_goes(index: ContentIndex) -> None:
    path = index.path(index.match(chain(A)))
    assert index.lock(path) == 2
    assert index.evict(100, break_holds=True) == [4, 3, 6, 5]
    assert index.evict(1, break_holds=True) == []
    assert index.unlock(path) == 2
    assert index.evict(100) == [2, 1]


def test_locks_are_counted_and_report_pages_that_changed_state(index: ContentIndex) -> None:
    whole, start = index.path(index.match(chain(A))), index.path(index.match(chain(A), 1))
    assert [index.lock(start), index.lock(whole), index.lock(whole)] == [1, 1, 0]
    assert sizes(index) == (2, 0, 4)
    assert [index.unlock(whole), index.unlock(start)] == [0, 0]
    assert sizes(index) == (2, 0, 4)
    assert index.unlock(whole) == 2
    assert sizes(index) == (0, 0, 6)


def test_a_path_that_reads_a_page_twice_locks_it_twice(index: ContentIndex) -> None:
    """A request may declare the same document twice."""
    pages = index.match(chain(A))
    twice = index.path(pages + pages)
    assert index.lock(twice) == 2
    assert [page.locks for page in pages] == [2, 2]
    assert index.unlock(twice) == 2
    assert sizes(index) == (0, 0, 6)


def test_pages_that_nobody_reads_are_kept_with_the_path(index: ContentIndex) -> None:
    first, second = index.match(chain(A))
    path = index.path([second], kept=[first])
    assert path.all_pages == (first, second)
    index.lock(path)
    assert sizes(index) == (2, 0, 4)
    index.unlock(path)
    assert sizes(index) == (0, 0, 6)


def test_a_held_page_goes_only_when_holds_are_broken_and_last(index: ContentIndex) -> None:
    path = index.path(index.match(chain(A)))
    index.hold(path)
    assert sizes(index) == (0, 2, 4)
    assert index.evict(100) == [4, 3, 6, 5]
    assert index.intact(path)
    assert index.evict(1, break_holds=True) == [2]
    assert not index.intact(path)
    assert sizes(index) == (0, 1, 0)
    index.release(path)  # skips the page that is gone
    assert (sizes(index), index.evict(1)) == ((0, 0, 1), [1])
    assert index.counters.broken_holds == 1


def test_of_held_pages_the_least_recently_used_goes_first(index: ContentIndex) -> None:
    for tokens in (B, A, C):
        index.hold(index.path(index.match(chain(tokens))))
    assert [index.evict(1, break_holds=True) for _ in range(4)] == [[4], [3], [2], [1]]


def test_breaking_holds_one_by_one_is_breaking_them_at_once(index: ContentIndex) -> None:
    for tokens in (B, A, C):
        index.hold(index.path(index.match(chain(tokens))))
    assert index.evict(4, break_holds=True) == [4, 3, 2, 1]


def test_a_lock_counts_before_a_hold(index: ContentIndex) -> None:
    path = index.path(index.match(chain(A)))
    index.hold(path)
    index.lock(path)
    assert sizes(index) == (2, 0, 4)
    index.unlock(path)
    assert sizes(index) == (0, 2, 4)
    index.lock(path)
    index.release(path)
    assert sizes(index) == (2, 0, 4)
    index.unlock(path)
    assert sizes(index) == (0, 0, 6)


def test_holds_are_counted(index: ContentIndex) -> None:
    path = index.path(index.match(chain(A)))
    index.hold(path)
    index.hold(path)
    index.release(path)
    assert sizes(index) == (0, 2, 4)
    index.release(path)
    assert sizes(index) == (0, 0, 6)


def test_a_path_of_an_earlier_generation_changes_nothing(index: ContentIndex) -> None:
    """Case 6: match and keep, reset, release."""
    locked, held = (index.path(index.match(chain(tokens))) for tokens in (A, B))
    index.lock(locked)
    index.hold(held)
    index.reset()
    assert (index.page_count, sizes(index)) == (0, (0, 0, 0))
    assert index.evict(9, break_holds=True) == []
    fresh = store(index, A, 1, 2)
    index.lock(fresh)
    for path in (locked, held):
        assert (index.intact(path), index.lock(path), index.unlock(path)) == (False, 0, 0)
        index.hold(path)
        index.release(path)
    assert [page.locks for page in fresh.pages] == [1, 1]
    assert [page.holds for page in fresh.pages] == [0, 0]
    assert sizes(index) == (2, 0, 0)


# --- ranks ---------------------------------------------------------------------------------------


def replay(jitter: bool = False) -> list[list[int]]:
    """One fixed log of operations: hit lengths and victims, in order. Case 10."""
    log, index, outcome = random.Random(10), ContentIndex(PAGE), []
    fresh = iter(range(10**6))
    locked: list[Path] = []
    held: list[Path] = []
    for _ in range(3000):
        if jitter and random.SystemRandom().random() < 0.02:
            time.sleep(random.SystemRandom().random() / 500)
        name = chain(log.randrange(3) for _ in range(PAGE * log.randrange(1, 6)))
        found = index.match(name)
        outcome.append([len(found)])
        match log.randrange(6):
            case 0 | 1:
                index.publish(name, [next(fresh) for _ in range(name.page_count)])
            case 2:
                locked.append(index.path(found))
                index.lock(locked[-1])
            case 3:
                held.append(index.path(found))
                index.hold(held[-1])
            case 4:
                if locked:
                    index.unlock(locked.pop(log.randrange(len(locked))))
                if held:
                    index.release(held.pop(log.randrange(len(held))))
            case _:
                victims = index.evict(log.randrange(12), break_holds=log.random() < 0.3)
                outcome.append(victims)
    return [*outcome, list(index.eviction_digest)]


def test_every_rank_evicts_the_same_pages_in_the_same_order() -> None:
    program = "import json, test_index_eviction as t; print(json.dumps(t.replay(jitter=True)))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=FilePath(__file__).parent,
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    outcomes = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert outcomes[0] == outcomes[1] == replay()
    assert sum(len(entry) for entry in outcomes[0]) > 1000, "the log hits and evicts"
