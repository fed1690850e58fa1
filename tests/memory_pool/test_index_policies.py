"""Eviction by policy, and what a hit rate must not do in the long run (case 28)."""

from __future__ import annotations

import random

import pytest
from index_helpers import chain, evict, hit, mark, pages, store

from tessera_sglang.memory_pool.eviction import POLICIES
from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import Chain, Namespace
from tessera_sglang.memory_pool.runs import Path

PAGE = 4
A, B, C = (range(start, start + 8) for start in (100, 200, 300))  # two pages each


def used(policy: str, **settings: int) -> ContentIndex:
    """A on pages 1, 2 used three times, B on 3, 4 twice, C on 5, 6 once; least recently A."""
    index = ContentIndex(PAGE, eviction_policy=policy, **settings)
    for tokens, page, uses in ((A, 1, 3), (B, 3, 2), (C, 5, 1)):
        for _ in range(uses):
            store(index, tokens, [page, page + 1])
    return index


@pytest.mark.parametrize(
    ("policy", "victims"),
    [
        ("lru", [2, 1, 4, 3, 6, 5]),
        ("lfu", [6, 5, 4, 3, 2, 1]),
        ("slru", [6, 5, 2, 1, 4, 3]),
    ],
)
def test_each_policy_has_its_order(policy: str, victims: list[int]) -> None:
    assert evict(used(policy), 9) == victims
    index = used(policy)
    assert [page for _ in victims for page in evict(index, 1)] == victims


def test_slru_protects_from_a_number_of_uses_on() -> None:
    assert evict(used("slru", protected_hits=3), 9) == [4, 3, 6, 5, 2, 1]


def test_another_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown eviction policy 'mru'"):
        ContentIndex(PAGE, eviction_policy="mru")


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_looking_up_is_no_use(policy: str) -> None:
    """A request is counted when it publishes; it may look up many times before."""
    index = used(policy)
    for _ in range(5):
        hit(index, C)
    assert evict(index, 2) == [6, 5]


@pytest.mark.parametrize(
    ("policy", "victims"),
    [
        ("lfu", [6, 5, 10, 11, 12, 13, 14, 4, 3, 2, 1]),
        ("slru", [2, 4, 3, 6, 5, 10, 11, 12, 13, 14, 1]),
    ],
)
def test_uses_are_counted_by_the_page(policy: str, victims: list[int]) -> None:
    """The first page of A is used five times more than its second one."""
    index = used(policy, protected_hits=4)
    for number in range(5):
        store(index, [*A[:4], *range(number, number + 4)], [1, 10 + number])
    assert evict(index, 99) == victims


def test_what_a_request_published_before_is_not_counted_again() -> None:
    index = used("lfu")
    for done in range(3):
        index.publish(chain(index, range(400, 412)), [7, 8, 9][: done + 1], counted=done)
    assert {run.hits for run in index.runs() if run.page_ids[0] >= 7} == {1}
    assert evict(index, 5) == [6, 5, 9, 8, 7]


# --- the long run --------------------------------------------------------------------------------


class Requests:
    """Readers of one pool: each publishes what it misses and gives back what it had twice."""

    def __init__(self, index: ContentIndex, pages: int) -> None:
        self.index = index
        self.free = list(range(pages))

    def read(self, name: Chain) -> tuple[int, Path]:
        """Pages that were hit, and the whole chain, locked."""
        index = self.index
        found = index.match(name)
        path = index.path(found.segments())
        index.lock(path)
        missing = name.page_count - found.pages
        if missing > len(self.free):
            self.free += evict(index, missing - len(self.free))
        row = pages(path) + [self.free.pop() for _ in range(missing)]
        published = index.publish(name, row)
        self.free += published.duplicate_ids.tolist()
        index.unlock(path)
        path = index.path(published.segments())
        index.lock(path)
        return found.pages, path


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [16, 64])
def test_sustained_novel_mixes_do_not_wear_the_index_out(policy: str, page_size: int) -> None:
    """Case 28: 20 documents of 256 tokens, room for 25, and 100 shuffled draws of 14.

    Each draw also publishes two pages of its own behind its documents, which nobody needs again.
    """
    draw, corpus, room = random.Random(28), 20 * 256 // page_size, 25 * 256 // page_size
    documents = [[draw.randrange(50_000) for _ in range(256)] for _ in range(20)]
    spans, rest = (Namespace(name).root_key() for name in ("spans", "rest"))
    index = ContentIndex(page_size, eviction_policy=policy)
    requests = Requests(index, room)
    hits: list[int] = []
    for _ in range(100):
        chosen = draw.sample(range(20), 14)
        read = [requests.read(chain(index, documents[n], root=spans)) for n in chosen]
        own = [draw.randrange(50_000) for _ in range(2 * page_size)]
        read.append(requests.read(chain(index, own, [mark(0, n) for n in chosen], rest)))
        hits.append(sum(found for found, _ in read))
        for _, path in read:
            index.unlock(path)
        assert sum(r.page_count for r in index.runs() if r.root_key == spans) <= corpus
        assert index.page_count + len(requests.free) == room
        index.check_invariants()
    warm = hits[20:]
    assert sum(warm[-20:]) >= sum(warm[:20]) > 0
