"""SGLang's KV pool for DeepSeek-V4: its pages are the two-tier pool's, and it has no other bytes.

SGLang's allocator numbers pages from 1, as the two-tier pool does, and owns all of them from the start;
the pool's own bookkeeping of pages is not used. Arena slots are handed out in :mod:`.rows`.
"""

from __future__ import annotations

import logging
from typing import Any

from tessera_sglang.compat import NoOpMHATokenToKVPool
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.v4 import LayerStorage, pool_geometry

from .config import is_served
from .rows import Rows

logger = logging.getLogger(__name__)

SAVED_STATES = 256
"""Slots for states saved with pages, beside those of running requests. No more than there are pages."""


class V4KvPool(NoOpMHATokenToKVPool):  # type: ignore[misc] # untyped base
    """Sizes and a page numbering for SGLang; ``tiers`` and ``rows`` for us, once :func:`attach` ran."""

    tiers: TwoTierPool | None = None
    rows: Rows | None = None

    def _finalize_allocation_log(self, num_tokens: int) -> None:
        self.mem_usage = 0.0  # until the tiers are there

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Of keys and values, which are one here."""
        return (self.tiers.nbytes if self.tiers is not None else 0), 0

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Refused: rows of this pool are written by the model's own caches."""
        raise RuntimeError("a layer writes keys and values into a pool that has none")


def pool_class(original: Any, configurator: Any, *, kind: Any, default: type) -> type:
    """Around ``KVCacheConfigurator._resolve_kv_pool_class``."""
    if kind == "mha" and is_served(configurator.model_config.hf_config):
        return V4KvPool
    found: type = original(configurator, kind=kind, default=default)
    return found


def attach(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``ModelRunner.alloc_memory_pool``: the tiers, of the size that SGLang decided on."""
    if not is_served(runner.model_config.hf_config):
        return result
    kv = runner.token_to_kv_pool
    if type(kv) is not V4KvPool:
        raise RuntimeError(
            f"DeepSeek-V4 on a CPU: SGLang built a {type(kv).__name__} where the two-tier pool belongs"
        )
    pages, running = kv.size // kv.page_size, runner.req_to_token_pool.size
    geometry = pool_geometry(runner.model.config, kv.dtype, page_tokens=kv.page_size)
    states = max(1, min(pages, SAVED_STATES))
    tiers = TwoTierPool(geometry, pages=pages, slots=running + states, running=running)
    tiers.paged.allocate(pages)
    kv.tiers, kv.rows = tiers, Rows(tiers)
    kv.mem_usage = tiers.nbytes / (1 << 30)
    runner.req_to_token_pool.register_on_alloc_rows(kv.rows.release)
    runner.model.bind(
        LayerStorage(tiers, runner.model.config), kv.rows, runner.req_to_token_pool.req_to_token
    )
    logger.info(
        "two-tier pool: %d pages of %d tokens (%d B each), %d arena slots for running requests and %d "
        "for saved states, %.3f GB",
        *(pages, kv.page_size, geometry.page_bytes, running, states, kv.mem_usage),
    )
    return result


def is_v4_pool(pool: Any) -> bool:
    """Whether DeepSeek-V4 is served from a pool of SGLang's."""
    return isinstance(pool, V4KvPool)
