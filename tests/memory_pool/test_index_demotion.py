"""What the index says of pages before they go, and of pages that are worth keeping."""

from __future__ import annotations

import random
from typing import Any

import pytest
from index_helpers import chain, evict, find, hit, mark, store
from tier_helpers import chain_names

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.lower import PageName
from tessera_sglang.memory_pool.names import run_names
from tessera_sglang.memory_pool.runs import PageIds, Run

PAGE = 4


class Witness:
    """Names, in the order of eviction, with what the run says of them."""

    def __init__(self) -> None:
        self.gone: list[tuple[int, PageName, int, bool]] = []  # page, name, hits, shared
        self.calls = 0

    def __call__(self, run: Run, first: int, page_ids: PageIds) -> None:
        self.calls += 1
        assert run.alive
        assert run.page_ids[first - run.start :].tolist() == page_ids.tolist(), "not gone yet"
        names = run_names(run, PAGE, first, first + len(page_ids))
        pairs = zip(page_ids.tolist(), names, strict=True)
        self.gone += [(page, name, run.hits, run.shared) for page, name in pairs][::-1]

    @property
    def pages(self) -> list[int]:
        return [page for page, *_ in self.gone]


def test_pages_are_named_before_they_go_and_in_that_order() -> None:
    witness = Witness()
    index = ContentIndex(PAGE, on_evict=witness)
    store(index, range(24), range(1, 7))
    store(index, [*range(8), *range(50, 58)], [1, 2, 11, 12])
    gone = evict(index, 3)
    assert gone == witness.pages == [6, 5, 4]
    assert witness.calls == 1
    gone += evict(index, 9)
    assert gone == witness.pages == [6, 5, 4, 3, 12, 11, 2, 1]
    long, short = chain_names(range(24)), chain_names([*range(8), *range(50, 58)])
    expected = [*long[:1:-1], *short[:1:-1], *long[1::-1]]
    assert [name for _, name, *_ in witness.gone] == expected
    index.check_invariants()


def test_held_pages_that_must_go_are_named_too() -> None:
    witness = Witness()
    index = ContentIndex(PAGE, on_evict=witness)
    index.hold(store(index, range(8), [1, 2]))
    assert evict(index, 2) == witness.pages == []
    assert evict(index, 2, break_holds=True) == witness.pages == [2, 1]


def test_marked_pages_are_named_with_their_marks() -> None:
    witness = Witness()
    index = ContentIndex(PAGE, on_evict=witness)
    store(index, range(16), range(4), mark(6))
    evict(index, 4)
    assert [name for _, name, *_ in witness.gone] == chain_names(range(16), mark(6))[::-1]


def test_a_reset_names_nothing() -> None:
    witness = Witness()
    index = ContentIndex(PAGE, on_evict=witness)
    store(index, range(8), [1, 2])
    index.reset()
    assert witness.calls == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
def test_victims_do_not_depend_on_who_looks(policy: str) -> None:
    def replay(on_evict: Any) -> tuple[list[int], bytes]:
        index = ContentIndex(PAGE, eviction_policy=policy, on_evict=on_evict)
        rng = random.Random(3)
        free = list(range(60))
        gone: list[int] = []
        for _ in range(400):
            text = [rng.randrange(2) for _ in range(rng.randrange(1, 8) * PAGE)]
            found = find(index, text)
            need = len(text) // PAGE - len(found)
            if need > len(free):
                index.lock(found)
                went = evict(index, need - len(free))
                index.unlock(found)
                free += went
                gone += went
            own = [*found.page_ids().tolist(), *(free.pop() for _ in range(min(need, len(free))))]
            store(index, text[: len(own) * PAGE], own)
        index.check_invariants()
        return gone, index.eviction_digest

    witness = Witness()
    gone, digest = replay(witness)
    assert len(gone) > 100
    assert (gone, digest) == replay(None)
    assert witness.pages == gone


# --- pages of spans ------------------------------------------------------------------------------


def publish_body(index: ContentIndex, tokens: Any, page_ids: Any) -> None:
    index.publish(chain(index, tokens), list(page_ids), shared=True)


def shared_pages(index: ContentIndex) -> list[int]:
    index.check_invariants()
    return sorted(page for run in index.runs() if run.shared for page in run.page_ids.tolist())


def test_a_body_is_shared_and_what_hangs_below_or_beside_it_is_not() -> None:
    index = ContentIndex(PAGE)
    publish_body(index, range(16), range(1, 5))
    store(index, range(24), range(1, 7))
    store(index, [*range(8), *range(90, 98)], [1, 2, 8, 9])
    assert shared_pages(index) == [1, 2, 3, 4]


def test_a_body_stays_shared_through_cuts_and_trims() -> None:
    index = ContentIndex(PAGE)
    publish_body(index, range(24), range(1, 7))
    for tokens in (12, 4, 20):
        hit(index, range(tokens))
    assert len(list(index.runs())) == 4
    assert shared_pages(index) == [1, 2, 3, 4, 5, 6]
    evict(index, 2)
    assert shared_pages(index) == [1, 2, 3, 4]


def test_pages_that_a_plain_prompt_published_are_shared_once_a_span_finds_them() -> None:
    index = ContentIndex(PAGE)
    store(index, range(24), range(1, 7))
    body = find(index, range(12))
    assert shared_pages(index) == []
    index.share(body)
    assert shared_pages(index) == [1, 2, 3]
    evict(index, 4)
    index.share(body)  # a page of it went: nothing is said of it
    assert shared_pages(index) == [1, 2]
    publish_body(index, range(12), [1, 2, 13])
    assert shared_pages(index) == [1, 2, 13]
    index.reset()
    index.share(body)
    assert shared_pages(index) == []


def test_what_a_page_is_worth_is_known_when_it_goes() -> None:
    witness = Witness()
    index = ContentIndex(PAGE, on_evict=witness)
    publish_body(index, range(8), [1, 2])
    publish_body(index, range(8), [1, 2])
    store(index, range(50, 58), [3, 4])
    evict(index, 4)
    assert [(page, hits, shared) for page, _, hits, shared in witness.gone] == [
        (2, 2, True),
        (1, 2, True),
        (4, 1, False),
        (3, 1, False),
    ]


def test_a_run_of_the_root_key_only_is_not_shared() -> None:
    """A body of which nothing could be published leaves nothing behind."""
    index = ContentIndex(PAGE)
    published = index.publish(chain(index, range(3)), [], shared=True)
    assert published.pages == 0
    assert shared_pages(index) == []
