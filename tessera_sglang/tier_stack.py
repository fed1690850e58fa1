"""Lower tiers as ``TESSERA_CONFIG`` asks for them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from tessera_sglang.memory_pool.disk import DiskStore
from tessera_sglang.memory_pool.host import HostTier
from tessera_sglang.memory_pool.lower import Store
from tessera_sglang.memory_pool.tiers import TierStack

from .config import VARIABLE, Config, ConfigError
from .kv_memory import KvMemory

logger = logging.getLogger(__name__)


def tiers_of(config: Config, manifest: bytes) -> Callable[[KvMemory], TierStack] | None:
    """What opens the lower tiers over a pool's memory; None where none is wanted.

    ``manifest`` is JSON and names what computes the KV. Opening raises ConfigError where a tier can not
    be had.
    """
    if not config.host_bytes:
        return None

    def opened(memory: KvMemory) -> TierStack:
        try:
            return _open(config, manifest, memory)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from error

    return opened


def _open(config: Config, manifest: bytes, memory: KvMemory) -> TierStack:
    size = memory.page_bytes
    host = HostTier(size, config.host_bytes, pinned=True)
    logger.info(
        "host tier: %d pages of %d B, %.3f GB%s",
        *(host.page_count, size, host.page_count * size / 1e9),
        ", page-locked" if host.pinned else "",
    )
    store: Store | None = None
    if config.disk_tier_path is not None:
        assert config.disk_tier_bytes is not None
        store = DiskStore.open(
            config.disk_tier_path,
            manifest=manifest,
            page_bytes=size,
            layout=json.dumps(memory.layout).encode(),
            capacity_bytes=config.disk_tier_bytes,
        )
        logger.info(
            "disk tier: %s, up to %.3f GB, records of %s",
            *(config.disk_tier_path, config.disk_tier_bytes / 1e9, store.digest.hex()[:16]),
        )
    return TierStack(host, store)
