"""The content index behind SGLang's prefix-cache interface.

Plain requests and spans share one index. A plain request matches and publishes the chain of its
prompt. A reader of spans matches the shared pages of its spans, which it waits for
(:mod:`tessera_sglang.intake`), and then the chain of its remaining tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tessera_sglang.memory_pool.index import ContentIndex, Page, Path
from tessera_sglang.memory_pool.keys import Namespace, PageKey

from .compat import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
    Req,
)
from .reader import reader_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Prompt tokens of scheduled requests; only grow, each request counted once."""

    lookup: int = 0
    prefix_hit: int = 0
    span_hit: int = 0


class TesseraCache(BasePrefixCache):  # type: ignore[misc] # untyped base
    """``BasePrefixCache`` over :class:`ContentIndex`. Sizes are in tokens, as SGLang wants them."""

    def __init__(self, params: Any, *, model_identity: str) -> None:
        """``params`` is SGLang's ``CacheInitParams``; ``model_identity`` names what made the KV."""
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.disable = False
        self.sliding_window_size = None
        self.enable_session_radix_cache = False
        self.device: torch.device = torch.device(self.token_to_kv_pool_allocator.device)
        self.index = ContentIndex(self.page_size)
        self.traffic = Traffic()
        self._model_identity = model_identity
        self._roots: dict[Namespace, PageKey] = {}
        self._page_offsets = torch.arange(self.page_size, dtype=torch.int64, device=self.device)
        if params.enable_metrics:
            self.init_metrics_collector()

    # --- names -----------------------------------------------------------------------------------

    def root_key(
        self, extra_key: str | None, cache_salt: str | None, lora_id: str | None
    ) -> PageKey:
        """Where the chains of a namespace start."""
        namespace = Namespace(self._model_identity, extra_key, cache_salt or None, lora_id)
        key = self._roots.get(namespace)
        if key is None:
            if len(self._roots) >= 4096:  # salts come from outside: bounded, recomputed on demand
                self._roots.clear()
            key = self._roots[namespace] = namespace.root_key()
        return key

    # --- look-up ---------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> MatchResult:
        """Longest reusable prefix of the request's row, in whole pages."""
        key, req = params.key, params.req
        reader = reader_of(req)
        limit = len(key) // self.page_size
        if reader is not None:
            path = reader.match(self.index, req, limit)
        else:
            lora_id = req.lora_id if req is not None else None
            root = self.root_key(key.extra_key, key.cache_salt, lora_id)
            pages = self.index.match(self.index.chain(root, key.token_ids), limit)
            path = self.index.path(pages)
        return MatchResult(
            device_prefix_len=len(path) * self.page_size,
            last_device_node=path,
            last_host_node=path,
            best_match_node=path,
        )

    def touch_prefix(self, key: Any) -> None:
        """Mark a waiting request's prefix as used."""
        root = self.root_key(key.extra_key, key.cache_salt, None)
        self.index.match(self.index.chain(root, key.token_ids), len(key) // self.page_size)

    def path_device_indices(self, node: Path) -> torch.Tensor:
        """KV slots of a path, int64 [pages * page_size]."""
        return self._slots([page.page_id for page in node.pages])

    def _slots(self, page_ids: Sequence[int]) -> torch.Tensor:
        first = torch.tensor(page_ids, dtype=torch.int64, device=self.device) * self.page_size
        return (first[:, None] + self._page_offsets).reshape(-1)

    # --- publication -----------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Seal the full pages of the row up to ``up_to`` and move the request's lock onto them.

        Where the index already has a page, the row is pointed at it before the request's own copy is
        freed. A page that collides stays private, and so does everything after it.
        """
        size = self.page_size
        reader = reader_of(req)
        shared = reader.layout.shared_tokens if reader is not None else 0
        tokens = req.full_untruncated_fill_ids[shared:up_to]
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        page_ids = (row[shared : shared + len(tokens) // size * size : size] // size).tolist()
        visible = reader.visible_spans if reader is not None else ()
        root = self.root_key(req.extra_key, req.cache_salt, req.lora_id)
        published = self.index.publish(self.index.chain(root, tokens, visible), page_ids)
        protected = req.kv.cache_protected_len
        if published.duplicates:
            self._repoint(row, shared, protected, published.pages)
            own = [page_id for _, page_id in published.duplicates]
            assert shared + published.duplicates[0][0] * size >= protected
            self.token_to_kv_pool_allocator.free(self._slots(own))
        self._relock(req, self._row_path(req, shared // size, published.pages))
        req.kv.cache_protected_len = max(protected, shared + len(published.pages) * size)

    def _repoint(
        self, row: torch.Tensor, shared: int, protected: int, pages: Sequence[Page]
    ) -> None:
        first = max(protected - shared, 0) // self.page_size
        slots = self._slots([page.page_id for page in pages[first:]])
        start = shared + first * self.page_size
        row[start : start + len(slots)] = slots.to(row.dtype)

    def _row_path(self, req: Req, shared_pages: int, pages: Sequence[Page]) -> Path:
        """The whole row of a request as one path: its shared pages, then ``pages``."""
        if not shared_pages:
            return self.index.path(pages)
        before: Path = req.last_node
        return self.index.path((*before.pages[:shared_pages], *pages), before.kept)

    def _relock(self, req: Req, path: Path) -> None:
        lock = self.lock(path)
        self.unlock(req.lock)
        req.lock = lock
        req.last_node = path

    # --- references and eviction -----------------------------------------------------------------

    def inc_lock_ref(self, node: Path) -> IncLockRefResult:
        """Lock a path for a running request."""
        return IncLockRefResult(delta=-self.index.lock(node) * self.page_size)

    def dec_lock_ref(self, node: Path, params: Any = None) -> DecLockRefResult:
        """Unlock a path; a path from before a flush is a no-op."""
        return DecLockRefResult(delta=self.index.unlock(node) * self.page_size)

    def evict(self, params: Any) -> EvictResult:
        """Free at least ``num_tokens`` tokens if the index can spare them.

        Called when running requests need room, or when an admitted one is given its pages, so pages
        held for waiting requests may go as well: those wait again, nobody fails.
        """
        started = time.perf_counter()
        pages = -(-params.num_tokens // self.page_size)
        freed = self.index.evict(pages, break_holds=True)
        if freed:
            self.token_to_kv_pool_allocator.free(self._slots(freed))
        tokens = len(freed) * self.page_size
        self.update_eviction_metrics(tokens, started)
        return EvictResult(num_tokens_evicted=tokens)

    def reset(self) -> None:
        """Forget all pages. The scheduler clears the allocator itself."""
        index = self.index
        logger.info(
            "content index emptied: %d pages, %d evicted so far in the order %s",
            index.page_count,
            index.counters.evicted_pages,
            index.eviction_digest.hex() or "-",
        )
        index.reset()

    # --- sizes -----------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        """Tokens that an admission may count on."""
        return self.index.evictable_pages * self.page_size

    def protected_size(self) -> int:
        """Tokens that running or waiting requests keep."""
        return (self.index.locked_pages + self.index.held_pages) * self.page_size

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def total_size(self) -> int:
        """Tokens in sealed pages."""
        return self.index.page_count * self.page_size

    # --- the rest of the interface ---------------------------------------------------------------

    @property
    def root_node(self) -> Path:
        """The empty path."""
        return self.index.path()

    def is_root(self, node: Path) -> bool:
        """Whether a path holds nothing."""
        return not node.pages

    def sanity_check(self) -> None:
        """Called by SGLang when idle; nothing may be locked or held then."""
        assert self.index.locked_pages == 0, "pages are locked while the server is idle"

    def pretty_print(self) -> None:
        """Log the sizes."""
        logger.info(
            "content index: %d pages (%d locked, %d held, %d evictable), %s",
            self.index.page_count,
            self.index.locked_pages,
            self.index.held_pages,
            self.index.evictable_pages,
            self.index.counters,
        )

    def dfs_weight_order(self, node_handles: Sequence[Path]) -> list[int]:
        """Requests whose paths share pages next to each other, heavier branches first."""
        weight: dict[Page, int] = {}
        for path in node_handles:
            for page in path.pages:
                weight[page] = weight.get(page, 0) + 1
        order = {page: number for number, page in enumerate(weight)}

        def rank(number: int) -> list[tuple[int, int]]:
            return [(-weight[page], order[page]) for page in node_handles[number].pages]

        return sorted(range(len(node_handles)), key=rank)
