"""The parts of a batch express exactly the visibility that spans promise."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_sglang.attention.layout import ContextLayout, Span, lay_out
from tessera_sglang.attention.plan import Part, Plan, RequestQueries, build_plan


@dataclass(frozen=True)
class Request:
    """What a caller declares, and nothing that is derived from it."""

    spans: tuple[Span, ...]
    prompt: int
    page: int
    root: int
    link: int

    def layout(self) -> ContextLayout | None:
        return lay_out(
            self.spans,
            prompt_tokens=self.prompt,
            page_size=self.page,
            root_tokens=self.root,
            linked_pages=self.link,
        )

    def shared_runs(self) -> list[tuple[int, int, int]]:
        """(start of the span, first and one-past-last prompt position of its shared pages)."""
        runs = []
        for span in self.spans:
            length = span.end - span.start - (span.end == self.prompt)
            first = span.start + self.link * self.page
            last = span.start + length // self.page * self.page
            if first < last:
                runs.append((span.start, first, last))
        return runs


Seen = tuple[int, int]  # prompt position of a key, and by how much the query is turned for it


def visibility(request: Request, position: int) -> set[Seen]:
    """The design's sentence: a remaining token sees every earlier remaining token (and itself), and
    every span's shared run that ends at or before its own prompt position."""
    runs = request.shared_runs()
    inside = {p for _, first, last in runs for p in range(first, last)}
    assert position not in inside, "body tokens are no queries"
    seen = {(p, 0) for p in range(position + 1) if p not in inside}
    for start, first, last in runs:
        if last <= position:
            seen |= {(p, request.root - start) for p in range(first, last)}
    return seen


def rows(part: Part, query: int) -> range:
    """Row positions that a query of the batch reads in a part."""
    count = part.key_end - part.key_start
    if part.causal_from is not None:
        count = min(count, part.causal_from + query - part.query_start + 1)
    return range(part.key_start, part.key_start + count)


def check(plan: Plan, batch: list[tuple[Request, RequestQueries]]) -> None:
    """Expand every part to (query, key) pairs and compare with the promise."""
    seen: dict[int, list[Seen]] = {}
    for part in plan.parts:
        assert part.query_start < part.query_end
        request, queries = batch[part.request]
        for query in range(part.query_start, part.query_end):
            assert part.merge == (query in seen), "the first part of a query does not merge"
            pairs = seen.setdefault(query, [])
            for row in rows(part, query):
                position = (
                    int(queries.layout.prompt_positions(row, row + 1)[0]) if queries.layout else row
                )
                pairs.append((position, part.rotation))
    total = 0
    for request, queries in batch:
        first_row = queries.seq_tokens - queries.query_tokens
        for number in range(queries.query_tokens):
            query, row = queries.query_start + number, first_row + number
            position = (
                int(queries.layout.prompt_positions(row, row + 1)[0]) if queries.layout else row
            )
            pairs = seen[query]
            assert len(pairs) == len(set(pairs)), "no key is counted twice"
            assert set(pairs) == visibility(request, position)
        total += queries.query_tokens
    assert plan.query_tokens == total == len(seen)


@st.composite
def any_request(draw: st.DrawFn, page: int, root: int, link: int) -> Request:
    cuts = sorted(draw(st.sets(st.integers(0, 30), max_size=8)))
    adjacent = draw(st.booleans())
    pairs = itertools.pairwise(cuts) if adjacent else zip(*[iter(cuts)] * 2, strict=False)
    spans = tuple(Span(*pair) for pair in pairs)
    prompt = max(cuts[-1] if cuts else 0, 1) + draw(st.integers(0, 4))
    return Request(spans, prompt, page, root, link)


@st.composite
def batches(draw: st.DrawFn) -> list[list[tuple[Request, RequestQueries]]]:
    """Forward passes that take a few requests from their shared pages to generated tokens."""
    page, link, root_pages = (draw(st.integers(low, 3)) for low in (1, 0, 0))
    requests = draw(st.lists(any_request(page, root_pages * page, link), min_size=1, max_size=3))
    layouts = [request.layout() for request in requests]
    done = [layout.shared_tokens if layout else 0 for layout in layouts]
    passes: list[list[tuple[Request, RequestQueries]]] = []
    while any(d < r.prompt + 2 for d, r in zip(done, requests, strict=True)):
        batch: list[tuple[Request, RequestQueries]] = []
        start = 0
        for number, request in enumerate(requests):
            left = request.prompt - done[number]
            tokens = draw(st.integers(0 if passes else 1, left)) if left > 1 else 1
            done[number] += tokens
            queries = RequestQueries(start, tokens, done[number], layouts[number])
            batch.append((request, queries))
            start += tokens
        passes.append(batch)
    return passes


@settings(deadline=None)
@given(batches())
def test_every_chunking_of_every_batch_expresses_the_promised_visibility(
    passes: list[list[tuple[Request, RequestQueries]]],
) -> None:
    for batch in passes:
        check(build_plan([queries for _, queries in batch]), batch)


# --- written down --------------------------------------------------------------------------------

ONE = Request((Span(2, 10),), prompt=14, page=4, root=4, link=0)


def parts(plan: Plan) -> list[tuple[int, int, int, int, int | None, int, bool]]:
    return [
        (
            p.query_start,
            p.query_end,
            p.key_start,
            p.key_end,
            p.causal_from,
            p.rotation,
            p.merge,
        )
        for p in plan.parts
    ]


def test_a_plain_request_is_one_causal_part() -> None:
    plan = build_plan([RequestQueries(0, 5, 12, None)])
    assert parts(plan) == [(0, 5, 0, 12, 7, 0, False)]
    assert plan.shared_queries == ()


def test_a_plain_decode_is_one_full_part() -> None:
    plan = build_plan([RequestQueries(0, 1, 12, None), RequestQueries(1, 1, 1, None)])
    assert parts(plan) == [
        (0, 1, 0, 12, None, 0, False),
        (1, 2, 0, 1, None, 0, False),
    ]
    assert [part.request for part in plan.parts] == [0, 1]


def test_queries_behind_a_span_have_a_second_part_turned_to_it() -> None:
    plan = build_plan([RequestQueries(10, 6, 14, ONE.layout())])
    assert parts(plan) == [
        (10, 16, 8, 14, 0, 0, False),
        (12, 16, 0, 8, None, 4 - 2, True),
    ]
    assert plan.shared_queries == ((10, 16),)


def test_a_chunk_before_a_span_has_one_part() -> None:
    plan = build_plan([RequestQueries(0, 2, 10, ONE.layout())])
    assert parts(plan) == [(0, 2, 8, 10, 0, 0, False)]
    assert plan.shared_queries == ()


def test_a_decode_sees_every_run() -> None:
    two = Request((Span(0, 4), Span(4, 12)), prompt=14, page=4, root=0, link=1)
    plan = build_plan([RequestQueries(3, 1, 20, two.layout())])
    assert parts(plan) == [
        (3, 4, 4, 20, None, 0, False),
        (3, 4, 0, 4, None, -4, True),
    ]
    assert plan.shared_queries == ((3, 4),)


def test_the_same_document_twice_is_two_runs_with_their_own_rotation() -> None:
    twice = Request((Span(0, 4), Span(6, 10)), prompt=12, page=4, root=8, link=0)
    plan = build_plan([RequestQueries(0, 1, 12, twice.layout())])
    assert [part.rotation for part in plan.parts] == [0, 8, 2]


def test_a_request_without_new_tokens_has_no_part() -> None:
    layout = ONE.layout()
    plan = build_plan([RequestQueries(0, 0, 9, layout), RequestQueries(0, 2, 10, layout)])
    assert {part.request for part in plan.parts} == {1}
    assert build_plan([]) == Plan((), 0, ())


def test_parts_of_a_request_follow_each_other() -> None:
    """Kernels write the first part and merge the rest, so order is part of the plan."""
    layout = ONE.layout()
    plan = build_plan([RequestQueries(2 * n, 2, 14, layout) for n in range(3)])
    order = [part.request for part in plan.parts]
    assert order == sorted(order)
    for _, group in itertools.groupby(plan.parts, key=lambda part: part.request):
        assert [part.merge for part in group] == [False, True]
