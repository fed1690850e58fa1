"""The caches that are compared, each over its own pools, and a request's way through them.

Every side is an SGLang ``BasePrefixCache`` built as a server on a CPU builds it: stock's
``UnifiedRadixCache`` with its Python or its Rust core, and ours. Requests are SGLang's own ``Req``
objects, and take the scheduler's steps: match, lock, allocate, write the row, publish when the prompt
is computed and once more when the output is, give the row back. The KV buffer has one page, since no
index reads or writes KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from tessera_sglang.cache import TesseraCache

PAGE_SIZE = 64
OURS = "tessera"
STOCK_CORES = ("python", "rust")

Tokens: TypeAlias = "array[int]"  # of typecode "q", as the scheduler holds them
NEXT = array("q", [0])  # look-ups stop before the last token: with it, they find a whole prompt


class Clock(Protocol):
    """Nanoseconds; differences of two readings are durations."""

    def __call__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of one look-up."""

    page_tokens: int  # tokens in whole pages
    fork_rows: int  # rows of a further page, to be had by copying it; stock has none
    match_ns: int  # match_prefix
    slots_ns: int  # match_prefix and path_device_indices, what a scheduled request pays


class Side:
    """One cache over its own allocator and row pool."""

    def __init__(
        self,
        name: str,
        build: Callable[[CacheInitParams], BasePrefixCache],
        *,
        capacity_tokens: int,
        row_tokens: int,
        clock: Clock,
    ) -> None:
        """``row_tokens`` is the longest row, ``capacity_tokens`` what the allocator can give out."""
        self.name = name
        self.clock = clock
        kv = MHATokenToKVPool(
            size=PAGE_SIZE,
            page_size=PAGE_SIZE,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=8,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            capacity_tokens, PAGE_SIZE, torch.bfloat16, "cpu", kv, need_sort=False
        )
        self.rows = ReqToTokenPool(32, row_tokens + PAGE_SIZE, "cpu", enable_memory_saver=False)
        self.cache = build(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE_SIZE,
                tree_components=(ComponentType.FULL,),
            )
        )

    def reset(self) -> None:
        """Empty the cache, as SGLang's flush does."""
        self.cache.reset()
        self.allocator.clear()

    def look_up(self, req: Req) -> Found:
        """Match a request's prompt up to its last token, as the scheduler does, and time it."""
        tokens = req.full_untruncated_fill_ids
        params = MatchPrefixParams(key=RadixKey(tokens, limit=len(tokens) - 1), req=req)
        cache, clock = self.cache, self.clock
        start = clock()
        result = cache.match_prefix(params)
        matched = clock()
        slots = cache.path_device_indices(result.last_device_node)
        end = clock()
        assert len(slots) == result.device_prefix_len
        req.prefix_len = result.device_prefix_len
        req.last_node = result.last_device_node
        return Found(result.device_prefix_len, result.host_hit_length, matched - start, end - start)

    def admit(self, req: Req, *, output_tokens: int = 0) -> None:
        """Lock what :meth:`look_up` found and give the request its row."""
        req.lock = self.cache.lock(req.last_node)
        (req.kv.req_pool_idx,) = self.rows.alloc_rows(1)
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        first, length = req.prefix_len, len(req.full_untruncated_fill_ids) + output_tokens
        end = -(-length // PAGE_SIZE) * PAGE_SIZE
        row[:first] = self.cache.prefix_device_indices(req).to(torch.int32)
        own = self.allocator.alloc(end - first)
        assert own is not None, "the benchmark's pool is too small"
        row[first:end] = own.to(torch.int32)
        req.kv.cache_protected_len = first
        req.kv.kv_allocated_len = end

    def publish(self, req: Req, up_to: int) -> int:
        """``checkpoint`` the row, duplicates freed and all; returns nanoseconds.

        The forward pass that computed the rows is committed before: our cache publishes no others.
        """
        cache, clock = self.cache, self.clock
        if isinstance(cache, TesseraCache):
            _commit(cache, req, up_to)
        start = clock()
        cache.checkpoint(req, up_to=up_to)
        return clock() - start

    def finish(self, req: Req, output: Tokens | None = None) -> int:
        """Publish the output too, if there is one, and give the row back; returns the former's time."""
        took = 0
        if output:
            req.output_ids.extend(output)
            req.refresh_fill_ids()
            req.finished_reason = FINISH_LENGTH(length=len(output))
            took = self.publish(req, computed_tokens(req))
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.kv.kv_allocated_len)])
        self.cache.unlock(req.lock)
        req.lock = None
        self.rows.free_slots.append(req.kv.req_pool_idx)
        return took

    def insert(self, tokens: Tokens) -> tuple[Found, int]:
        """A whole request without output; its look-up, and nanoseconds of its publication."""
        req = request(tokens)
        found = self.look_up(req)
        self.admit(req)
        took = self.publish(req, len(tokens))
        self.finish(req)
        return found, took


def _commit(cache: TesseraCache, req: Req, up_to: int) -> None:
    """A pass over the rows that no pass has written so far."""
    start = cache.publication.residency(req).committed_tokens
    if start < up_to:
        with cache.publication.open([(req, start, up_to)]):
            pass


def computed_tokens(req: Req) -> int:
    """Tokens of a request whose KV there is: the last sampled one was never run."""
    return len(req.full_untruncated_fill_ids) - bool(req.output_ids)


def request(tokens: Tokens) -> Req:
    """SGLang's request for a prompt, ready to be matched."""
    req = Req("benchmark", "", tokens, SamplingParams(temperature=0, max_new_tokens=1))
    req.refresh_fill_ids()
    return req


def build_side(name: str, *, capacity_tokens: int, row_tokens: int, clock: Clock) -> Side:
    """A side by its name: ``tessera``, or a stock core."""

    def ours(params: CacheInitParams) -> BasePrefixCache:
        return TesseraCache(params, model_identity="benchmark")

    def stock(params: CacheInitParams) -> BasePrefixCache:
        params.tree_core_backend = name
        cache = UnifiedRadixCache(params)
        found: Any = cache._tree_core_backend
        if found != name:
            raise RuntimeError(f"SGLang fell back to its {found} core")
        return cache

    return Side(
        name,
        ours if name == OURS else stock,
        capacity_tokens=capacity_tokens,
        row_tokens=row_tokens,
        clock=clock,
    )


def in_turn(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """The sides, another one first for each ``number``."""
    turn = number % len(sides)
    return (*sides[turn:], *sides[:turn])


def available_cores() -> dict[str, str | None]:
    """Stock's cores and why each can not be compared; None where it can."""
    found: dict[str, str | None] = {}
    for name in STOCK_CORES:
        try:
            build_side(name, capacity_tokens=PAGE_SIZE, row_tokens=PAGE_SIZE, clock=lambda: 0)
            found[name] = None
        except (ImportError, OSError, RuntimeError) as error:
            found[name] = str(error)
    return found
