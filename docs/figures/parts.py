"""The figure of attention's parts: what a request's tokens see, and one span read for its readers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera_sglang.attention.plan import BatchQueries, Ints, build_plan

from .described import DISPATCHER, LAWYER, TWO_SPANS, Piece, laid_out
from .svg import Canvas, signed


def draw_parts() -> Canvas:
    """What a request's tokens see, and a decode step of three readers."""
    canvas = Canvas(
        880, 350, "Attention as a sum of parts, and one span read once for all its readers"
    )
    _draw_visibility(canvas, 24, 66, 370)
    _draw_decode(canvas, 452, 66)
    return canvas


def _draw_visibility(canvas: Canvas, left: float, top: float, size: float) -> None:
    layout = laid_out(TWO_SPANS)
    colours = [piece.colour for piece in TWO_SPANS if piece.colour is not None]
    columns, rows = layout.prompt_tokens, len(layout.remaining)
    across, down = size / columns, 236 / rows
    bottom = top + rows * down
    canvas.text(left, 26, "prefill: who sees what", size="head")
    canvas.text(left, top - 10, "keys: the row", size="small", soft=True)
    canvas.box(left, top, columns * across, rows * down, "panel")
    for number, run in enumerate(layout.runs):
        first = layout.visible_from[number]
        x, y = left + run.row_start * across, top + first * down
        data = {"row": run.row_start, "tokens": run.tokens, "seen-from": first}
        canvas.box(
            x, y, run.tokens * across, bottom - y, colours[run.span], outlined=True, data=data
        )
        canvas.text(x + run.tokens * across / 2, bottom - 12, "part", size="small", at="middle")
    own = left + layout.shared_tokens * across
    canvas.shape([(own, top), (left + columns * across, bottom), (own, bottom)], "own")
    canvas.text(own + 12, bottom - 12, "own part, causal", size="small")
    for line, words in enumerate(
        (
            "queries: remaining tokens, downwards in prompt order.",
            "A run is seen from its end in the prompt on, by the last queries.",
        )
    ):
        canvas.text(left, bottom + 18 + 15 * line, words, size="small", soft=True)


def _draw_decode(canvas: Canvas, left: float, top: float) -> None:
    """Three readers of one document in a decode step; parts as `build_plan` makes them."""
    readers = (LAWYER, DISPATCHER, (Piece("preamble", 40), *LAWYER[1:]))
    layouts = [laid_out(prompt) for prompt in readers]
    same_pages = np.array([1])
    plan = build_plan(
        BatchQueries.of(
            [1] * len(readers),
            [layout.prompt_tokens + 1 for layout in layouts],
            layouts,
            [same_pages] * len(readers),
        )
    )
    canvas.text(left, 26, "decode: three readers of one document", size="head")
    canvas.text(left, top - 10, "queries", size="small", soft=True)
    canvas.text(left + 130, top - 10, "keys, read once a part", size="small", soft=True)
    step, height, scale, y = 50, 28, 0.36, top
    ends = []
    for launch in (plan.own, *plan.spans):
        for part in range(launch.parts):
            rows = slice(int(launch.query_indptr[part]), int(launch.query_indptr[part + 1]))
            numbers = (
                np.arange(plan.query_tokens) if launch.query_index is None else launch.query_index
            )
            turns = None if launch.rotation is None else launch.rotation[rows]
            keys = int(launch.key_indptr[part + 1] - launch.key_indptr[part])
            _draw_part(canvas, left, y, numbers[rows].tolist(), turns, keys * scale, height)
            ends.append((left + 130 + keys * scale, y + height / 2))
            y += step
    x, middle = left + 336, (ends[0][1] + ends[-1][1]) / 2
    for end, at in ends:
        canvas.line(end + 4, at, x, middle, arrow=True)
    canvas.text(x + 4, middle - 3, "merge by", size="small")
    canvas.text(x + 4, middle + 11, "log-sum-exp", size="small")
    for line, words in enumerate(
        (
            "The document's part has a row for each reader,",
            "turned to where the document is stored.",
        )
    ):
        canvas.text(left, y + 10 + 15 * line, words, size="small", soft=True)


def _draw_part(
    canvas: Canvas,
    left: float,
    y: float,
    readers: Sequence[int],
    turns: Ints | None,
    width: float,
    height: float,
) -> None:
    colour = "own" if turns is None else "a"
    for place, reader in enumerate(readers):
        canvas.box(left + 38 * place, y, 34, height, "new", outlined=True)
        canvas.text(left + 38 * place + 17, y + 18, f"q{reader + 1}", size="small", at="middle")
        if turns is not None:
            turn = signed(int(turns[place]))
            canvas.text(
                left + 38 * place + 17, y + height + 13, turn, size="small", at="middle", soft=True
            )
    canvas.box(left + 130, y, width, height, colour, outlined=True)
    words = "document" if turns is not None else "own tokens"
    canvas.text(left + 137, y + 18, words, size="small")
