"""The prompts that are drawn, and what `lay_out` makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera_sglang.attention.layout import ContextLayout, Span, lay_out

PAGE_TOKENS = 64
ROOT_TOKENS = 64
LINK_PAGES = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt; a span has the colour it is drawn in."""

    name: str
    tokens: int
    colour: str | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that stand together in the prompt and in the row."""

    name: str
    colour: str
    prompt_start: int
    row_start: int
    tokens: int


TWO_SPANS = (
    Piece("preamble", 150),
    Piece("document A", 300, "a"),
    Piece("text", 46),
    Piece("document B", 236, "b"),
    Piece("question", 70),
)
LAWYER = (Piece("preamble", 90), Piece("document", 296, "a"), Piece("question", 60))
DISPATCHER = (
    Piece("preamble of another agent", 290),
    Piece("document", 296, "a"),
    Piece("question", 80),
)


def laid_out(prompt: Sequence[Piece]) -> ContextLayout:
    """The layout of a described prompt."""
    spans, start = [], 0
    for piece in prompt:
        if piece.colour is not None:
            spans.append(Span(start, start + piece.tokens))
        start += piece.tokens
    layout = lay_out(
        spans,
        prompt_tokens=start,
        page_size=PAGE_TOKENS,
        root_tokens=ROOT_TOKENS,
        linked_pages=LINK_PAGES,
    )
    assert layout is not None, "a described prompt shares something"
    return layout


def stretches(prompt: Sequence[Piece]) -> list[Stretch]:
    """The prompt cut where the layout cuts it, in prompt order."""
    layout = laid_out(prompt)
    runs = {run.body_start: run for run in layout.runs}
    row_of = np.argsort(layout.row_order)  # by prompt position
    found: list[Stretch] = []

    def add(name: str, colour: str, start: int, end: int) -> None:
        if end > start:
            rows = row_of[start:end]
            assert (np.diff(rows) == 1).all(), "a stretch stands together"
            found.append(Stretch(name, colour, start, int(rows[0]), end - start))

    start = 0
    for piece in prompt:
        end = start + piece.tokens
        run = runs.get(start) if piece.colour is not None else None
        if run is None or piece.colour is None:
            add(piece.name, "own", start, end)
        else:
            add("linked", "linked", start, run.prompt_start)
            add(f"{piece.name}: shared", piece.colour, run.prompt_start, run.prompt_end)
            add("tail", "tail", run.prompt_end, end)
        start = end
    return found
