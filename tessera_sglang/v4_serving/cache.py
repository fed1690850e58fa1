"""The content index over two tiers: a match ends where a request can go on from.

A page's entries are shared as those of any model. Going on behind it also takes the state that was saved
with it, and states are dropped before pages are: so matches are cut to the last page that has one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera_sglang.cache import TesseraCache
from tessera_sglang.compat import MatchResult, Req
from tessera_sglang.memory_pool.runs import Path, Published, Segment
from tessera_sglang.reader import Reader, reader_of

from .config import SERVED_BY
from .pool import V4KvPool


class V4Cache(TesseraCache):
    """:class:`TesseraCache` over a :class:`V4KvPool`."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        assert isinstance(pool, V4KvPool)
        assert pool.tiers is not None
        assert pool.rows is not None, "no tiers were attached"
        self._tiers, self._rows = pool.tiers, pool.rows

    def match_prefix(self, params: Any) -> MatchResult:
        """Longest prefix of whole pages whose last one has a saved state.

        Of a reader's own pages those before its first span, since no state knows of spans.
        """
        key, req = params.key, params.req
        reader = reader_of(req)
        if reader is None:
            lora_id = req.lora_id if req is not None else None
            root = self.root_key(key.extra_key, key.cache_salt, lora_id)
            chain = self.index.chain(root, key.token_ids)
            path = self._from_a_state(
                lambda limit: self.index.path(self.index.match(chain, limit).segments()),
                0,
                len(key),
            )
        else:
            limit = min(len(key), self._publishable(reader))
            path = self._from_a_state(
                lambda limit: replace(reader.match(self.index, req, limit), fork=None),
                len(reader.layout.runs),
                limit,
            )
        return MatchResult(len(path) * self.page_size, path, path, path, 0)

    def _from_a_state(self, match: Callable[[int], Path], runs: int, limit: int) -> Path:
        """A match, cut to where its own pages, those behind ``runs`` segments, can be gone on from."""
        path = match(limit)
        while own := self.index.path(path.segments[runs:]):
            missing = len(own) - self._tiers.match_limit(own.page_ids())
            if not missing:
                break
            path = match((len(path) - missing) * self.page_size)
        return path

    def _publishable(self, reader: Reader) -> int:
        """Tokens of a reader's row before its first own page that knows of a span."""
        own = reader.layout.visible_from[0] // self.page_size * self.page_size
        return reader.layout.shared_tokens + own

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Likewise; pages behind a reader's spans stay its own, since nobody could go on from them."""
        reader = reader_of(req)
        if reader is not None:
            up_to = min(up_to, self._publishable(reader))
        super().checkpoint(req, up_to=up_to, **kwargs)

    def readable(self, path: Path) -> bool:
        """Whether the last page of each part has its state, and so the window that readers look into."""
        arena = self._tiers.arena
        return all(arena.saved_slot(page) is not None for page in _last_pages(path))

    @property
    def most_bodies(self) -> int:
        """As many as have room for their states."""
        arena = self._tiers.arena
        return arena.size - arena.running - arena.startable

    def keep_for(self, waiting: Callable[[], Iterable[Path]]) -> None:
        """What waiting requests hold keeps its states."""
        self._rows.awaited = lambda: (
            page for path in waiting() if self.index.intact(path) for page in _last_pages(path)
        )

    def _repoint(self, row: torch.Tensor, shared: int, first: int, published: Published) -> None:
        """Likewise, and let sealed pages have the states of the row's own copies."""
        super()._repoint(row, shared, first, published)
        assert published.run is not None
        sealed = Segment(published.run, 0, published.pages).page_ids()
        self._tiers.arena.hand_over(published.duplicate_ids, sealed[published.duplicate_pages])

    def _free(self, page_ids: npt.NDArray[np.integer[Any]]) -> None:
        super()._free(page_ids)
        self._tiers.arena.drop(page_ids)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """The row is gone: its slot, and states saved with pages that were not published."""
        kv, size = req.kv, self.page_size
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        private = row[kv.cache_protected_len : kv.kv_allocated_len : size] // size
        self._tiers.arena.drop(np.unique(private.cpu().numpy()))
        self._rows.release([kv.req_pool_idx])
        super().on_release(req, checkpointed=checkpointed)

    def reset(self) -> None:
        """Forget all pages, states and slots."""
        super().reset()
        self._rows.clear()

    def more_state(self) -> dict[str, Any]:
        """What serves the model, and the arena in slots."""
        arena = dataclasses.asdict(self._tiers.view(self.index).arena)
        return {"attention": SERVED_BY, "arena": arena}


def _last_pages(path: Path) -> Iterator[int]:
    """Of each segment of an intact path."""
    for segment in path.segments:
        yield int(segment.run.page_ids[-1])
