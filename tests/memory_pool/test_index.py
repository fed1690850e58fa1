"""The content index, operation by operation (cases 1, 2, 5, 7, 8, 21, 22, 26, 27)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import ROOT, chain, evict, hit, pages, publish, short_hash, sizes, store

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import (
    HashFunction,
    Namespace,
    PageKey,
    VisibleSpan,
    below_page,
    below_root,
    page_key,
)

# --- look-up and publication ---------------------------------------------------------------------


def test_an_empty_index_hits_nothing() -> None:
    index = ContentIndex(4)
    assert hit(index, range(100)) == []
    assert evict(index, 3) == []
    assert (index.page_count, sizes(index)) == (0, (0, 0, 0))


def test_a_hit_is_the_longest_equal_run_of_pages() -> None:
    index = ContentIndex(4)
    store(index, range(12), [5, 6, 7])
    assert hit(index, range(12)) == [5, 6, 7]
    assert hit(index, range(100)) == [5, 6, 7]
    assert hit(index, range(11)) == [5, 6]
    assert hit(index, [*range(8), 99, *range(9, 12)]) == [5, 6]
    assert hit(index, [99, *range(1, 12)]) == []
    assert hit(index, range(4, 12)) == []  # a page is found with everything before it
    assert index.counters.collisions == 0


def test_equal_pages_at_different_depths_are_different_pages() -> None:
    index = ContentIndex(4)
    store(index, [7] * 16, [1, 2, 3, 4])
    assert hit(index, [7] * 12) == [1, 2, 3]
    assert hit(index, [7] * 100) == [1, 2, 3, 4]


@pytest.mark.parametrize(("page_size", "found"), [(4, []), (2, [1]), (1, [1, 2, 3])])
def test_no_hit_goes_past_the_equal_tokens(page_size: int, found: list[int]) -> None:
    """Case 27."""
    index = ContentIndex(page_size)
    store(index, [5, 6, 7, 8], range(1, 4 // page_size + 1))
    assert hit(index, [5, 6, 7, 42]) == found


@pytest.mark.parametrize(
    ("limit", "found"), [(None, 3), (99, 3), (12, 3), (11, 2), (4, 1), (3, 0), (0, 0), (-1, 0)]
)
def test_a_limit_caps_the_tokens_that_are_looked_at(limit: int | None, found: int) -> None:
    index = ContentIndex(4)
    store(index, range(12), [1, 2, 3])
    assert hit(index, range(12), limit) == [1, 2, 3][:found]
    index.check_invariants()


@pytest.mark.parametrize(("length", "tokens"), [(12, 8), (13, 12), (14, 12), (17, 16)])
def test_the_last_token_is_always_computed(length: int, tokens: int) -> None:
    """Case 8: the caller looks up all but the last token."""
    index = ContentIndex(4)
    assert hit(index, range(length), length - 1) == []
    store(index, range(length), range(length // 4))
    assert len(hit(index, range(length), length - 1)) * 4 == tokens


def test_generated_tokens_are_prefix_too() -> None:
    """Case 7: the last sample was not forwarded, so 149 of 150 tokens have KV."""
    index = ContentIndex(1)
    store(index, range(149), range(149))
    assert hit(index, range(200), limit=199) == list(range(149))


def test_only_full_pages_that_are_stored_are_published() -> None:
    index = ContentIndex(4)
    assert publish(index, range(3), [9]).run is None
    assert publish(index, range(8), []).pages == 0
    assert index.page_count == 0
    index.check_invariants()
    store(index, range(12), [1, 2])
    assert hit(index, range(12)) == [1, 2]


def test_everything_adds_up() -> None:
    """Case 1: the pool of 10 pages of 32 tokens is free, evictable or protected, nothing twice."""
    index, free = ContentIndex(32), set(range(10))
    shared = store(index, range(100), [0, 1, 2])  # page 3 is its tail
    index.lock(shared)
    free -= {0, 1, 2}
    path = store(index, [*range(64), *range(500, 536)], [0, 1, 4])  # page 5 is its tail
    index.lock(path)
    free -= {4}
    assert sizes(index) == (4, 0, 0)
    index.unlock(shared)
    index.unlock(path)
    assert publish(index, range(20), [6]).pages == 0  # it publishes nothing, page 6 is freed
    assert sizes(index) == (0, 0, 4)
    assert (len(free) + index.evictable_pages) * 32 == 320
    assert free.isdisjoint(np.concatenate([run.page_ids for run in index.runs()]).tolist())


def test_the_first_publisher_wins_and_the_second_is_told_which_pages_to_give_back() -> None:
    """Case 2: the row of the second is pointed at 1, 2 before 3, 4 are freed."""
    index = ContentIndex(4)
    first = publish(index, range(1, 9), [1, 2])
    second = publish(index, range(1, 9), [3, 4])
    assert first.duplicate_pages.tolist() == first.duplicate_ids.tolist() == []
    assert second.duplicate_pages.tolist() == [0, 1]
    assert second.duplicate_ids.tolist() == [3, 4]
    assert pages(index.path(second.segments())) == hit(index, range(1, 9)) == [1, 2]
    assert (index.counters.published_pages, index.counters.duplicate_pages) == (2, 2)


def test_only_pages_that_were_there_are_duplicates() -> None:
    index = ContentIndex(4)
    store(index, range(8), [1, 2])
    published = publish(index, range(16), [1, 7, 8, 9])
    assert published.duplicate_pages.tolist() == [1]
    assert published.duplicate_ids.tolist() == [7]
    assert pages(index.path(published.segments())) == [1, 2, 8, 9]


def test_publishing_twice_is_idempotent() -> None:
    """Case 5: an unfinished 10-token request is checkpointed twice."""
    index = ContentIndex(4)
    once = publish(index, range(10), [1, 2])
    index.lock(index.path(once.segments()))
    twice = publish(index, range(10), [1, 2])
    assert (twice.run, twice.pages, len(twice.duplicate_ids)) == (once.run, once.pages, 0)
    assert twice.run is not None
    assert twice.run.locks == 1
    assert (sizes(index), index.counters.published_pages) == ((2, 0, 0), 2)


@pytest.mark.parametrize("page_size", [1, 2, 4, 64])
@given(data=st.data())
@settings(max_examples=25, deadline=None, database=None)
def test_a_page_is_what_the_first_publisher_of_its_prefix_stored(
    page_size: int, data: st.DataObject
) -> None:
    stretch = max(page_size // 2, 1)  # streams part in the middle of a page, too
    streams = st.lists(st.integers(0, 1), max_size=12).map(
        lambda drawn: [token for token in drawn for _ in range(stretch)]
    )
    index = ContentIndex(page_size)
    stored: dict[tuple[int, ...], int] = {}
    for stream in data.draw(st.lists(streams, max_size=8)):
        prefixes = [tuple(stream[:end]) for end in range(page_size, len(stream) + 1, page_size)]
        expected = list(itertools.takewhile(lambda p: p in stored, prefixes))
        assert hit(index, stream) == [stored[prefix] for prefix in expected]
        fresh = range(100 * len(stored), 100 * len(stored) + len(prefixes))
        store(index, stream, fresh)
        for prefix, page_id in zip(prefixes, fresh, strict=True):
            stored.setdefault(prefix, page_id)
        assert hit(index, stream) == [stored[prefix] for prefix in prefixes]
        index.check_invariants()
    assert index.page_count == len(stored)


# --- marks ---------------------------------------------------------------------------------------


def test_what_came_after_a_span_stays_with_it() -> None:
    """Case 26: R = two pages, then T behind a span of D; T is served to no other request."""
    index = ContentIndex(4)
    remaining = [*range(100, 108), *range(200, 208)]
    span = VisibleSpan(8, b"document", prompt_start=8, body_tokens=8, linked_pages=0)
    store(index, range(500, 508), [10, 11])
    store(index, remaining, [1, 2, 3, 4], span)

    def found(*visible: VisibleSpan) -> list[int]:
        return hit(index, remaining, None, *visible)

    assert found(span) == [1, 2, 3, 4]
    assert found() == [1, 2]
    assert found(replace(span, at=9)) == [1, 2]
    assert found(replace(span, prompt_start=12)) == [1, 2]
    assert found(replace(span, body_tokens=12)) == [1, 2]
    assert found(replace(span, linked_pages=1)) == [1, 2]
    assert found(replace(span, body_digest=b"another one")) == [1, 2]
    assert found(span, replace(span, at=12)) == [1, 2, 3]
    assert hit(index, [*range(100, 108), *range(500, 508), *range(200, 208)]) == [1, 2]
    assert hit(index, range(500, 508)) == [10, 11]
    assert index.counters.collisions == 0
    index.check_invariants()


def test_a_span_that_becomes_visible_behind_the_last_page_changes_nothing() -> None:
    index = ContentIndex(4)
    store(index, range(10), [1, 2])
    span = VisibleSpan(9, b"document", prompt_start=8, body_tokens=8, linked_pages=0)
    assert hit(index, range(10), None, span) == [1, 2]


def test_a_run_that_has_a_mark_is_not_served_to_a_chain_that_has_none() -> None:
    """Neither at its first page, nor in the middle of a publication."""
    index = ContentIndex(4)
    span = VisibleSpan(8, b"document", prompt_start=8, body_tokens=8, linked_pages=0)
    store(index, range(16), [1, 2, 3, 4], span)
    published = publish(index, range(16), [5, 6, 7, 8])
    assert pages(index.path(published.segments())) == [1, 2, 7, 8]
    assert hit(index, range(16), None, span) == [1, 2, 3, 4]


# --- latents -------------------------------------------------------------------------------------


def test_a_page_whose_latents_differ_stays_private_and_so_does_what_follows() -> None:
    latents = {1: "a", 2: "b", 3: "c", 4: "a", 5: "other", 6: "c"}
    asked: list[tuple[list[int], list[int]]] = []

    def compare(sealed: np.ndarray, own: np.ndarray) -> np.ndarray:
        asked.append((sealed.tolist(), own.tolist()))
        return np.array(
            [latents[one] == latents[other] for one, other in zip(*asked[-1], strict=True)]
        )

    index = ContentIndex(4, compare_latents=compare)
    store(index, range(12), [1, 2, 3])
    assert not asked
    published = publish(index, range(16), [4, 5, 6, 7])
    assert asked[0] == ([1, 2, 3], [4, 5, 6])
    assert pages(index.path(published.segments())) == [1]
    assert published.duplicate_ids.tolist() == [4]
    assert hit(index, range(16)) == [1, 2, 3]
    assert (index.counters.latent_divergence, index.counters.collisions) == (1, 0)
    assert (index.counters.published_pages, index.counters.duplicate_pages) == (3, 1)

    asked.clear()
    assert pages(store(index, range(16), [1, 2, 3, 8])) == [1, 2, 3, 8]  # its own are not compared
    assert not asked
    assert publish(index, range(16), [5, 1]).pages == 0  # from the first page on
    assert sizes(index) == (0, 0, 4)


# --- collisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_planned_collision_is_a_miss(depth: int) -> None:
    """Case 21, behind ``depth`` common pages."""
    common = list(range(100, 100 + 8 * depth))
    one, other = [*common, *range(1, 9)], [*common, *range(9, 17)]
    ids = list(range(depth + 1))
    parent = below_page(ids[depth - 1]) if depth else below_root(ROOT)

    def collides(hash_function: HashFunction) -> bool:
        first, second = (
            page_key(hash_function, parent, chain(index, tokens).page_bytes(depth))
            for tokens in (one, other)
        )
        start = page_key(hash_function, below_root(ROOT), chain(index, one).page_bytes(0))
        return first == second and (not depth or start != first)

    index = ContentIndex(8)
    hash_function = next(h for h in (short_hash(8, s) for s in itertools.count()) if collides(h))
    index = ContentIndex(8, hash_function=hash_function)
    first = store(index, one, ids)
    index.lock(first)

    assert hit(index, other) == ids[:depth]
    assert index.counters.collisions == 1
    assert hit(index, one) == ids

    published = publish(index, other, [*ids[:depth], 77])
    assert pages(index.path(published.segments())) == ids[:depth]  # 77 stays private
    assert len(published.duplicate_ids) == 0
    assert index.counters.collisions == 2
    assert sizes(index) == (depth + 1, 0, 0)
    assert index.unlock(first) == depth + 1
    assert evict(index, 10) == ids[::-1]
    assert pages(store(index, other, ids)) == ids  # the name is free again


def colliding(*made: dict[str, Any]) -> ContentIndex:
    """An index whose hash gives the first page of both chains the same key."""
    for seed in itertools.count():
        index = ContentIndex(8, hash_function=short_hash(8, seed))
        chains = [chain(index, range(8), **arguments) for arguments in made]
        keys = {
            page_key(short_hash(8, seed), below_root(c.root_key), c.page_bytes(0), c.mark(0))
            for c in chains
        }
        if len(keys) == 1:
            return index
    raise AssertionError("unreachable")


def check_that_the_second_misses(first: dict[str, Any], second: dict[str, Any]) -> ContentIndex:
    index = colliding(first, second)
    index.publish(chain(index, range(8), **first), [1])
    assert index.match(chain(index, range(8), **second)).pages == 0
    assert index.publish(chain(index, range(8), **second), [2]).run is None
    assert index.match(chain(index, range(8), **first)).pages == 1
    index.check_invariants()
    return index


def test_a_collision_between_marks_is_a_miss() -> None:
    """The same tokens behind another span, whose key happens to be equal."""
    spans = [VisibleSpan(0, PageKey(b"body"), start, 8, 0) for start in (8, 16)]
    index = check_that_the_second_misses({"visible": spans[:1]}, {"visible": spans[1:]})
    assert index.counters.collisions == 2


def test_a_collision_between_namespaces_is_a_miss() -> None:
    """Case 22 with an 8-bit hash: a salt keeps its pages whatever the hash does."""
    roots = [Namespace("model", cache_salt=salt).root_key() for salt in ("t1", "t2")]
    index = check_that_the_second_misses({"root": roots[0]}, {"root": roots[1]})
    assert index.counters.collisions == 1  # nothing is looked up below an unknown root


def test_a_run_that_can_not_be_cut_is_a_shorter_match() -> None:
    """The key that its lower part would need is taken by a page of another chain."""
    long, other = list(range(24)), list(range(100, 108))
    index = ContentIndex(8)
    bytes_of = {n: chain(index, long).page_bytes(n) for n in range(3)}

    def in_the_way(hash_function: HashFunction) -> bool:
        head = page_key(hash_function, below_root(ROOT), bytes_of[0])
        needed = page_key(hash_function, below_page(0), bytes_of[1])
        taken = page_key(hash_function, below_root(ROOT), chain(index, other).page_bytes(0))
        return needed == taken != head

    hash_function = next(h for h in (short_hash(8, s) for s in itertools.count()) if in_the_way(h))
    index = ContentIndex(8, hash_function=hash_function)
    store(index, long, [0, 1, 2])
    store(index, other, [3])
    assert hit(index, long, 8) == []
    assert index.counters.collisions == 1
    published = publish(index, [*long[:8], 77, *long[9:]], [4, 5, 6])
    assert (published.pages, index.counters.collisions) == (0, 2)
    assert hit(index, long) == [0, 1, 2]
    assert hit(index, other) == [3]
    assert sizes(index) == (0, 0, 4)

    index.lock(store(index, long, [0, 1, 2]))
    assert evict(index, 9) == [3]
    assert hit(index, long, 8) == [0]
    assert sizes(index) == (3, 0, 0)
