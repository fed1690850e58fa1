"""Where the tokens of a request stand: in its prompt, and in its row.

The engine keeps the KV of a request in one *row* and can skip only a prefix of it. A request with
spans therefore has its tokens permuted, ::

    prompt   [preamble | span A: linked, shared, tail | text | span B: … | question]
    row      [shared A | shared B |  everything else, in prompt order                ]
              `--- shared runs --'   `--- remaining tokens ---------------------------'

so that all that is reusable is a physical prefix. Two coordinates name a token: its *row* position
says where its KV is, its *prompt* position carries rotary phase and causality.

The layout follows from the prompt's length, its spans and three constants of the server; it does not
depend on what happens to be cached. It is decided once, when a request arrives, and never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of prompt tokens that the caller declares reusable: half-open prompt offsets."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SharedRun:
    """The part of a span's body that a reader attends to in place of its own tokens.

    Stored behind the root, at position ``root + (prompt_start - body_start)``, by whoever computed
    the body; used here at ``prompt_start``. Keys are never rewritten: a query is turned by
    ``rotation`` instead.
    """

    span: int  # which span of the request
    body_start: int  # prompt offset of the span's first token
    body_tokens: int  # whole pages, linked ones included
    prompt_start: int  # first token of the run: behind the linked pages
    tokens: int
    row_start: int
    rotation: int  # stored position minus prompt position, equal for every token of the run

    @property
    def prompt_end(self) -> int:
        """End of the run. Remaining tokens from here on see it."""
        return self.prompt_start + self.tokens

    @property
    def row_end(self) -> int:
        """One past the run's last row position."""
        return self.row_start + self.tokens


@dataclass(frozen=True)
class ContextLayout:
    """Row order of one request with at least one shared run. All counts in tokens."""

    page_size: int
    root_tokens: int
    linked_pages: int
    prompt_tokens: int
    runs: tuple[SharedRun, ...]

    @property
    def shared_tokens(self) -> int:
        """Length of the row's shared prefix; a multiple of the page size."""
        return self.runs[-1].row_end

    @cached_property
    def remaining(self) -> Positions:
        """Prompt position of every remaining prompt token, ascending. int64 [remaining]."""
        keep: npt.NDArray[np.bool_] = np.ones(self.prompt_tokens, dtype=np.bool_)
        for run in self.runs:
            keep[run.prompt_start : run.prompt_end] = False
        positions: Positions = np.nonzero(keep)[0].astype(np.int64)
        return positions

    @cached_property
    def row_order(self) -> Positions:
        """Prompt position of every row position: the permutation. int64 [prompt]."""
        shared = [np.arange(run.prompt_start, run.prompt_end) for run in self.runs]
        order: Positions = np.concatenate([*shared, self.remaining]).astype(np.int64)
        return order

    @cached_property
    def visible_from(self) -> tuple[int, ...]:
        """Per run, the index into the remaining tokens of the first one that sees it."""
        ends = [run.prompt_end for run in self.runs]
        return tuple(int(i) for i in np.searchsorted(self.remaining, ends))

    @cached_property
    def run_table(self) -> Positions:
        """One line a run: row start, row end, rotation, `visible_from`. int64 [runs, 4]."""
        lines = [
            (run.row_start, run.row_end, run.rotation, visible)
            for run, visible in zip(self.runs, self.visible_from, strict=True)
        ]
        return np.array(lines, dtype=np.int64)

    def prompt_positions(self, row_start: int, row_end: int) -> Positions:
        """Prompt positions of ``[row_start, row_end)``. Generated tokens stand where they are."""
        known = self.row_order[row_start:row_end]
        beyond = np.arange(max(row_start, self.prompt_tokens), row_end, dtype=np.int64)
        return np.concatenate([known, beyond])


def body_tokens(span: Span, prompt_tokens: int, page_size: int) -> int:
    """Whole pages of a span that can be shared.

    The span that ends the prompt gives up a token: the last one must see the whole prompt.
    """
    length = span.end - span.start
    if span.end == prompt_tokens:
        length -= 1
    return length // page_size * page_size


def lay_out(
    spans: Sequence[Span],
    *,
    prompt_tokens: int,
    page_size: int,
    root_tokens: int,
    linked_pages: int,
) -> ContextLayout | None:
    """Row order for a prompt with ``spans`` (ascending, disjoint, inside the prompt).

    Returns None when nothing is shared: every span is no longer than its linked pages, and the
    request is ordinary text.
    """
    runs: list[SharedRun] = []
    row = 0
    linked = linked_pages * page_size
    for number, span in enumerate(spans):
        body = body_tokens(span, prompt_tokens, page_size)
        if body <= linked:
            continue
        tokens = body - linked
        runs.append(
            SharedRun(
                span=number,
                body_start=span.start,
                body_tokens=body,
                prompt_start=span.start + linked,
                tokens=tokens,
                row_start=row,
                rotation=root_tokens - span.start,
            )
        )
        row += tokens
    if not runs:
        return None
    return ContextLayout(page_size, root_tokens, linked_pages, prompt_tokens, tuple(runs))
