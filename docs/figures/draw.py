"""Draws the figures of the documentation: ``python -m docs.figures.draw`` from the repository root.

What is drawn is described by a few constants (`described`). Row order, visibility, rotations and
parts are what `lay_out` and `build_plan` make of them, so a figure that disagrees with the code can
not be written. `tests/test_figures.py` compares the committed files with what this script writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .described import (
    DISPATCHER,
    LAWYER,
    LINK_PAGES,
    PAGE_TOKENS,
    ROOT_TOKENS,
    TWO_SPANS,
    Piece,
    Stretch,
    laid_out,
    stretches,
)
from .parts import draw_parts
from .svg import Canvas, signed


def draw_rows(prompt: Sequence[Piece] = TWO_SPANS) -> Canvas:
    """One request, in prompt order and in row order."""
    canvas = Canvas(
        880, 276, "The tokens of a request in prompt order, and in the order of its row"
    )
    found = stretches(prompt)
    layout = laid_out(prompt)
    left, scale = 24, 832 / layout.prompt_tokens
    prompt_y, row_y, height = 54, 158, 38
    canvas.text(
        left, 26, "prompt: where the caller put a token (rotary phase, causality)", size="head"
    )
    for piece in found:
        x, row_x = left + piece.prompt_start * scale, left + piece.row_start * scale
        width = piece.tokens * scale
        canvas.shape(
            [
                (x, prompt_y + height),
                (x + width, prompt_y + height),
                (row_x + width, row_y),
                (row_x, row_y),
            ],
            piece.colour,
            pale=True,
        )
    for piece in found:
        x, row_x = left + piece.prompt_start * scale, left + piece.row_start * scale
        _bar(canvas, piece, x, prompt_y, scale, height)
        data = {"prompt": piece.prompt_start, "row": piece.row_start, "tokens": piece.tokens}
        _bar(canvas, piece, row_x, row_y, scale, height, data)
        canvas.text(x, prompt_y - 6, str(piece.prompt_start), size="small", soft=True)
        canvas.text(row_x, row_y + height + 15, str(piece.row_start), size="small", soft=True)
    split = left + layout.shared_tokens * scale
    end = left + layout.prompt_tokens * scale
    y = row_y + height + 24
    for a, b, words in (
        (left, split, "shared runs: pages of the index, whole"),
        (split, end, "remaining tokens, in prompt order"),
    ):
        canvas.line(a + 1, y, b - 1, y)
        canvas.text((a + b) / 2, y + 16, words, size="small", at="middle")
    canvas.text(
        left, y + 42, "row: where its KV sits; the engine skips a prefix of it", size="head"
    )
    return canvas


def draw_spans() -> Canvas:
    """One span, stored once, read at two offsets."""
    canvas = Canvas(880, 330, "A span is stored once behind the root and read at any prompt offset")
    left, scale, height = 24, 1.18, 36
    stored_y, reader_ys = 62, (168, 262)
    readers = (LAWYER, DISPATCHER)
    run = laid_out(LAWYER).runs[0]
    body = ROOT_TOKENS + run.body_tokens
    canvas.text(
        left, 26, "in the cache: [root | body], computed once, with nothing before it", size="head"
    )
    for prompt, y in zip(readers, reader_ys, strict=True):
        _ribbon_to_reader(canvas, prompt, left, stored_y + height, y, scale)
    _labelled(canvas, "root", "root", left, stored_y, ROOT_TOKENS * scale, height)
    linked = LINK_PAGES * PAGE_TOKENS
    first_shared = left + (ROOT_TOKENS + linked) * scale
    _labelled(
        canvas, "not read", "own", left + ROOT_TOKENS * scale, stored_y, linked * scale, height
    )
    shared = Stretch("shared pages", "a", 0, 0, run.tokens)
    _bar(canvas, shared, first_shared, stored_y, scale, height)
    for position in range(0, body + 1, PAGE_TOKENS):
        x = left + position * scale
        canvas.text(x, stored_y - 6, str(position), size="small", soft=True)
    for number, (prompt, y) in enumerate(zip(readers, reader_ys, strict=True)):
        turn = laid_out(prompt).runs[0].rotation
        for piece in stretches(prompt):
            _bar(canvas, piece, left + piece.prompt_start * scale, y, scale, height)
        start = laid_out(prompt).runs[0].body_start
        canvas.text(
            left,
            y + height + 17,
            f"reader {number + 1}: span at {start}, so its queries are turned by "
            f"r \u2212 s = {ROOT_TOKENS} \u2212 {start} = {signed(turn)}",
            size="small",
        )
    return canvas


def draw_overview() -> Canvas:
    """Three agents, one copy of what they share, and who computes attention."""
    canvas = Canvas(880, 318, "Agents with different preambles read one copy of a document")
    prompts = (
        (Piece("you are a lawyer", 110), *LAWYER[1:]),
        (Piece("dispatcher", 70), *LAWYER[1:]),
        (Piece("you translate, briefly", 130), *LAWYER[1:]),
    )
    scale, height, top, step = 0.56, 30, 66, 62
    canvas.text(20, 28, "prompts", size="head")
    canvas.text(368, 28, "content index and KV pool", size="head")
    canvas.text(650, 28, "attention", size="head")
    pool_x, pool_y = 392.0, 92.0
    run = laid_out(prompts[0]).runs[0]
    pool_width = run.tokens * 0.9
    canvas.box(368, 44, 232, 218, "panel", outlined=True)
    for number, prompt in enumerate(prompts):
        y = top + step * number
        used = laid_out(prompt).runs[0]
        right = 20 + used.prompt_end * scale
        canvas.shape(
            [(right, y), (right, y + height), (pool_x, pool_y + 34), (pool_x, pool_y)],
            "a",
            pale=True,
        )
    for number, prompt in enumerate(prompts):
        y = top + step * number
        for piece in stretches(prompt):
            x, width = 20 + piece.prompt_start * scale, piece.tokens * scale
            canvas.box(x, y, width, height, piece.colour, outlined=True)
            if piece.colour == "a":
                canvas.text(x + width / 2, y + 19, "document", size="small", at="middle")
        canvas.text(20, y - 5, prompt[0].name, size="small", soft=True)
    canvas.box(pool_x, pool_y, pool_width, 34, "a", outlined=True)
    for page in range(1, run.tokens // PAGE_TOKENS):
        x = pool_x + page * PAGE_TOKENS * 0.9
        canvas.line(x, pool_y, x, pool_y + 34)
    canvas.text(pool_x, pool_y - 8, "one copy, found by content", size="small")
    for number in range(len(prompts)):
        canvas.box(pool_x, 158 + 24 * number, 74 + 12 * (number % 2), 16, "own", outlined=True)
    canvas.text(pool_x + 94, 170, "own tokens of", size="small", soft=True)
    canvas.text(pool_x + 94, 185, "each request", size="small", soft=True)
    canvas.text(pool_x, 250, "pages of 64 tokens", size="small", soft=True)
    for y, fill, head, more in (
        (50, "panel", "batches without spans", "SGLang's own backend"),
        (128, "own", "own tokens", "one causal part a request"),
        (184, "a", "each span", "one part, read once for its readers"),
    ):
        canvas.box(650, y, 214, 46, fill, outlined=True)
        canvas.text(660, y + 19, head, size="label")
        canvas.text(660, y + 36, more, size="small")
    canvas.line(600, 73, 646, 73, arrow=True)
    canvas.line(600, 180, 646, 180, arrow=True)
    canvas.text(650, 122, "batches with spans", size="small", soft=True)
    canvas.line(757, 230, 757, 246, arrow=True)
    canvas.text(757, 260, "merged by log-sum-exp", size="label", at="middle")
    canvas.text(
        20,
        300,
        "A span is computed once, behind a constant root, and read at any offset: "
        "queries are turned, keys stay as they are.",
        size="label",
    )
    return canvas


# --- pieces of figures ---------------------------------------------------------------------------


def _bar(
    canvas: Canvas,
    piece: Stretch,
    x: float,
    y: float,
    scale: float,
    height: float,
    data: dict[str, int] | None = None,
) -> None:
    """A stretch as a box; pages of shared runs are ruled."""
    _labelled(canvas, piece.name, piece.colour, x, y, piece.tokens * scale, height, data)
    if piece.colour in ("a", "b"):
        for page in range(1, piece.tokens // PAGE_TOKENS):
            at = x + page * PAGE_TOKENS * scale
            canvas.line(at, y, at, y + 5)
            canvas.line(at, y + height - 5, at, y + height)


def _labelled(
    canvas: Canvas,
    name: str,
    colour: str,
    x: float,
    y: float,
    width: float,
    height: float,
    data: dict[str, int] | None = None,
) -> None:
    canvas.box(x, y, width, height, colour, outlined=True, data=data)
    canvas.text(x + width / 2, y + height / 2 + 4, name, size="small", at="middle")


def _ribbon_to_reader(
    canvas: Canvas, prompt: Sequence[Piece], left: float, y: float, to_y: float, scale: float
) -> None:
    run = laid_out(prompt).runs[0]
    stored = left + (run.rotation + run.prompt_start) * scale
    used = left + run.prompt_start * scale
    width = run.tokens * scale
    canvas.shape(
        [(stored, y), (stored + width, y), (used + width, to_y), (used, to_y)], "a", pale=True
    )


FIGURES: dict[str, Callable[[], Canvas]] = {
    "rows.svg": draw_rows,
    "spans.svg": draw_spans,
    "parts.svg": draw_parts,
    "overview.svg": draw_overview,
}


def write(folder: Path) -> None:
    """Write every figure into a folder that exists."""
    for name, draw in FIGURES.items():
        (folder / name).write_text(str(draw()), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(__file__).parent)
