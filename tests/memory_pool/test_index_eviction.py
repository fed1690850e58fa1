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
from pathlib import Path as FilePath

import pytest
from index_helpers import chain, evict, find, hit, pages, publish, sizes, store

from tessera_sglang.memory_pool.eviction import POLICIES
from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.runs import Path

PAGE = 4
A, B, C = range(100, 108), range(200, 208), range(300, 308)  # two pages each


@pytest.fixture
def index() -> ContentIndex:
    """A on pages 1, 2; B on 3, 4; C on 5, 6; published in that order."""
    index = ContentIndex(PAGE)
    for tokens, page in ((A, 1), (B, 3), (C, 5)):
        store(index, tokens, [page, page + 1])
    return index


# --- order ---------------------------------------------------------------------------------------


def test_leaves_go_first_and_the_least_recently_used_chain_first(index: ContentIndex) -> None:
    assert evict(index, 2) == [2, 1]
    assert [evict(index, 1) for _ in range(5)] == [[4], [3], [6], [5], []]
    assert index.page_count == 0


def test_a_page_that_was_used_goes_later(index: ContentIndex) -> None:
    assert hit(index, A) == [1, 2]
    store(index, B, [13, 14])  # publishing again is a use, too
    assert evict(index, 6) == [6, 5, 2, 1, 4, 3]


def test_using_the_start_of_a_chain_keeps_the_start_only(index: ContentIndex) -> None:
    assert hit(index, A[:4]) == [1]
    assert evict(index, 6) == [2, 4, 3, 6, 5, 1]


def test_a_parent_goes_after_its_last_child() -> None:
    index = ContentIndex(PAGE)
    for page, tokens in ((2, B), (3, C)):
        store(index, [*A[:4], *tokens[:4]], [1, page])
    assert evict(index, 2) == [2, 3]
    assert evict(index, 2) == [1]


def test_the_name_of_an_evicted_page_is_free(index: ContentIndex) -> None:
    assert evict(index, 1) == [2]
    store(index, A, [1, 22])
    assert evict(index, 9) == [4, 3, 6, 5, 22, 1]


@pytest.mark.parametrize("count", [0, -1])
def test_nothing_goes_when_nothing_is_asked_for(index: ContentIndex, count: int) -> None:
    digest = index.eviction_digest
    assert evict(index, count, break_holds=True) == []
    assert index.eviction_digest == digest


# --- locks and holds -----------------------------------------------------------------------------


def test_a_locked_page_never_goes(index: ContentIndex) -> None:
    path = find(index, A)
    assert index.lock(path) == 2
    assert evict(index, 100, break_holds=True) == [4, 3, 6, 5]
    assert evict(index, 1, break_holds=True) == []
    assert index.unlock(path) == 2
    assert evict(index, 100) == [2, 1]


def test_locks_are_counted_and_report_pages_that_changed_state(index: ContentIndex) -> None:
    whole, start = find(index, A), find(index, A[:4])
    assert [index.lock(start), index.lock(whole), index.lock(whole)] == [1, 1, 0]
    assert sizes(index) == (2, 0, 4)
    assert [index.unlock(whole), index.unlock(start)] == [0, 0]
    assert sizes(index) == (2, 0, 4)
    assert index.unlock(whole) == 2
    assert sizes(index) == (0, 0, 6)


def test_a_path_that_reads_a_page_twice_locks_it_twice(index: ContentIndex) -> None:
    """A request may declare the same document twice."""
    once = find(index, A)
    twice = index.path(once.segments * 2)
    assert (len(twice), pages(twice)) == (4, [1, 2, 1, 2])
    assert index.lock(twice) == 2
    assert index.unlock(once) == 0
    assert sizes(index) == (2, 0, 4)
    assert index.unlock(once) == 2
    assert sizes(index) == (0, 0, 6)


def test_pages_that_nobody_reads_are_kept_with_the_path(index: ContentIndex) -> None:
    path = index.path(index.match(chain(index, A)).segments(first=1))
    assert (len(path), pages(path)) == (1, [2])
    assert index.lock(path) == 2
    assert sizes(index) == (2, 0, 4)
    assert index.unlock(path) == 2
    assert sizes(index) == (0, 0, 6)


def test_a_held_page_goes_only_when_holds_are_broken_and_last(index: ContentIndex) -> None:
    path, epoch = find(index, A), index.hold_epoch
    index.hold(path)
    assert sizes(index) == (0, 2, 4)
    assert evict(index, 100) == [4, 3, 6, 5]
    assert index.intact(path)
    assert index.hold_epoch == epoch
    assert evict(index, 1, break_holds=True) == [2]
    assert not index.intact(path)
    assert index.hold_epoch != epoch
    assert sizes(index) == (0, 0, 1)  # nobody waits for a part of the path
    index.release(path)
    assert (sizes(index), evict(index, 1)) == ((0, 0, 1), [1])
    assert index.counters.broken_holds == 1


def test_a_broken_hold_leaves_alone_what_others_hold(index: ContentIndex) -> None:
    whole, start = find(index, A), find(index, A[:4])
    for path in (whole, whole, start):
        index.hold(path)
    assert evict(index, 5, break_holds=True) == [4, 3, 6, 5, 2]
    assert (index.intact(whole), index.intact(start)) == (False, True)
    assert sizes(index) == (0, 1, 0)
    index.release(whole)
    index.release(whole)
    assert sizes(index) == (0, 1, 0)
    assert evict(index, 1) == []
    index.release(start)
    assert evict(index, 1) == [1]
    assert index.counters.broken_holds == 1


def test_what_lost_its_hold_goes_before_the_next_hold_is_broken(index: ContentIndex) -> None:
    for tokens in (A, B):
        index.hold(find(index, tokens))
    index.lock(find(index, C))
    assert evict(index, 3, break_holds=True) == [2, 1, 4]
    assert index.counters.broken_holds == 2


def test_of_held_pages_the_least_recently_used_goes_first(index: ContentIndex) -> None:
    for tokens in (B, A, C):
        index.hold(find(index, tokens))
    assert [evict(index, 1, break_holds=True) for _ in range(4)] == [[4], [3], [2], [1]]


def test_breaking_holds_one_by_one_is_breaking_them_at_once(index: ContentIndex) -> None:
    for tokens in (B, A, C):
        index.hold(find(index, tokens))
    assert evict(index, 4, break_holds=True) == [4, 3, 2, 1]


def test_a_lock_counts_before_a_hold(index: ContentIndex) -> None:
    path = find(index, A)
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
    path = find(index, A)
    index.hold(path)
    index.hold(path)
    index.release(path)
    assert sizes(index) == (0, 2, 4)
    index.release(path)
    assert sizes(index) == (0, 0, 6)


def test_a_path_of_an_earlier_generation_changes_nothing(index: ContentIndex) -> None:
    """Case 6: match and keep, reset, release."""
    locked, held = find(index, A), find(index, B)
    index.lock(locked)
    index.hold(held)
    index.reset()
    assert (index.page_count, sizes(index)) == (0, (0, 0, 0))
    assert evict(index, 9, break_holds=True) == []
    fresh = store(index, A, [1, 2])
    index.lock(fresh)
    for path in (locked, held):
        assert (index.intact(path), index.lock(path), index.unlock(path)) == (False, 0, 0)
        index.hold(path)
        index.release(path)
    assert sizes(index) == (2, 0, 0)
    assert index.unlock(fresh) == 2


# --- ranks ---------------------------------------------------------------------------------------


def replay(policy: str, jitter: bool = False) -> list[list[int]]:
    """One fixed log of operations: hit lengths, forks and victims, in order. Case 10."""
    log, outcome = random.Random(10), []
    index = ContentIndex(PAGE, eviction_policy=policy, smallest_fork=1)
    fresh = iter(range(10**6))
    locked: list[Path] = []
    held: list[Path] = []
    for _ in range(2000):
        if jitter and random.SystemRandom().random() < 0.02:
            time.sleep(random.SystemRandom().random() / 500)
        tokens = [log.randrange(2) for _ in range(log.randrange(1, 20))]
        found = index.match(chain(index, tokens))
        outcome.append([found.pages])
        if found.fork is not None:
            outcome.append([found.fork.rows, found.fork.page_id or 0])
        path = index.path(found.segments())
        match log.randrange(5):
            case 0:
                publish(index, tokens, [next(fresh) for _ in range(len(tokens) // PAGE)])
            case 1:
                locked.append(path)
                index.lock(path)
            case 2:
                held.append(path)
                index.hold(path)
            case 3:
                if locked:
                    index.unlock(locked.pop(log.randrange(len(locked))))
                if held:
                    index.release(held.pop(log.randrange(len(held))))
            case _:
                surplus = index.page_count - log.randrange(5, 40)
                victims = evict(index, surplus, break_holds=log.random() < 0.5)
                outcome.append(victims)
    assert index.counters.broken_holds > 10, "the log breaks holds"
    return [*outcome, list(index.eviction_digest)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rank_evicts_the_same_pages_in_the_same_order(policy: str) -> None:
    program = (
        "import json, sys, test_index_eviction as t;"
        "print(json.dumps(t.replay(sys.argv[1], jitter=True)))"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, policy],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=FilePath(__file__).parent,
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    outcomes = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert outcomes[0] == outcomes[1] == replay(policy)
    assert sum(len(entry) for entry in outcomes[0]) > 2000, "the log hits and evicts"
