"""The content index, operation by operation (cases 1, 2, 5, 7, 8, 21, 26, 27)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from tessera_sglang.memory_pool.index import ContentIndex, Page
from tessera_sglang.memory_pool.keys import Chain, HashFunction, Namespace, PageKey, VisibleSpan

ROOT = Namespace("model").root_key()


def chain(
    index: ContentIndex,
    tokens: Iterable[int],
    visible: Iterable[VisibleSpan] = (),
    root: PageKey = ROOT,
) -> Chain:
    return Chain(
        root, list(tokens), index.page_size, visible=visible, hash_function=index.hash_function
    )


def store(index: ContentIndex, tokens: Iterable[int], *page_ids: int) -> tuple[Page, ...]:
    return index.publish(chain(index, tokens), page_ids).pages


def hit(index: ContentIndex, tokens: Iterable[int], limit: int | None = None) -> list[int]:
    return [page.page_id for page in index.match(chain(index, tokens), limit)]


def short_hash(seed: int) -> HashFunction:
    """Eight bits of xxh3."""
    return lambda data: bytes([xxhash.xxh3_64_intdigest(data, seed=seed) & 0xFF])


# --- look-up and publication ---------------------------------------------------------------------


def test_an_empty_index_hits_nothing() -> None:
    index = ContentIndex(4)
    assert hit(index, range(100)) == []
    assert index.evict(3) == []
    assert (index.page_count, index.evictable_pages) == (0, 0)


def test_a_hit_is_the_longest_equal_run_of_pages() -> None:
    index = ContentIndex(4)
    store(index, range(12), 5, 6, 7)
    assert hit(index, range(12)) == [5, 6, 7]
    assert hit(index, range(100)) == [5, 6, 7]
    assert hit(index, range(11)) == [5, 6]
    assert hit(index, [*range(8), 99, *range(9, 12)]) == [5, 6]
    assert hit(index, [99, *range(1, 12)]) == []
    assert hit(index, range(4, 12)) == []  # a page is found with everything before it
    assert index.counters.collisions == 0


@pytest.mark.parametrize(("page_size", "pages"), [(4, []), (2, [1]), (1, [1, 2, 3])])
def test_no_hit_goes_past_the_equal_tokens(page_size: int, pages: list[int]) -> None:
    """Case 27."""
    index = ContentIndex(page_size)
    store(index, [5, 6, 7, 8], *range(1, 4 // page_size + 1))
    assert hit(index, [5, 6, 7, 42]) == pages


@pytest.mark.parametrize(("limit", "pages"), [(None, 3), (9, 3), (2, 2), (1, 1), (0, 0), (-1, 0)])
def test_a_limit_caps_the_hit(limit: int | None, pages: int) -> None:
    index = ContentIndex(4)
    store(index, range(12), 1, 2, 3)
    assert hit(index, range(12), limit) == [1, 2, 3][:pages]


@pytest.mark.parametrize(("length", "tokens"), [(12, 8), (13, 12), (14, 12), (17, 16)])
def test_the_last_token_is_always_computed(length: int, tokens: int) -> None:
    """Case 8: the caller looks up all but the last token."""
    index = ContentIndex(4)
    limit = (length - 1) // 4
    assert hit(index, range(length), limit) == []
    store(index, range(length), *range(length // 4))
    assert len(hit(index, range(length), limit)) * 4 == tokens


def test_generated_tokens_are_prefix_too() -> None:
    """Case 7: the last sample was not forwarded, so 149 of 150 tokens have KV."""
    index = ContentIndex(1)
    store(index, range(149), *range(149))
    assert hit(index, range(200), limit=199) == list(range(149))


def test_only_full_pages_that_are_stored_are_published() -> None:
    index = ContentIndex(4)
    assert store(index, range(3), 9) == ()
    store(index, range(12), 1, 2)
    assert hit(index, range(12)) == [1, 2]


def test_everything_adds_up() -> None:
    """Case 1: the pool of 10 pages of 32 tokens is free, evictable or protected, nothing twice."""
    index, free = ContentIndex(32), set(range(10))
    first, second = [*range(100)], [*range(64), *range(500, 536)]
    shared = index.path(store(index, first, 0, 1, 2))  # page 3 is its tail
    index.lock(shared)
    free -= {0, 1, 2}
    path = index.path(store(index, second, 0, 1, 4))  # page 5 is its tail
    index.lock(path)
    free -= {4}
    assert (index.locked_pages, index.evictable_pages) == (4, 0)
    index.unlock(shared)
    index.unlock(path)
    assert store(index, range(20), 6) == ()  # it publishes nothing, page 6 is freed
    assert (index.locked_pages, index.held_pages, index.evictable_pages) == (0, 0, 4)
    assert (len(free) + index.evictable_pages) * 32 == 320
    assert free.isdisjoint(page.page_id for page in index.pages())
    index.check_invariants()


def test_the_first_publisher_wins_and_the_second_is_told_which_pages_to_give_back() -> None:
    """Case 2: the row of the second is pointed at 1, 2 before 3, 4 are freed."""
    index = ContentIndex(4)
    first = index.publish(chain(index, range(1, 9)), [1, 2])
    second = index.publish(chain(index, range(1, 9)), [3, 4])
    assert first.duplicates == ()
    assert second.duplicates == ((0, 3), (1, 4))
    assert second.pages == first.pages
    assert hit(index, range(1, 9)) == [1, 2]
    assert (index.counters.published_pages, index.counters.duplicate_pages) == (2, 2)


def test_only_pages_that_were_there_are_duplicates() -> None:
    index = ContentIndex(4)
    store(index, range(8), 1, 2)
    published = index.publish(chain(index, range(16)), [1, 7, 8, 9])
    assert published.duplicates == ((1, 7),)
    assert [page.page_id for page in published.pages] == [1, 2, 8, 9]


def test_publishing_twice_is_idempotent() -> None:
    """Case 5: an unfinished 10-token request is checkpointed twice."""
    index = ContentIndex(4)
    once = index.publish(chain(index, range(10)), [1, 2])
    index.lock(index.path(once.pages))
    twice = index.publish(chain(index, range(10)), [1, 2])
    assert twice == once
    assert (index.page_count, index.locked_pages, index.counters.published_pages) == (2, 2, 2)
    assert [page.locks for page in twice.pages] == [1, 1]
    index.check_invariants()


# --- marks ---------------------------------------------------------------------------------------


def test_what_came_after_a_span_stays_with_it() -> None:
    """Case 26: R = two pages, then T behind a span of D; T is served to no other request."""
    index = ContentIndex(4)
    document, other = (chain(index, range(s, s + 8)) for s in (500, 700))
    remaining = [*range(100, 108), *range(200, 208)]
    span = VisibleSpan(8, document.key(1), prompt_start=8, body_tokens=8, linked_pages=0)
    index.publish(document, [10, 11])
    index.publish(chain(index, remaining, [span]), [1, 2, 3, 4])

    def found(*visible: VisibleSpan) -> list[int]:
        return [page.page_id for page in index.match(chain(index, remaining, visible))]

    assert found(span) == [1, 2, 3, 4]
    assert found() == [1, 2]
    assert found(replace(span, at=9)) == [1, 2]
    assert found(replace(span, prompt_start=12)) == [1, 2]
    assert found(replace(span, linked_pages=1)) == [1, 2]
    assert found(replace(span, body_digest=other.key(1))) == [1, 2]
    assert found(span, replace(span, at=12)) == [1, 2, 3]
    assert hit(index, [*range(100, 108), *range(500, 508), *range(200, 208)]) == [1, 2]
    assert hit(index, range(500, 508)) == [10, 11]
    assert index.counters.collisions == 0


# --- collisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_planned_collision_is_a_miss(depth: int) -> None:
    """Case 21, behind ``depth`` common pages."""
    common = list(range(100, 100 + 8 * depth))
    one, other = [*common, *range(1, 9)], [*common, *range(9, 17)]

    def collides(hash_function: HashFunction) -> bool:
        first, second = (Chain(ROOT, t, 8, hash_function=hash_function) for t in (one, other))
        names = [first.key(number) for number in range(depth + 1)]
        return len(set(names)) == depth + 1 and second.key(depth) == names[depth]

    hash_function = next(h for h in map(short_hash, itertools.count()) if collides(h))
    index = ContentIndex(8, hash_function=hash_function)
    ids = tuple(range(depth + 1))
    first = index.path(store(index, one, *ids))
    index.lock(first)

    assert hit(index, other) == list(ids[:depth])
    assert index.counters.collisions == 1
    assert hit(index, one) == list(ids)

    published = index.publish(chain(index, other), [*ids[:depth], 77])
    assert [page.page_id for page in published.pages] == list(ids[:depth])  # 77 stays private
    assert published.duplicates == ()
    assert index.counters.collisions == 2
    assert [page.locks for page in first.pages] == [1] * (depth + 1)
    index.check_invariants()
    index.unlock(first)
    assert index.evict(10) == list(reversed(ids))
    assert store(index, other, *ids)[-1].page_id == depth  # the name is free again


def colliding(*chains: dict[str, Any]) -> ContentIndex:
    """An index whose hash gives the first page of both chains the same key."""
    for hash_function in map(short_hash, itertools.count()):
        index = ContentIndex(8, hash_function=hash_function)
        if len({chain(index, range(8), **made).key(0) for made in chains}) == 1:
            return index
    raise AssertionError("unreachable")


def check_that_the_second_misses(first: dict[str, Any], second: dict[str, Any]) -> None:
    index = colliding(first, second)
    index.publish(chain(index, range(8), **first), [1])
    assert index.match(chain(index, range(8), **second)) == ()
    assert index.counters.collisions == 1
    assert len(index.match(chain(index, range(8), **first))) == 1


def test_a_collision_between_marks_is_a_miss() -> None:
    """The same tokens behind another span, whose key happens to be equal."""
    spans = [VisibleSpan(0, PageKey(b"body"), start, 8, 0) for start in (8, 16)]
    check_that_the_second_misses({"visible": spans[:1]}, {"visible": spans[1:]})


def test_a_collision_between_namespaces_is_a_miss() -> None:
    """Case 22 with an 8-bit hash: a salt keeps its pages whatever the hash does."""
    roots = [Namespace("model", cache_salt=salt).root_key() for salt in ("t1", "t2")]
    check_that_the_second_misses({"root": roots[0]}, {"root": roots[1]})
