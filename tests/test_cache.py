"""The cache between SGLang's real pools and the index: rows, pages and latents of single requests."""

from __future__ import annotations

from typing import Any

import pytest
from engine import KNOWN, LAYERS, PAGE, Engine, pages_of
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from tessera_sglang.cache import TesseraCache


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_fork_copies_the_equal_rows_of_all_layers(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = engine.arrive(KNOWN[: 2 * PAGE + 9] + [1] * 20)
    assert (req.prefix_len, req.host_hit_length) == (2 * PAGE, 9)
    assert engine.fork(req) == 9
    engine.start(req)
    rows = engine.row(req)[2 * PAGE : 2 * PAGE + 9].long()
    for layer in range(LAYERS):
        assert (engine.kv.kv_buffer[layer][rows] == 5.0 + layer).all()
    assert rows.tolist() == list(range(int(rows[0]), int(rows[0]) + 9))
    assert req.host_hit_length == 0, "reported as what the device had"
    engine.check()


def test_what_a_fork_writes_is_its_own(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = engine.arrive(KNOWN[: 2 * PAGE + 9] + [1] * 20)
    engine.fork(req)
    engine.start(req)
    engine.compute(req, 7.0)
    engine.finish(req)
    engine.check()
    again = engine.arrive([*KNOWN, 1])
    assert again.prefix_len == 4 * PAGE
    assert set(engine.latents(engine.cache.path_device_indices(again.last_node))) == {
        5.0 + LAYERS - 1
    }
    forked = engine.arrive(KNOWN[: 2 * PAGE + 9] + [1] * 20 + [2])
    slots = engine.cache.path_device_indices(forked.last_node)
    wanted = [5.0 + LAYERS - 1] * (2 * PAGE + 9) + [7.0 + LAYERS - 1] * (PAGE - 9)
    assert engine.latents(slots)[: 3 * PAGE] == wanted


@pytest.mark.parametrize("rows", [1, PAGE // 8 - 1])
def test_a_few_rows_are_computed(engine: Engine, rows: int) -> None:
    engine.serve(KNOWN, 5.0)
    assert engine.arrive(KNOWN[: PAGE + rows] + [1] * 20).host_hit_length == 0


def test_a_source_that_was_evicted_meanwhile_is_not_read(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = engine.arrive(KNOWN[: 3 * PAGE + 9] + [1] * 20)
    assert req.host_hit_length == 9
    engine.cache.evict(EvictParams(num_tokens=PAGE))
    assert engine.fork(req) == 0
    assert req.prefix_len == 3 * PAGE
    engine.check()


def test_a_fork_without_room_is_computed() -> None:
    """The only page that could go is the source itself: it goes, and its rows are not read."""
    engine = Engine(pages=4)
    engine.serve(KNOWN, 5.0)
    req = engine.arrive(KNOWN[: 3 * PAGE + 9] + [1] * 20)
    assert engine.fork(req) == 0
    assert engine.allocator.available_size() == PAGE
    engine.check()


def test_a_forked_request_that_is_aborted_gives_its_page_back(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    free = engine.allocator.available_size()
    req = engine.arrive(KNOWN[: 2 * PAGE + 9] + [1] * 20)
    engine.fork(req)
    engine.start(req)
    engine.finish(req, publish=False)
    assert engine.allocator.available_size() == free
    engine.check()


def test_the_row_points_at_the_sealed_pages_before_the_copies_are_freed(engine: Engine) -> None:
    """Case 2."""
    first, second = engine.arrive(KNOWN), engine.arrive(KNOWN)
    for req in (first, second):
        engine.start(req)
        engine.compute(req, 5.0)
    engine.cache.checkpoint(first, up_to=len(KNOWN))
    own = pages_of(engine.row(second), len(KNOWN))
    engine.cache.checkpoint(second, up_to=len(KNOWN))
    assert pages_of(engine.row(second), len(KNOWN)) == pages_of(engine.row(first), len(KNOWN))
    third = engine.arrive([9] * 4 * PAGE)
    engine.start(third)
    engine.compute(third, 99.0)
    while engine.allocator.available_size():
        engine.allocator.alloc(PAGE)
    assert set(own).isdisjoint(pages_of(engine.row(second), len(KNOWN)))
    assert set(engine.latents(engine.row(second)[: len(KNOWN)])) == {5.0 + LAYERS - 1}
    engine.cache.index.check_invariants()


def test_publishing_twice_changes_nothing(engine: Engine) -> None:
    """Case 5."""
    req = engine.arrive(KNOWN[: 2 * PAGE + 3])
    engine.start(req)
    engine.compute(req, 5.0)
    seen = []
    for _ in range(2):
        engine.cache.checkpoint(req, up_to=2 * PAGE + 3)
        seen.append((engine.cache.paged_tier(), engine.row(req)[: 2 * PAGE + 3].tolist()))
        engine.check()
    assert seen[0] == seen[1]
    assert req.kv.cache_protected_len == 2 * PAGE


def test_a_request_counts_once_however_often_it_is_published(engine: Engine) -> None:
    req = engine.arrive(KNOWN)
    engine.start(req)
    engine.compute(req, 5.0)
    for up_to in (PAGE, 3 * PAGE, 4 * PAGE):
        engine.cache.checkpoint(req, up_to=up_to)
    assert {run.hits for run in engine.cache.index.runs()} == {1}
    engine.finish(req)
    engine.serve([*KNOWN, 1], 5.0)
    assert {run.hits for run in engine.cache.index.runs()} == {2}


def test_pages_whose_latents_differ_stay_private() -> None:
    engine = Engine(verify_latents=True)
    first, second = engine.arrive(KNOWN), engine.arrive(KNOWN)
    for req, value in ((first, 5.0), (second, 6.0)):
        engine.start(req)
        engine.compute(req, value)
    engine.kv.kv_buffer[LAYERS - 1][engine.row(second)[: 2 * PAGE].long()] = 5.0 + LAYERS - 1
    for layer in range(LAYERS - 1):
        engine.kv.kv_buffer[layer][engine.row(second)[: 2 * PAGE].long()] = 5.0 + layer
    engine.cache.checkpoint(first, up_to=len(KNOWN))
    own = pages_of(engine.row(second), len(KNOWN))
    engine.cache.checkpoint(second, up_to=len(KNOWN))
    sealed = pages_of(engine.row(first), len(KNOWN))
    assert pages_of(engine.row(second), len(KNOWN)) == sealed[:2] + own[2:]
    assert second.kv.cache_protected_len == 2 * PAGE
    counters = engine.cache.index.counters
    assert (counters.latent_divergence, counters.collisions) == (1, 0)
    third = engine.arrive([*KNOWN, 1])
    slots = engine.cache.path_device_indices(third.last_node)
    assert set(engine.latents(slots)) == {5.0 + LAYERS - 1}
    engine.finish(first)
    engine.finish(second)
    engine.check()


def test_latents_of_a_pool_that_is_not_known_can_not_be_compared() -> None:
    class Other(MLATokenToKVPool):
        pass

    engine = Engine()
    engine.kv.__class__ = Other
    params: Any = type("Params", (), {})()
    params.__dict__.update(
        req_to_token_pool=engine.rows,
        token_to_kv_pool_allocator=engine.allocator,
        page_size=PAGE,
        eviction_policy="lru",
        eviction_policy_config=None,
        enable_metrics=False,
    )
    with pytest.raises(ValueError, match='verify "latents" can not read the pages'):
        TesseraCache(params, model_identity="test", verify_latents=True)
    cache = TesseraCache(params, model_identity="test")
    assert cache.memory is None
