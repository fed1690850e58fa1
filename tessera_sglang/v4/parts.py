"""Pages of a finished prefix, read by a request at another place than where they were computed.

A part is whole pages, so every group of it is complete, and it stands wherever the request is when it
takes the part: no group of the request's own is closed by it or opened. What a reader needs besides the
pages is the part's last window, which was saved with its last page.

What a request computes behind a part, and what that means for its groups and windows, is defined in
``docs/deepseek-v4.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tessera_sglang.memory_pool.paged import PageIds
from tessera_sglang.memory_pool.ring import Ring

from .storage import LayerStorage, PlaneRows

if TYPE_CHECKING:
    from .requests import Request


class StateMissing(LookupError):
    """What a request needs to go on is not there: it was not saved, not restored, or is another's."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Pages that somebody else owns, at a place of their own in a request."""

    pages: PageIds  # int64 [n], at least one, in order
    first: int  # where the first token was computed: its position there
    start: int  # and here

    @property
    def shift(self) -> int:
        """By how much its rows are to be turned; negative for back."""
        return self.start - self.first


Parts = Sequence[Part]  # of a request, in order


def pages_of(parts: Parts) -> int:
    """Of all parts of a request."""
    return sum(len(part.pages) for part in parts)


def read(storage: LayerStorage, request: Request, pages: PageIds, *, first: int = 0) -> None:
    """Let pages of a prefix stand where ``request`` is now.

    ``pages`` are the last ones of a request that began at position 0, integer [n], up to a page whose
    state was saved; ``first`` is the position of their first token there. They must stay owned and
    unwritten for as long as the request runs. Nothing in them is changed.

    Raises ``StateMissing`` where no state was saved with the last page, and ValueError for a part that
    its window reaches out of, and for rotary tables that do not add; nothing has changed then.
    """
    pool, size = storage.pool, storage.page_tokens
    storage.rope.refuse_unknown()
    part = Part(pages.astype(np.int64), first, request.length)
    tokens, window = len(part.pages) * size, storage.window_tokens
    if tokens < window:
        raise ValueError(
            f"a part of {tokens} tokens is shorter than the window of {window}, which would reach into "
            f"pages that are not read; read at least {-(-window // size)} pages"
        )
    slot = pool.arena.saved_slot(int(part.pages[-1]))
    if slot is None:
        raise StateMissing(
            f"no state was saved with page {part.pages[-1]}, the last one of a part: compute the prefix "
            f"again from where a state is left, see TwoTierPool.match_limit"
        )
    end = np.arange(part.first + tokens - window, part.first + tokens)
    sources = {ring: torch.from_numpy(ring.saved_rows(slot, end)) for ring in _windows(storage)}
    here, slots = end + part.shift, np.full(window, request.slot)
    targets = {ring: torch.from_numpy(ring.write_rows(slots, here)) for ring in sources}
    for kind, layer in zip(storage.model.kinds, storage.layers, strict=True):
        rows, ring = layer.planes["window"].rows, _ring(layer.planes["window"])
        found = rows.index_select(0, sources[ring])
        rows.index_copy_(0, targets[ring], storage.rope.turn_window(found, part.shift, kind))
    request.parts = (*request.parts, part)
    request.length += tokens


def _windows(storage: LayerStorage) -> list[Ring]:
    return list(dict.fromkeys(_ring(layer.planes["window"]) for layer in storage.layers))


def _ring(planes: PlaneRows) -> Ring:
    assert planes.ring is not None, "a paged plane has no ring"
    return planes.ring
