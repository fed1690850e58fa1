"""The arena slot of each row of SGLang's request table.

A row gets its slot in the first forward pass in which it is seen, with the state of the page that its
prefix ends with. It keeps it until SGLang gives the row to somebody else or tells that it is free. Knows
no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tessera_sglang.memory_pool.paged import NO_PAGES, PageIds
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.v4 import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """A row's part of a forward pass."""

    row: int
    start: int  # tokens that the row has
    tokens: int  # and those that it brings
    pages: PageIds  # int64, of all of them, in row order


class Rows:
    """Requests by row. One per pool; moves in the thread that runs forward passes."""

    def __init__(self, pool: TwoTierPool) -> None:
        self.pool = pool
        self._page_tokens = pool.geometry.page_tokens
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        """Rows that have a slot."""
        return len(self._requests)

    def begin(self, turns: Sequence[Turn]) -> list[Request]:
        """The requests of a pass, in order, each where its turn begins.

        All are there before the first of them runs, since a pass saves states, and may drop those that
        a later one starts from. Raises ``StateMissing`` for a row that begins behind a page without a
        state, and RuntimeError for a row that went on without its slot.
        """
        for turn in turns:  # what was saved with pages that are written anew is another text's
            self.pool.arena.drop(turn.pages[-(-turn.start // self._page_tokens) :])
        new = [turn for turn in turns if turn.row not in self._requests]
        wanted = np.array([page for turn in new for page in self._prefix(turn)[-1:]], np.int64)
        for turn in new:
            self._requests[turn.row] = self._open(turn, wanted)
        return [self._at(turn) for turn in turns]

    def release(self, rows: Iterable[int]) -> None:
        """Rows that are somebody else's from here on, or nobody's."""
        for row in rows:
            request = self._requests.pop(row, None)
            if request is not None:
                request.close()

    def clear(self) -> None:
        """Forget all rows and all saved states, for a flush."""
        self._requests.clear()
        self.pool.arena.clear()

    def _at(self, turn: Turn) -> Request:
        request = self._requests[turn.row]
        if request.length != turn.start:
            raise RuntimeError(
                f"row {turn.row} goes on at {turn.start} tokens, but its arena slot stands at "
                f"{request.length}: a forward pass was lost or ran twice"
            )
        request.pages = turn.pages
        return request

    def _open(self, turn: Turn, wanted: PageIds) -> Request:
        arena = self.pool.arena
        if not arena.available:
            arena.drop_oldest(1, keep=wanted)
        request = Request.open(self.pool, self._prefix(turn))
        if request is None:
            raise RuntimeError(
                f"no arena slot for row {turn.row}: {arena.running} rows have one, of {arena.size} slots"
            )
        return request

    def _prefix(self, turn: Turn) -> PageIds:
        pages, rest = divmod(turn.start, self._page_tokens)
        if rest:
            raise RuntimeError(
                f"row {turn.row} begins behind {turn.start} tokens, inside a page of {self._page_tokens}"
            )
        return turn.pages[:pages] if pages else NO_PAGES
