"""The measuring infrastructure: what is read of runs, and what counting says of requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.latency import Kind, Pair
from benchmarks.rag.results import Curve, Steady, compared, report
from benchmarks.rag.spans import digests, own_tokens, shared_pages, stored_pages
from benchmarks.rag.suite import drawn
from benchmarks.serving import bound, table
from benchmarks.serving.compare import Comparison
from benchmarks.serving.replay import hit_rates
from benchmarks.serving.run import Run, read
from benchmarks.serving.state import State
from benchmarks.workloads.rag import Shape
from tessera_sglang.bench.agents import Request
from tessera_sglang.bench.metrics import Metrics
from tessera_sglang.demo.client import Answer, CacheState

GEOMETRY = bound.Geometry(page_tokens=64, link_pages=1, root_tokens=64)
STATE = State(64, 1, 64, 8192, 0, 1000, 10, 20, 1, 5, 2)
METRICS = Metrics(100.0, 10.0, 0.1, 0.2, 0.01, 0.01, 0.5, 2, 1000, 16, 3.0, cached_tokens=500)
RUN = Run(2, 1000, 0, 1000, 0, 0, 0, None, 1000, 8.0, 0.1, 0.2, 0.01, 100.0)


def request(prompt: int, *spans: tuple[int, int], first: int = 0) -> Request:
    return Request(tuple(range(first, first + prompt)), spans, 8)


def answer(cached: int, prompt: int = 100, ttft_s: float = 0.1) -> Answer:
    return Answer(prompt, cached, ttft_s, "")


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_is_what_was_counted_between_two_looks() -> None:
    after = replace(
        STATE,
        held_tokens=640,
        computed_tokens=1600,
        prefix_hit_tokens=110,
        span_hit_tokens=420,
        span_prefills=3,
        evicted_pages=2,
    )
    run = read(METRICS, STATE, after)
    assert (run.computed_tokens, run.held_tokens, run.span_prefills) == (600, 640, 2)
    assert (run.prefix_hit_share, run.span_hit_share, run.cached_share) == (0.1, 0.4, 0.5)
    assert run.evicted_pages == 0


def test_all_hits_of_the_tree_are_prefixes() -> None:
    before = replace(STATE, prefix_hit_tokens=None, span_hit_tokens=None, evicted_pages=None)
    run = read(METRICS, before, replace(before, computed_tokens=1500))
    assert (run.prefix_hit_tokens, run.span_hit_tokens, run.evicted_pages) == (500, 0, None)


def test_ratios_are_of_medians_and_none_by_nothing() -> None:
    stock = tuple(replace(RUN, wall_s=wall) for wall in (9.0, 8.0, 100.0))
    tessera = tuple(replace(RUN, wall_s=wall) for wall in (1.0, 3.0, 0.5))
    found = Comparison(stock, tessera)
    assert found.ratio("wall_s") == pytest.approx(1 / 9)
    assert found.ratio("cached_tokens") is None
    assert found.spread("tessera", "wall_s") == 5.0
    assert table.figures(found)["ratio"]
    assert "0.1111" in table.compared("title", found).render()


def test_hit_rates_are_of_tokens_not_of_requests() -> None:
    answers = [answer(100, 100), answer(0, 300), answer(50, 100)]
    assert hit_rates(answers, 2) == [0.25, 0.5]


# --- counting ------------------------------------------------------------------------------------


def test_pairs_are_those_of_a_mask() -> None:
    """Counted one by one, as the design says who sees whom."""
    made = request(500, (30, 260), (300, 450))
    body, linked = (192, 128), 64
    shared = {*range(30 + linked, 30 + 192), *range(300 + linked, 300 + 128)}
    remaining = [t for t in range(500) if t not in shared]
    pairs = sum(position + 1 for position in remaining)
    pairs += sum(range(64 + 1))  # the root sees itself
    pairs += sum(64 + position + 1 for tokens in body for position in range(tokens))
    work = bound.shared([made], GEOMETRY)
    assert work == bound.Work(len(remaining) + 64 + sum(body), pairs, 3)


def test_a_span_is_computed_once_for_all_and_a_short_one_by_everybody() -> None:
    two = [request(400, (10, 300)), request(400, (10, 300))]
    one = bound.shared(two[:1], GEOMETRY)
    own = 400 - 192
    assert bound.shared(two, GEOMETRY).tokens == one.tokens + own
    short = [request(200, (10, 100))] * 2
    assert bound.shared(short, GEOMETRY) == bound.whole(short)


def test_fitted_costs_are_those_that_made_the_times() -> None:
    cost = bound.Cost(token_s=2e-4, pair_s=3e-9, request_s=5e-3)
    works = [bound.whole([request(n)] * k) for n, k in ((1000, 1), (1000, 16), (9000, 2))]
    works.append(bound.whole([request(30_000)]))
    found = bound.fit(works, [cost.of(work) for work in works])
    assert found.token_s == pytest.approx(cost.token_s)
    assert found.pair_s == pytest.approx(cost.pair_s)
    assert found.request_s == pytest.approx(cost.request_s)


def test_no_cost_is_negative() -> None:
    works = [bound.Work(1000, 500_000, 1), bound.Work(2000, 2_000_000, 1), bound.Work(4000, 0, 9)]
    found = bound.fit(works, [1.0, 1.9, 4.5])
    assert min(found.token_s, found.pair_s, found.request_s) >= 0
    with pytest.raises(ValueError, match="three"):
        bound.fit(works[:2], [1.0, 2.0])


# --- retrieval -----------------------------------------------------------------------------------


def test_copies_of_a_document_are_counted_as_pages() -> None:
    corpus = [list(range(200)), list(range(500, 628))]
    known = digests(corpus)
    assert len(known) == shared_pages(corpus) == 3
    some = sorted(known)
    assert digests([list(range(64))]) == set(), "a linked page is nobody's copy"
    state = CacheState(64, 0, ((some[0], 1), (some[0], 2), (some[1], 3), ("other", 4)))
    assert stored_pages(state, known) == 3


def test_what_is_asked_again_differs_before_its_first_document_alone() -> None:
    shape = Shape(documents=6, document_tokens=(90, 200), documents_per_draw=(3, 3))
    made = drawn(shape, 10, lambda text: list(text.encode()))
    assert len(made) == 10
    for once, again in zip(made[:4], made[6:], strict=True):
        start = once.spans[0][0]
        assert again.spans == once.spans
        assert again.input_ids[start:] == once.input_ids[start:]
        assert again.input_ids[0] != once.input_ids[0]


def test_a_request_has_to_itself_what_is_not_shared() -> None:
    assert own_tokens(request(400, (10, 300))) == 400 + 8 - 192


def test_a_cache_that_wears_out_fails() -> None:
    fresh = [answer(80)] * 60
    worn = [*[answer(80)] * 40, *[answer(70)] * 20]
    assert compared(worn) == (0.8, 0.7)
    curve = Curve(Shape(), 8192, 32_768, tuple(fresh), tuple(fresh[:10]))
    stored = (5,) * 12
    assert report(Steady(tuple(fresh), stored, 5, 320, stored), curve).holds
    verdicts = report(Steady(tuple(worn), (6,) * 12, 5, 320, stored), curve).checks
    assert [check.holds for check in verdicts] == [False, False, True]
    late = replace(curve, tessera=tuple(worn))
    assert not report(Steady(tuple(fresh), stored, 5, 320, stored), late).checks[2].holds


# --- latency -------------------------------------------------------------------------------------


def test_a_pair_compares_medians() -> None:
    of = Kind("span", "tessera", lambda: ([], []))
    by = Kind("prefix", "stock", lambda: ([], []))
    of.answers += [answer(0, ttft_s=t) for t in (0.3, 0.2, 9.0)]
    by.answers += [answer(0, ttft_s=t) for t in (0.1, 0.2, 0.15)]
    assert Pair("", of, by, 1.15).ratio == pytest.approx(2.0)
