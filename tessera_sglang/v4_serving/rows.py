"""The arena slot of each row of SGLang's request table.

A row gets its slot in the first forward pass in which it is seen, with the state of the page that its
own prefix ends with. It keeps it until SGLang gives the row to somebody else or tells that it is free. A
row with spans takes each shared run when its own tokens reach the first one that sees it. Knows no
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tessera_sglang.attention.layout import ContextLayout
from tessera_sglang.memory_pool.paged import NO_PAGES, PageIds
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.v4 import LayerStorage, Request, read


@dataclass(frozen=True, slots=True)
class Turn:
    """A row's part of a forward pass."""

    row: int
    start: int  # tokens that the row has
    tokens: int  # and those that it brings
    pages: PageIds  # int64, of all of them, in row order
    layout: ContextLayout | None = None  # of a row with spans, which begins with their shared runs


@dataclass(slots=True)
class Row:
    """A request of SGLang's, in the pool. Its own tokens are those behind its shared runs."""

    request: Request
    layout: ContextLayout | None
    shared: PageIds  # of the runs, int64

    @property
    def unread(self) -> Iterator[tuple[int, PageIds, int]]:
        """Runs to come: the first own token that sees one, its pages, where they were computed."""
        layout = self.layout
        if layout is None:
            return
        size = layout.page_size
        for number in range(len(self.request.parts), len(layout.runs)):
            run = layout.runs[number]
            pages = self.shared[run.row_start // size : run.row_end // size]
            yield layout.visible_from[number], pages, run.prompt_start + run.rotation

    def pieces(self, storage: LayerStorage, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """Its next own tokens, int64 [n], one pass after the other: to be run before the next is taken.

        Passes end where a page of its own does and where a shared run comes to be seen, which is then
        read: places that follow from the prompt, so answers do not depend on the chunks of a prefill.
        """
        request, size = self.request, storage.page_tokens
        while len(ids):
            done = request.own_length
            upto = done - done % size + size
            for visible_from, pages, first in self.unread:
                if visible_from > done:
                    upto = min(upto, visible_from)
                    break
                read(storage, request, pages, first=first)
            yield ids[: upto - done]
            ids = ids[upto - done :]


class Rows:
    """Requests by row. One per pool; moves in the thread that runs forward passes."""

    def __init__(self, pool: TwoTierPool) -> None:
        self.pool = pool
        # Pages whose states those who wait for a row count on: dropped for no other state.
        self.awaited: Callable[[], Iterable[int]] = tuple
        self._page_tokens = pool.geometry.page_tokens
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        """Rows that have a slot."""
        return len(self._rows)

    def begin(self, turns: Sequence[Turn]) -> list[Row]:
        """The rows of a pass, in order, each where its turn begins.

        Raises ``StateMissing`` for a row that begins behind a page without a state, and RuntimeError for
        a row that went on without its slot.
        """
        for turn in turns:  # what was saved with pages that are written anew is another text's
            self.pool.arena.drop(turn.pages[-(-turn.start // self._page_tokens) :])
        for turn in turns:
            if turn.row not in self._rows:
                self._rows[turn.row] = self._open(turn)
        return [self._at(turn) for turn in turns]

    def save(self, row: Row) -> bool:
        """Keep the state at a page boundary that a row reached, for others to go on from.

        A slot stays free for each row that may still begin: least recently used states go, but none
        that a row or a waiting request counts on. Whether it was kept.
        """
        request, arena = row.request, self.pool.arena
        if not request.own_length or request.own_length % self._page_tokens or request.parts:
            return False
        page = int(request.pages[request.own_length // self._page_tokens - 1])
        full = arena.available <= arena.startable and arena.saved_slot(page) is None
        if full and not arena.drop_oldest(1, keep=self._kept()):
            return False
        return request.save()

    def release(self, rows: Iterable[int]) -> None:
        """Rows that are somebody else's from here on, or nobody's."""
        for number in rows:
            row = self._rows.pop(number, None)
            if row is not None:
                row.request.close()

    def clear(self) -> None:
        """Forget all rows and all saved states, for a flush."""
        self._rows.clear()
        self.pool.arena.clear()

    def _kept(self) -> PageIds:
        unread = [int(pages[-1]) for row in self._rows.values() for _, pages, _ in row.unread]
        return np.array([*self.awaited(), *unread], np.int64)

    def _at(self, turn: Turn) -> Row:
        row = self._rows[turn.row]
        shared = len(row.shared)
        if shared * self._page_tokens + row.request.own_length != turn.start:
            raise RuntimeError(
                f"row {turn.row} goes on at {turn.start} tokens, but its arena slot stands at "
                f"{shared * self._page_tokens + row.request.own_length}: a forward pass was lost or ran "
                "twice"
            )
        row.request.pages = turn.pages[shared:]
        return row

    def _open(self, turn: Turn) -> Row:
        shared = 0 if turn.layout is None else turn.layout.shared_tokens // self._page_tokens
        pages, rest = divmod(turn.start, self._page_tokens)
        if rest:
            raise RuntimeError(
                f"row {turn.row} begins behind {turn.start} tokens, inside a page of {self._page_tokens}"
            )
        arena = self.pool.arena
        request = Request.open(self.pool, turn.pages[shared:pages] if pages > shared else NO_PAGES)
        if request is None:
            raise RuntimeError(
                f"no arena slot for row {turn.row}: {arena.running} rows have one, of {arena.size} slots"
            )
        return Row(request, turn.layout, turn.pages[:shared])
