"""SGLang's real pools and a cache over them, driven request by request, without a scheduler."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

from tessera_sglang.cache import TesseraCache

PAGE = 16
PAGES = 24
LAYERS = 3
KNOWN = list(range(100, 100 + 4 * PAGE))


class Engine:
    """What the scheduler does to a cache, over pools of its own."""

    def __init__(self, *, pages: int = PAGES, verify_latents: bool = False) -> None:
        self.kv = MLATokenToKVPool(
            size=pages * PAGE,
            page_size=PAGE,
            dtype=torch.float32,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            pages * PAGE, PAGE, torch.float32, "cpu", self.kv, need_sort=False
        )
        self.rows = ReqToTokenPool(16, pages * PAGE, "cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = TesseraCache(
            params, model_identity="test", rope_hash="rope", verify_latents=verify_latents
        )

    def arrive(self, tokens: list[int], req: Req | None = None) -> Req:
        """A request that was matched; ``req`` is one that was retracted."""
        params = SamplingParams(temperature=0, max_new_tokens=1)
        req = req or Req("r", "", array("q", tokens), params)
        req.refresh_fill_ids()
        key = RadixKey(req.full_untruncated_fill_ids, limit=len(tokens) - 1)
        found = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_len, req.last_node = found.device_prefix_len, found.last_device_node
        req.host_hit_length, req.best_match_node = found.host_hit_length, found.best_match_node
        req.kv.cache_protected_len = req.prefix_len
        return req

    def fork(self, req: Req) -> int:
        """Let an admitted request have its load-back; returns rows."""
        lock = self.cache.lock(req.last_node)
        rows, req.last_node = self.cache.init_load_back(
            InitLoadBackParams(req.best_match_node, host_hit_length=req.host_hit_length, req=req)
        )
        self.cache.unlock(lock)
        req.prefix_len += rows
        return rows

    def start(self, req: Req) -> None:
        """Lock, allocate, write the row."""
        req.lock = self.cache.lock(req.last_node)
        (req.kv.req_pool_idx,) = self.rows.alloc_rows(1)
        row, length = self.row(req), len(req.full_untruncated_fill_ids)
        row[: req.prefix_len] = self.cache.prefix_device_indices(req).to(torch.int32)
        owned = -(-req.prefix_len // PAGE) * PAGE
        if owned > req.prefix_len:  # the rest of a forked page
            last = int(row[req.prefix_len - 1])
            row[req.prefix_len : owned] = torch.arange(last + 1, last + 1 + owned - req.prefix_len)
        end = -(-length // PAGE) * PAGE
        if end > owned:
            row[owned:end] = self.allocator.alloc(end - owned).to(torch.int32)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = length

    def compute(self, req: Req, value: float) -> None:
        """Write latents of everything that was not cached, in a pass that is committed."""
        length = len(req.full_untruncated_fill_ids)
        with self.cache.publication.open([(req, req.prefix_len, length)]):
            self.write(req, value, req.prefix_len, length)

    def write(self, req: Req, value: float, start: int, end: int) -> None:
        """Write latents of some row positions."""
        slots = self.row(req)[start:end].long()
        for layer in range(LAYERS):
            self.kv.kv_buffer[layer][slots] = value + layer

    def finish(self, req: Req, *, publish: bool = True) -> None:
        length = len(req.full_untruncated_fill_ids)
        if publish:
            self.cache.checkpoint(req, up_to=length)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, length)])
        self.cache.unlock(req.lock)
        self.cache.on_release(req, checkpointed=publish)
        self.rows.free_slots.append(req.kv.req_pool_idx)
        req.kv.req_pool_idx = None

    def serve(self, tokens: list[int], value: float) -> Req:
        """A whole request; returns it as it was before it gave its row back."""
        req = self.arrive(tokens)
        self.start(req)
        self.compute(req, value)
        self.finish(req)
        self.check()
        return req

    def scribble(self) -> None:
        """Let somebody else write all pages that are free."""
        slots = self.allocator.alloc(self.allocator.available_size())
        for layer in range(LAYERS):
            self.kv.kv_buffer[layer][slots] = 99.0
        self.allocator.free(slots)

    def row(self, req: Req) -> Any:
        return self.rows.req_to_token[req.kv.req_pool_idx]

    def latents(self, slots: Any) -> list[float]:
        return self.kv.kv_buffer[LAYERS - 1][slots.long(), 0, 0].tolist()

    def check(self) -> None:
        self.cache.index.check_invariants()
        self.cache.paged_tier()  # asserts that every page is counted once


def pages_of(row: Any, tokens: int) -> list[int]:
    return (row[:tokens:PAGE] // PAGE).tolist()
