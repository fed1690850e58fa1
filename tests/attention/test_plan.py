"""The parts of a batch express exactly the visibility that spans promise."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_sglang.attention.layout import ContextLayout, Span, lay_out
from tessera_sglang.attention.plan import (
    PRIVATE,
    STACKED_ROWS,
    BatchQueries,
    Launch,
    Plan,
    PlanCache,
    build_plan,
)


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


@dataclass(frozen=True)
class Pair:
    """What a plan lets a query see: whose row position, and how far the query is turned for it."""

    query: int
    request: int
    row: int
    rotation: int


def pairs(launch: Launch) -> list[Pair]:
    found = []
    for part in range(launch.parts):
        first, last = launch.query_indptr[part], launch.query_indptr[part + 1]
        pieces = launch.pieces[launch.piece_indptr[part] : launch.piece_indptr[part + 1]]
        keys = [(int(r), row) for r, start, end in pieces for row in range(start, end)]
        assert len(keys) == launch.key_indptr[part + 1] - launch.key_indptr[part]
        for number, stacked in enumerate(range(first, last)):
            query = stacked if launch.query_index is None else int(launch.query_index[stacked])
            turn = 0 if launch.rotation is None else int(launch.rotation[stacked])
            seen = len(keys) - int(last - first) + number + 1 if launch.causal else len(keys)
            found += [Pair(query, request, row, turn) for request, row in keys[:seen]]
    return found


def check(plan: Plan, batch: list[tuple[Request, ContextLayout | None, int, int]]) -> None:
    """Expand every part to (query, key) pairs and compare with the promise.

    Parts of shared runs read the rows of one of their readers, so requests with equal ``sources`` are
    taken to have equal pages; here every run is private.
    """
    seen: dict[int, list[tuple[int, Seen]]] = {}
    for launch in (plan.own, *plan.spans):
        for pair in pairs(launch):
            layout = batch[pair.request][1]
            position = (
                int(layout.prompt_positions(pair.row, pair.row + 1)[0]) if layout else pair.row
            )
            seen.setdefault(pair.query, []).append((pair.request, (position, pair.rotation)))
    query = 0
    for number, (request, layout, tokens, length) in enumerate(batch):
        for row in range(length - tokens, length):
            position = int(layout.prompt_positions(row, row + 1)[0]) if layout else row
            assert {owner for owner, _ in seen[query]} == {number}
            keys = [key for _, key in seen[query]]
            assert len(keys) == len(set(keys)), "no key is counted twice"
            assert set(keys) == visibility(request, position)
            query += 1
    assert plan.query_tokens == query == len(seen)
    assert plan.single == all(tokens <= 1 for *_, tokens, _ in batch)


@st.composite
def any_request(draw: st.DrawFn, page: int, root: int, link: int) -> Request:
    cuts = sorted(draw(st.sets(st.integers(0, 30), max_size=8)))
    adjacent = draw(st.booleans())
    pairs = itertools.pairwise(cuts) if adjacent else zip(*[iter(cuts)] * 2, strict=False)
    spans = tuple(Span(*pair) for pair in pairs)
    prompt = max(cuts[-1] if cuts else 0, 1) + draw(st.integers(0, 4))
    return Request(spans, prompt, page, root, link)


Batch = list[tuple[Request, ContextLayout | None, int, int]]  # new tokens, length of the row


@st.composite
def batches(draw: st.DrawFn) -> list[Batch]:
    """Forward passes that take a few requests from their shared pages to generated tokens."""
    page, link, root_pages = (draw(st.integers(low, 3)) for low in (1, 0, 0))
    requests = draw(st.lists(any_request(page, root_pages * page, link), min_size=1, max_size=3))
    layouts = [request.layout() for request in requests]
    done = [layout.shared_tokens if layout else 0 for layout in layouts]
    passes: list[Batch] = []
    while any(d < r.prompt + 2 for d, r in zip(done, requests, strict=True)):
        batch: Batch = []
        for number, request in enumerate(requests):
            left = request.prompt - done[number]
            tokens = draw(st.integers(0 if passes else 1, left)) if left > 1 else 1
            done[number] += tokens
            batch.append((request, layouts[number], tokens, done[number]))
        passes.append(batch)
    return passes


def plan_of(batch: Batch, stacked_rows: int = STACKED_ROWS) -> Plan:
    queries = BatchQueries.of([b[2] for b in batch], [b[3] for b in batch], [b[1] for b in batch])
    return build_plan(queries, stacked_rows=stacked_rows)


@settings(deadline=None)
@given(batches(), st.sampled_from([1, 3, STACKED_ROWS]))
def test_every_chunking_of_every_batch_expresses_the_promised_visibility(
    passes: list[Batch], stacked_rows: int
) -> None:
    for batch in passes:
        check(plan_of(batch, stacked_rows), batch)


@settings(deadline=None)
@given(batches())
def test_steps_and_tables_merge_every_stacked_row_once(passes: list[Batch]) -> None:
    for batch in passes:
        plan = plan_of(batch)
        for launch in plan.spans:
            assert launch.query_index is not None
            wanted = sorted(zip(range(launch.rows), launch.query_index.tolist(), strict=True))
            found = []
            for step in launch.merge_steps():
                rows = np.arange(launch.rows)[step.rows].tolist()
                queries = np.arange(plan.query_tokens)[step.queries].tolist()
                assert len(set(queries)) == len(queries), "a query occurs once in a step"
                found += list(zip(rows, queries, strict=True))
            assert sorted(found) == wanted
            table = launch.merge_table(plan.query_tokens)
            in_table = [
                (row, q) for q in range(len(table)) for row in table[q] if row < launch.rows
            ]
            assert sorted(in_table) == wanted


# --- written down --------------------------------------------------------------------------------

ONE = Request((Span(2, 10),), prompt=14, page=4, root=4, link=0)


def test_a_plain_batch_is_one_causal_launch_of_one_part_a_request() -> None:
    plan = build_plan(BatchQueries.of([5, 2], [12, 2], [None, None]))
    assert plan.spans == ()
    assert plan.own.causal
    assert plan.own.query_index is None
    assert plan.own.rotation is None
    assert plan.own.query_indptr.tolist() == [0, 5, 7]
    assert plan.own.pieces.tolist() == [[0, 0, 12], [1, 0, 2]]


def test_a_plain_decode_needs_no_mask() -> None:
    plan = build_plan(BatchQueries.of([1, 1], [12, 1], [None, None]))
    assert plan.single
    assert not plan.own.causal
    assert plan.own.pieces.tolist() == [[0, 0, 12], [1, 0, 1]]


def test_queries_behind_a_span_have_a_second_part_turned_to_it() -> None:
    plan = build_plan(BatchQueries.of([10, 6], [10, 14], [None, ONE.layout()]))
    assert plan.own.pieces.tolist() == [[0, 0, 10], [1, 8, 14]]
    (spans,) = plan.spans
    assert not spans.causal
    assert spans.pieces.tolist() == [[1, 0, 8]]
    assert spans.query_index is not None
    assert spans.query_index.tolist() == [12, 13, 14, 15]
    assert spans.rotation is not None
    assert spans.rotation.tolist() == [4 - 2] * 4


def test_a_chunk_before_a_span_has_one_part() -> None:
    plan = build_plan(BatchQueries.of([2], [10], [ONE.layout()]))
    assert plan.own.pieces.tolist() == [[0, 8, 10]]
    assert plan.spans == ()


def test_a_run_that_needs_no_rotation_is_one_part_with_the_tokens_behind_it() -> None:
    """A span that stands in the prompt where its body was computed, such as a first system block."""
    first = Request((Span(0, 9), Span(9, 14)), prompt=16, page=4, root=0, link=0).layout()
    plan = build_plan(BatchQueries.of([1], [20], [first]))
    assert plan.own.parts == 1
    assert plan.own.pieces.tolist() == [[0, 0, 8], [0, 12, 20]]
    (spans,) = plan.spans
    assert spans.pieces.tolist() == [[0, 8, 12]]
    # Not where some of the queries stand before it: they must not see it.
    behind = Request((Span(4, 12),), prompt=16, page=4, root=4, link=0).layout()
    plan = build_plan(BatchQueries.of([8], [16], [behind]))
    assert plan.own.pieces.tolist() == [[0, 8, 16]]
    assert plan.spans[0].rotation is not None
    assert plan.spans[0].rotation.tolist() == [0] * 4


def test_the_same_document_twice_is_two_parts_with_their_own_rotation() -> None:
    twice = Request((Span(0, 4), Span(6, 10)), prompt=12, page=4, root=8, link=0)
    plan = build_plan(BatchQueries.of([1], [12], [twice.layout()]))
    (spans,) = plan.spans
    assert spans.rotation is not None
    assert spans.rotation.tolist() == [8, 2]
    assert spans.parts == 2


def test_readers_of_the_same_pages_stack_their_queries() -> None:
    """And each is turned by its own offset; a private copy of the same length stays apart."""
    early = Request((Span(0, 8),), prompt=12, page=4, root=4, link=0).layout()
    late = Request((Span(3, 11),), prompt=14, page=4, root=4, link=0).layout()
    sources = [np.array([7]), np.array([PRIVATE]), None, np.array([7])]
    batch = BatchQueries.of([1, 1, 1, 1], [12, 12, 5, 14], [early, early, None, late], sources)
    (spans,) = build_plan(batch).spans
    assert spans.parts == 2
    assert spans.query_index is not None
    assert spans.rotation is not None
    by_part = [
        list(zip(spans.query_index[a:b].tolist(), spans.rotation[a:b].tolist(), strict=True))
        for a, b in itertools.pairwise(spans.query_indptr)
    ]
    assert sorted(by_part) == [[(0, 4), (3, 1)], [(1, 4)]]
    assert sorted(spans.pieces.tolist()) == [[0, 0, 8], [1, 0, 8]]


def test_a_request_without_new_tokens_has_no_part() -> None:
    layout = ONE.layout()
    plan = build_plan(BatchQueries.of([0, 2], [9, 10], [layout, layout]))
    assert plan.own.pieces.tolist() == [[1, 8, 10]]
    empty = build_plan(BatchQueries.of([], [], []))
    assert empty.query_tokens == empty.own.parts == empty.own.rows == 0


def test_a_launch_of_span_parts_is_bounded_in_rows() -> None:
    layout = ONE.layout()
    batch = BatchQueries.of([6] * 5, [14] * 5, [layout] * 5)
    plan = build_plan(batch, stacked_rows=9)
    assert [launch.rows for launch in plan.spans] == [8, 8, 4]
    assert [launch.rows for launch in build_plan(batch, stacked_rows=1).spans] == [4] * 5


def test_a_plan_is_kept_until_something_that_it_follows_from_changes() -> None:
    layout, twin = ONE.layout(), ONE.layout()
    cache = PlanCache()

    def builds(
        tokens: list[int], lengths: list[int], layouts: list[ContextLayout | None], source: int
    ) -> int:
        sources = [None if one is None else np.array([source]) for one in layouts]
        cache.get(BatchQueries.of(tokens, lengths, layouts, sources))
        return cache.builds

    assert builds([1, 1], [14, 5], [layout, None], 3) == 1
    assert builds([1, 1], [14, 5], [layout, None], 3) == 1
    assert builds([1, 1], [15, 5], [layout, None], 3) == 2  # lengths
    assert builds([2, 1], [15, 5], [layout, None], 3) == 3  # new tokens
    assert builds([2, 1], [15, 5], [twin, None], 3) == 4  # layout
    assert builds([2, 1], [15, 5], [twin, None], 4) == 5  # pages
    assert builds([2], [15], [twin], 4) == 6  # batch
    assert builds([2], [15], [twin], 4) == 6
