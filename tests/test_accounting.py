"""What is counted of a request: once, only what somebody asked, and never more hits than tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine import KNOWN, PAGE, Engine
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats
from sglang.srt.observability.metrics_collector import QueueCount

from tessera_sglang.accounting import account, correct_prefill_stats, count_asked
from tessera_sglang.intake import SPAN_PREFILL


@pytest.fixture
def engine() -> Engine:
    return Engine()


def schedule(engine: Engine, *reqs: Req) -> None:
    """What ``ScheduleBatch.prepare_for_extend`` counts, and then the hook behind it."""
    for req in reqs:
        if not req.retracted_stain:
            req.cached_tokens += req.prefix_len - req.already_computed
            req.cached_tokens_device = req.cached_tokens
            req.already_computed = len(req.full_untruncated_fill_ids)
    assert account("result", SimpleNamespace(tree_cache=engine.cache, reqs=reqs)) == "result"


def read(engine: Engine) -> dict[str, int]:
    traffic = engine.cache.traffic
    return {name: getattr(traffic, name) for name in type(traffic).__slots__}


def reader(req: Req, *, shared: int, computed: int) -> Req:
    """``req`` reads ``shared`` tokens of spans; prefills for it computed ``computed`` of them."""
    req.tessera_reader = SimpleNamespace(
        layout=SimpleNamespace(shared_tokens=shared), computed_tokens=computed
    )
    return req


def test_a_plain_request_counts_its_prompt_and_what_was_cached(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = engine.arrive([*KNOWN, 1, 2])
    schedule(engine, req)
    assert read(engine) == {
        "lookup": len(KNOWN) + 2,
        "prefix_hit": len(KNOWN),
        "span_hit": 0,
        "forked": 0,
        "span_prefills": 0,
    }


def test_forked_rows_are_prefix_hits_and_count_when_they_are_used(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = engine.arrive(KNOWN[: 2 * PAGE + 9] + [1] * 20)
    assert engine.fork(req) == 9
    assert engine.cache.traffic.forked == 0, "it may still be turned down"
    schedule(engine, req)
    traffic = read(engine)
    assert (traffic["prefix_hit"], traffic["forked"]) == (2 * PAGE + 9, 9)


def test_a_second_chunk_and_a_retraction_count_nothing(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = engine.arrive([*KNOWN, 1, 2])
    schedule(engine, req)
    before = read(engine)
    req.prefix_len = req.already_computed
    schedule(engine, req)
    req.retracted_stain = True
    req.already_computed = 0
    schedule(engine, req)
    assert read(engine) == before
    assert req.cached_tokens == len(KNOWN)


@pytest.mark.parametrize(
    ("computed", "found"), [(0, 3 * PAGE), (2 * PAGE, PAGE), (3 * PAGE, 0), (9 * PAGE, 0)]
)
def test_what_was_computed_for_a_reader_is_no_hit(
    engine: Engine, computed: int, found: int
) -> None:
    req = engine.arrive([7] * (5 * PAGE))
    req.prefix_len = 4 * PAGE  # three pages of spans, and one of the remaining tokens
    schedule(engine, reader(req, shared=3 * PAGE, computed=computed))
    traffic = read(engine)
    assert (traffic["lookup"], traffic["span_hit"]) == (5 * PAGE, found)
    assert traffic["prefix_hit"] == PAGE
    assert req.cached_tokens == req.cached_tokens_device == found + PAGE


def asked_by_nobody(req: Req) -> Req:
    setattr(req, SPAN_PREFILL, True)
    return req


def a_health_check(req: Req) -> Req:
    req.rid = "HEALTH_CHECK_17"
    return req


def refused(req: Req) -> Req:
    req.to_finish = object()  # SGLang's FINISH_ABORT
    return req


@pytest.mark.parametrize("made", [asked_by_nobody, a_health_check, refused])
def test_what_nobody_asked_or_got_is_not_counted(engine: Engine, made: Any) -> None:
    engine.serve(KNOWN, 5.0)
    schedule(engine, made(engine.arrive([*KNOWN, 1])))
    traffic = read(engine)
    assert traffic.pop("span_prefills") == (made is asked_by_nobody)
    assert not any(traffic.values()), traffic


def test_another_tree_counts_nothing(engine: Engine) -> None:
    req = engine.arrive(KNOWN)
    assert account("result", SimpleNamespace(tree_cache=object(), reqs=[req])) == "result"
    assert not any(read(engine).values())


# --- SGLang's own metrics ------------------------------------------------------------------------


def stats_of(*reqs: Req) -> PrefillStats:
    """As SGLang makes them: the whole prefix of a row is a hit."""
    stats = PrefillStats(
        log_input_tokens=sum(len(r.full_untruncated_fill_ids) - r.prefix_len for r in reqs),
        log_hit_tokens=sum(r.prefix_len for r in reqs),
        log_device_hit_tokens=sum(r.prefix_len for r in reqs),
        new_token_ratio=1.0,
        num_running_reqs=QueueCount(),
        num_new_seqs=len(reqs),
    )
    found: PrefillStats = correct_prefill_stats(
        stats, PrefillStats, SimpleNamespace(can_run_list=list(reqs))
    )
    return found


def test_sglang_counts_no_hit_for_what_was_computed_either(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    plain = engine.arrive([*KNOWN, 1, 2])
    cold = engine.arrive([7] * (5 * PAGE))
    cold.prefix_len = 3 * PAGE
    reader(cold, shared=3 * PAGE, computed=2 * PAGE)
    hidden = asked_by_nobody(engine.arrive([*KNOWN, 3]))
    schedule(engine, plain, cold, hidden)
    stats = stats_of(plain, cold, hidden)
    hits = len(KNOWN) + PAGE
    assert stats.log_hit_tokens == stats.log_device_hit_tokens == hits
    traffic = read(engine)
    assert hits == traffic["prefix_hit"] + traffic["span_hit"]
    plain.prefix_len = cold.prefix_len = 0  # their next chunks
    assert stats_of(plain, cold).log_hit_tokens == 0


def test_queues_are_as_long_as_what_somebody_asked(engine: Engine) -> None:
    reqs = [engine.arrive([number]) for number in range(3)]
    asked_by_nobody(reqs[1])
    original = QueueCount.__dict__["from_reqs"].__func__
    original = getattr(original, "__wrapped__", original)
    assert count_asked(original, QueueCount, reqs).total == 2
    assert count_asked(original, QueueCount, reqs[:1], False).total == 1
    assert len(reqs) == 3, "the queue itself is left as it is"
