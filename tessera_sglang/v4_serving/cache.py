"""The content index over two tiers: a match ends where a request can go on from.

A page's entries are shared as those of any model. Going on behind it also takes the state that was saved
with it, and states are dropped before pages are: so matches are cut to the last page that has one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera_sglang.cache import TesseraCache
from tessera_sglang.compat import MatchResult, Req
from tessera_sglang.memory_pool.runs import Published, Segment

from .config import SERVED_BY
from .pool import V4KvPool


class V4Cache(TesseraCache):
    """:class:`TesseraCache` over a :class:`V4KvPool`. Spans are refused, so every match is a prefix."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        assert isinstance(pool, V4KvPool)
        assert pool.tiers is not None
        assert pool.rows is not None, "no tiers were attached"
        self._tiers, self._rows = pool.tiers, pool.rows

    def match_prefix(self, params: Any) -> MatchResult:
        """Longest prefix of whole pages whose last one has a saved state."""
        key, req = params.key, params.req
        lora_id = req.lora_id if req is not None else None
        root = self.root_key(key.extra_key, key.cache_salt, lora_id)
        chain = self.index.chain(root, key.token_ids)
        path = self.index.path(self.index.match(chain, len(key)).segments())
        while (usable := self._tiers.match_limit(path.page_ids())) < len(path):
            found = self.index.match(chain, usable * self.page_size)
            path = self.index.path(found.segments())
        return MatchResult(len(path) * self.page_size, path, path, path, 0)

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
