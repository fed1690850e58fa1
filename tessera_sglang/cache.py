"""The content index behind SGLang's prefix-cache interface.

Plain requests and spans share one index. A plain request matches and publishes the chain of its
prompt. A reader of spans matches the shared pages of its spans, which it waits for
(:mod:`tessera_sglang.intake`), and then the chain of its remaining tokens.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera_sglang.memory_pool.eviction import PROTECTED_HITS
from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import Chain, Namespace, PageKey, as_tokens
from tessera_sglang.memory_pool.pool import TierView
from tessera_sglang.memory_pool.runs import Copied, Match, PageIds, Path, Published, Run, Segment
from tessera_sglang.memory_pool.tiers import TierStack

from .below import Below
from .compat import (
    BasePrefixCache,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchResult,
    Req,
)
from .kv_memory import KvMemory, kv_memory
from .publication import Publication, row_schema
from .reader import is_span_prefill, reader_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Prompt tokens of scheduled requests; only grow, each request counted once (`accounting`)."""

    lookup: int = 0
    prefix_hit: int = 0  # forked ones too
    span_hit: int = 0
    forked: int = 0  # of prefix_hit: rows copied out of partly equal pages
    span_prefills: int = 0  # requests that computed a span, and that nobody asked


class TesseraCache(BasePrefixCache):  # type: ignore[misc] # untyped base
    """``BasePrefixCache`` over :class:`ContentIndex`. Sizes are in tokens, as SGLang wants them."""

    def __init__(
        self,
        params: Any,
        *,
        model_identity: str,
        rope_hash: str = "",
        verify_latents: bool = False,
        tiers: Callable[[KvMemory], TierStack] | None = None,
    ) -> None:
        """A cache over SGLang's pools.

        Args:
            params: SGLang's ``CacheInitParams``.
            model_identity: names what made the KV.
            rope_hash: names how its keys are rotated.
            verify_latents: compare latents where two requests computed the same page.
            tiers: makes the lower tiers, for pages of this memory; None for none.

        Raises:
            ValueError: pages of this pool can not be compared or copied, and are to be.
        """
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.disable = False
        self.sliding_window_size = None
        self.enable_session_radix_cache = False
        self.device: torch.device = torch.device(self.token_to_kv_pool_allocator.device)
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        self.memory = kv_memory(pool, self.page_size)
        if verify_latents and self.memory is None:
            raise ValueError(
                f'verify "latents" can not read the pages of SGLang\'s {type(pool).__name__}; use '
                '"tokens"'
            )
        self.below: Below | None = None
        if tiers is not None:
            if self.memory is None:
                raise ValueError(
                    f"host_tier_bytes: lower tiers can not read the pages of SGLang's "
                    f"{type(pool).__name__}; drop the key"
                )
            self.below = Below(tiers(self.memory), self.memory, self.page_size)
        self.index = ContentIndex(
            self.page_size,
            eviction_policy=params.eviction_policy,
            protected_hits=(params.eviction_policy_config or {}).get(
                "protected_threshold", PROTECTED_HITS
            ),
            smallest_fork=smallest_fork(self.page_size) if self.memory is not None else None,
            compare_latents=self._equal_latents if verify_latents else None,
            on_evict=self.below.leaving if self.below is not None else None,
        )
        self.publication = Publication(
            row_schema(pool, page_tokens=self.page_size, rope_hash=rope_hash)
        )
        # Set with the scheduler: the stream on which KV is written, None where there is none.
        self.forward_stream: Callable[[], Any] = lambda: None
        self.traffic = Traffic()
        self._model_identity = model_identity
        self._roots: dict[tuple[str | None, str | None, str | None], PageKey] = {}
        self._page_offsets = torch.arange(self.page_size, dtype=torch.int32, device=self.device)
        if params.enable_metrics:
            self.init_metrics_collector()

    # --- names -----------------------------------------------------------------------------------

    def root_key(
        self, extra_key: str | None, cache_salt: str | None, lora_id: str | None
    ) -> PageKey:
        """Where the chains of a namespace start."""
        names = extra_key, cache_salt or None, lora_id
        key = self._roots.get(names)
        if key is None:
            if len(self._roots) >= 4096:  # salts come from outside: bounded, recomputed on demand
                self._roots.clear()
            key = self._roots[names] = Namespace(self._model_identity, *names).root_key()
        return key

    def weights_change(self) -> None:
        """What is computed from now on belongs to weights that nothing that was kept knows of.

        Nor will another process: their fingerprint is not known, so lower tiers hold pages of them for
        as long as this one runs.
        """
        self._model_identity += f"|updated {uuid.uuid4()}"
        self._roots.clear()

    # --- look-up ---------------------------------------------------------------------------------

    def match_prefix(self, params: Any) -> MatchResult:
        """Longest reusable prefix of the request's row: whole pages, and rows to be had by a fork.

        The latter are reported as SGLang reports what a lower tier holds, since they take the same
        way: a page is allocated and filled when the request is admitted (:meth:`init_load_back`).
        """
        key, req = params.key, params.req
        reader = reader_of(req)
        if reader is not None:
            path = reader.match(self.index, req, len(key))
            if self.below is not None and path.segments:
                chain, found = reader.remaining(self.index, req, path)
                path = self._with_load(path, req, chain, found, len(key) - reader.shared_tokens)
        else:
            lora_id = req.lora_id if req is not None else None
            root = self.root_key(key.extra_key, key.cache_salt, lora_id)
            chain = self.index.chain(root, key.token_ids)
            found = self.index.match(chain, len(key))
            path = self.index.path(found.segments(), fork=found.fork)
            if self.below is not None and req is not None:
                path = self._with_load(path, req, chain, found, len(key))
        rows = (
            path.load.rows
            if path.load is not None
            else path.fork.rows
            if path.fork is not None
            else 0
        )
        return MatchResult(len(path) * self.page_size, path, path, path, rows)

    def _with_load(self, path: Path, req: Req, chain: Chain, found: Match, limit: int) -> Path:
        """Likewise with what host memory has behind a match, if that is more than a fork gives."""
        assert self.below is not None
        load = self.below.offer(req, chain, found, limit)
        if load is None or (path.fork is not None and path.fork.rows >= load.rows):
            return path
        return replace(path, fork=None, load=load)

    def init_load_back(self, params: Any) -> tuple[int, Path]:
        """Fork the page that a match ended in, or copy pages behind it from host memory.

        Returns the rows, which are the request's own, and the path with them, or no rows where a page or
        the room for a copy went meanwhile; the request then computes them.
        """
        req, path = params.req, params.best_match_node
        return self._load(req, path) if path.load is not None else self._fork(req, path)

    def _fork(self, req: Req, path: Path) -> tuple[int, Path]:
        fork = path.fork
        assert fork is not None
        source = fork.page_id
        if source is None:
            return 0, path
        own = self._allocate_pages(1)
        if own is None:
            return 0, path
        source = fork.page_id  # making room may have taken it
        if source is None:
            self._free(own)
            return 0, path
        assert self.memory is not None, "forks are only offered where pages can be copied"
        self._wait_for_forward()
        self.memory.copy_rows(source, int(own[0]), fork.rows)
        req.host_hit_length = 0  # the rows are on the device already, and are reported so
        return fork.rows, replace(path, fork=None, copied=Copied(own, fork.rows, loaded=False))

    def _load(self, req: Req, path: Path) -> tuple[int, Path]:
        load = path.load
        assert load is not None
        assert self.below is not None
        own = self._allocate_pages(len(load.names))
        if own is None:
            return 0, path
        self._wait_for_forward()
        if not self.below.load(req, load, own.astype(np.int64), len(path) * self.page_size):
            self._free(own)
            return 0, path
        return load.rows, replace(path, load=None, copied=Copied(own, load.rows, loaded=True))

    def load_back_is_cache_owned(self) -> bool:
        """Copied rows belong to the request, which publishes their pages when they are full."""
        return False

    def _wait_for_forward(self) -> None:
        """Let what follows on the scheduler's stream see KV that a pass in flight still writes.

        SGLang orders the two streams too, but for some backends only as far as rows of tokens go.
        """
        if self.device.type == "cpu":
            return
        module = torch.get_device_module(self.device)
        stream = self.forward_stream()
        if stream is None:
            module.synchronize()
        else:
            module.current_stream().wait_stream(stream)

    def _equal_latents(
        self, pages: npt.NDArray[np.int32], others: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        assert self.memory is not None
        self._wait_for_forward()
        return self.memory.equal(pages, others)

    def _allocate_pages(self, pages: int) -> PageIds | None:
        """Pages of SGLang's allocator, int32 [pages]; None where there is no room for all."""
        allocator, tokens = self.token_to_kv_pool_allocator, pages * self.page_size
        slots = allocator.alloc(tokens)
        if slots is None:
            self.evict(EvictParams(num_tokens=tokens - allocator.available_size()))
            slots = allocator.alloc(tokens)
        if slots is None:
            return None
        found: PageIds = (slots[:: self.page_size] // self.page_size).cpu().numpy().astype(np.int32)
        return found

    def touch_prefix(self, key: Any) -> None:
        """Mark a waiting request's prefix as used."""
        root = self.root_key(key.extra_key, key.cache_salt, None)
        self.index.match(self.index.chain(root, key.token_ids), len(key))

    def path_device_indices(self, node: Path) -> torch.Tensor:
        """KV slots of a path and of the rows copied behind it, int64."""
        slots = [
            self._run_slots(run, len(pages))
            for segment in node.segments
            for run, pages in segment.parts()
        ]
        if node.copied is not None:
            slots.append(self._slots(node.copied.page_ids)[: node.copied.rows])
        if not slots:
            return self._slots(np.empty(0, np.int64)).long()
        return (slots[0] if len(slots) == 1 else torch.cat(slots)).long()

    def _run_slots(self, run: Run, pages: int) -> torch.Tensor:
        """Slots of a run's last pages, int32. All of them are kept: what is read is read again."""
        slots: torch.Tensor | None = run.memo
        if slots is None:
            slots = run.memo = self._slots(run.page_ids)
        return slots if pages == run.page_count else slots[-pages * self.page_size :]

    def _slots(self, page_ids: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
        """KV slots of pages, int32 [pages * page_size]."""
        pages = torch.from_numpy(page_ids.astype(np.int32)).to(self.device)
        return torch.add(self._page_offsets, pages[:, None], alpha=self.page_size).reshape(-1)

    def _free(self, page_ids: npt.NDArray[np.integer[Any]]) -> None:
        """Give whole pages back to SGLang's allocator, which then need not look for repetitions."""
        self.token_to_kv_pool_allocator.free_segment(self._slots(page_ids).long(), start_pos=0)

    # --- publication -----------------------------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Seal the full pages of the row up to ``up_to`` and move the request's lock onto them.

        Only rows whose pass is committed are sealed. Where the index already has a page, the row is
        pointed at it before the request's own copy is freed. A page that collides stays private, and
        so does everything after it.
        """
        size = self.page_size
        reader = reader_of(req)
        shared = reader.layout.shared_tokens if reader is not None else 0
        valid = self.publication.publishable(req, up_to)
        tokens = as_tokens(req.full_untruncated_fill_ids)[shared:valid]
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        page_ids = (row[shared : shared + len(tokens) // size * size : size] // size).cpu().numpy()
        visible = reader.visible_spans if reader is not None else ()
        root = self.root_key(req.extra_key, req.cache_salt, req.lora_id)
        before: Path = req.last_node
        published = self.index.publish(
            self.index.chain(root, tokens, visible),
            page_ids,
            counted=before.counted,
            shared=is_span_prefill(req),
        )
        if self.below is not None:
            self.below.sealed(published.run, published.known, published.pages)
        protected = req.kv.cache_protected_len
        if len(published.duplicate_ids):
            first = int(published.duplicate_pages[0])
            assert shared + first * size >= protected, "a page of the index was computed again"
            self._repoint(row, shared, first, published)
            self._free(published.duplicate_ids)
        spans = before.segments[: len(reader.layout.runs)] if reader is not None else ()
        path = self.index.path((*spans, *published.segments()), counted=published.pages)
        self._relock(req, path)
        end = shared + published.pages * size
        if end > protected:
            assert published.run is not None
            added = Segment(published.run, (protected - shared) // size, published.pages)
            self.publication.record(req, (protected, end), added.page_ids())
            req.kv.cache_protected_len = end

    def _repoint(self, row: torch.Tensor, shared: int, first: int, published: Published) -> None:
        """Point the row at the sealed pages from page ``first`` of the chain on."""
        assert published.run is not None
        sealed = Segment(published.run, first, published.pages).page_ids()
        start = shared + first * self.page_size
        slots = self._slots(sealed)
        row[start : start + len(slots)] = slots.to(row.dtype)

    def _relock(self, req: Req, path: Path) -> None:
        lock = self.lock(path)
        self.unlock(req.lock)
        req.lock = lock
        req.last_node = path

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """The request gave its row back: finished, aborted or retracted."""
        self.publication.release(req)

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
        if len(freed):
            if self.below is not None:
                self._wait_for_forward()
                self.below.take()
            self._free(freed)
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
        if self.below is not None:
            self.below.clear()

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

    def paged_tier(self) -> TierView:
        """Every page of SGLang's pool, counted once; requests in flight own what is in use."""
        allocator, size = self.token_to_kv_pool_allocator, self.page_size
        pages, available = allocator.size // size, allocator.available_size() // size
        return TierView.of_pages(self.index, size=pages, available=available)

    @property
    def quarantined_pages(self) -> int:
        """Came back damaged from a lower tier, and were put aside; only grows."""
        return self.below.damaged if self.below is not None else 0

    def readable(self, path: Path) -> bool:
        """Whether what is resident of a span can be read: here it is enough that its pages are."""
        return True

    @property
    def most_bodies(self) -> int:
        """Bodies that can be kept for waiting readers at a time, besides what their pages take."""
        return sys.maxsize

    def keep_for(self, waiting: Callable[[], Iterable[Path]]) -> None:
        """Who waits holds what ``waiting`` gives; what else those paths need is to stay as well."""

    def more_state(self) -> dict[str, Any]:
        """What a kind of cache adds to ``/server_info``."""
        return {}

    # --- the rest of the interface ---------------------------------------------------------------

    @property
    def root_node(self) -> Path:
        """The empty path."""
        return self.index.path()

    def is_root(self, node: Path) -> bool:
        """Whether a path holds nothing."""
        return not node.segments

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
        weight: dict[Run, int] = {}
        for path in node_handles:
            for run in _runs(path):
                weight[run] = weight.get(run, 0) + 1
        order = {run: number for number, run in enumerate(weight)}

        def rank(number: int) -> list[tuple[int, int]]:
            return [(-weight[run], order[run]) for run in _runs(node_handles[number])]

        return sorted(range(len(node_handles)), key=rank)


def smallest_fork(page_size: int) -> int | None:
    """Rows from which on a page is worth forking; fewer cost less to compute than to copy."""
    return max(page_size // 8, 1) if page_size > 1 else None


def _runs(path: Path) -> Iterator[Run]:
    """The runs that a path reads, in row order."""
    for segment in path.segments:
        found: list[Run] = []
        run: Run | None = segment.run
        while run is not None and run.end > segment.first:
            found.append(run)
            run = run.parent
        yield from reversed(found)
