"""Where the tokens of a request with spans stand: rows, prompt positions, visibility."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_sglang.attention.layout import ContextLayout, Span, body_tokens, lay_out

PAGE = 4


def layout_of(
    *spans: tuple[int, int], prompt: int, page: int = PAGE, root: int = 0, link: int = 0
) -> ContextLayout | None:
    return lay_out(
        [Span(*span) for span in spans],
        prompt_tokens=prompt,
        page_size=page,
        root_tokens=root,
        linked_pages=link,
    )


def shared(
    *spans: tuple[int, int], prompt: int, root: int = 0, link: int = 0
) -> list[tuple[int, int]]:
    """Prompt intervals of the shared runs, in row order."""
    layout = layout_of(*spans, prompt=prompt, root=root, link=link)
    runs = layout.runs if layout is not None else ()
    return [(run.prompt_start, run.prompt_end) for run in runs]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(0, 10)], [(0, 8)], id="start: a tail of two"),
        pytest.param([(7, 15)], [(7, 15)], id="exactly whole pages"),
        pytest.param([(7, 10)], [], id="shorter than a page"),
        pytest.param([(7, 11)], [(7, 11)], id="one page"),
        pytest.param([(10, 20)], [(10, 18)], id="end"),
        pytest.param([(12, 20)], [(12, 16)], id="end, whole pages: the last is given up"),
        pytest.param([(16, 20)], [], id="end, one page"),
        pytest.param([(0, 20)], [(0, 16)], id="whole prompt"),
        pytest.param([(0, 8), (8, 16)], [(0, 8), (8, 16)], id="adjacent"),
        pytest.param([(0, 6), (6, 11)], [(0, 4), (6, 10)], id="adjacent, with tails"),
        pytest.param([(1, 9), (11, 19)], [(1, 9), (11, 19)], id="two"),
        pytest.param([(0, 2), (3, 8)], [(3, 7)], id="only the long one"),
    ],
)
def test_a_span_shares_its_whole_pages(
    spans: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert shared(*spans, prompt=20) == expected
    assert (layout_of(*spans, prompt=20) is None) == (expected == [])


@pytest.mark.parametrize(
    ("span", "link", "expected"),
    [
        ((3, 15), 1, [(7, 15)]),
        ((3, 15), 2, [(11, 15)]),
        ((3, 15), 3, []),
        ((3, 15), 10**30, []),
        ((3, 17), 2, [(11, 15)]),
        ((8, 20), 1, [(12, 16)]),
        ((8, 20), 2, []),
    ],
)
def test_linked_pages_are_ordinary_tokens(
    span: tuple[int, int], link: int, expected: list[tuple[int, int]]
) -> None:
    assert shared(span, prompt=20, link=link) == expected


@pytest.mark.parametrize(("end", "body"), [(7, 4), (8, 8), (9, 8), (12, 8), (20, 16)])
def test_the_last_token_of_a_prompt_is_never_in_a_body(end: int, body: int) -> None:
    prompt = 12 if end <= 12 else 20
    assert body_tokens(Span(0, end), prompt, PAGE) == body


def test_runs_know_where_they_are_stored_and_where_they_are_used() -> None:
    layout = layout_of((2, 14), (20, 31), prompt=40, root=8, link=1)
    assert layout is not None
    first, second = layout.runs
    assert dataclasses.astuple(first) == (0, 2, 12, 6, 8, 0, 8 - 2)
    assert dataclasses.astuple(second) == (1, 20, 8, 24, 4, 8, 8 - 20)
    assert layout.shared_tokens == 12
    for run in layout.runs:  # behind the root and the linked page, at every token of the run
        assert run.prompt_start + run.rotation == 8 + PAGE


def test_a_run_keeps_the_number_of_its_span() -> None:
    layout = layout_of((0, 3), (4, 8), (9, 10), (10, 20), prompt=40)
    assert layout is not None
    assert [run.span for run in layout.runs] == [1, 3]


def test_the_row_is_shared_runs_then_the_rest_in_prompt_order() -> None:
    layout = layout_of((2, 8), (10, 14), prompt=16)
    assert layout is not None
    assert layout.row_order.tolist() == [2, 3, 4, 5, 10, 11, 12, 13, 0, 1, 6, 7, 8, 9, 14, 15]
    assert layout.remaining.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert layout.visible_from == (2, 6)


def test_a_run_is_visible_from_the_first_remaining_token_behind_it() -> None:
    adjacent = layout_of((0, 8), (8, 16), prompt=18)
    assert adjacent is not None
    assert adjacent.visible_from == (0, 0)
    tail = layout_of((0, 10), prompt=20)
    assert tail is not None
    assert tail.visible_from == (0,)  # the span's own tail sees its body
    linked = layout_of((2, 12), prompt=20, link=1)
    assert linked is not None
    assert linked.visible_from == (6,)  # its linked page does not


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 4, [2, 3, 4, 5]),
        (3, 6, [5, 0, 1]),
        (5, 8, [1, 6, 7]),
        (7, 10, [7, 8, 9]),
        (8, 9, [8]),
        (12, 14, [12, 13]),
        (5, 5, []),
    ],
)
def test_prompt_positions_of_chunks_and_of_generated_tokens(
    start: int, end: int, expected: list[int]
) -> None:
    layout = layout_of((2, 7), prompt=8)
    assert layout is not None
    positions = layout.prompt_positions(start, end)
    assert positions.dtype == np.int64
    assert positions.tolist() == expected


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Span], ContextLayout]:
    """Spans of a prompt and its layout, when something is shared."""
    page, link, root_pages = (draw(st.integers(low, 3)) for low in (1, 0, 0))
    cuts = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=8)))
    adjacent = draw(st.booleans())
    pairs = itertools.pairwise(cuts) if adjacent else zip(*[iter(cuts)] * 2, strict=False)
    spans = [Span(*pair) for pair in pairs]
    prompt = cuts[-1] + draw(st.integers(0, 3))
    layout = lay_out(
        spans,
        prompt_tokens=prompt,
        page_size=page,
        root_tokens=root_pages * page,
        linked_pages=link,
    )
    if layout is None:
        spans = [Span(0, prompt + 9)]
        layout = lay_out(
            spans, prompt_tokens=prompt + 9, page_size=1, root_tokens=0, linked_pages=0
        )
    assert layout is not None
    return spans, layout


@given(requests())
def test_a_layout_is_a_permutation_with_whole_shared_pages_in_front(
    request: tuple[list[Span], ContextLayout],
) -> None:
    spans, layout = request
    size, shared_tokens = layout.page_size, layout.shared_tokens
    assert sorted(layout.row_order.tolist()) == list(range(layout.prompt_tokens))
    assert layout.row_order[-1] == layout.prompt_tokens - 1
    assert shared_tokens % size == 0
    assert shared_tokens < layout.prompt_tokens
    assert np.all(np.diff(layout.remaining) > 0)
    row = 0
    for run, visible in zip(layout.runs, layout.visible_from, strict=True):
        span = spans[run.span]
        assert (run.row_start, run.tokens % size, run.body_start) == (row, 0, span.start)
        assert span.start <= run.prompt_start < run.prompt_end <= span.end
        assert run.prompt_end == run.body_start + run.body_tokens
        assert np.array_equal(
            layout.row_order[run.row_start : run.row_end],
            np.arange(run.prompt_start, run.prompt_end),
        )
        assert np.all(layout.remaining[:visible] < run.prompt_end)
        assert np.all(layout.remaining[visible:] >= run.prompt_end)
        row = run.row_end


@given(requests(), st.integers(0, 60), st.integers(0, 60))
def test_positions_do_not_depend_on_the_chunk_they_are_asked_in(
    request: tuple[list[Span], ContextLayout], one: int, other: int
) -> None:
    layout = request[1]
    start, end = min(one, other), max(one, other)
    whole = layout.prompt_positions(0, 60)
    assert layout.prompt_positions(start, end).tolist() == whole[start:end].tolist()
