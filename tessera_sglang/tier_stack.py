"""Lower tiers as ``TESSERA_CONFIG`` asks for them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tessera_sglang.memory_pool.host import HostTier
from tessera_sglang.memory_pool.tiers import TierStack

from .config import VARIABLE, Config, ConfigError
from .kv_memory import KvMemory

logger = logging.getLogger(__name__)


def tiers_of(config: Config) -> Callable[[KvMemory], TierStack] | None:
    """What opens the lower tiers over a pool's memory; None where none is wanted.

    It raises ConfigError where a tier can not be had.
    """
    if not config.host_bytes:
        return None
    return lambda memory: _open(config, memory)


def _open(config: Config, memory: KvMemory) -> TierStack:
    try:
        host = HostTier(memory.page_bytes, config.host_bytes, pinned=True)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from error
    logger.info(
        "host tier: %d pages of %d B, %.3f GB%s",
        *(host.page_count, memory.page_bytes, host.page_count * memory.page_bytes / 1e9),
        ", page-locked" if host.pinned else "",
    )
    return TierStack(host)
