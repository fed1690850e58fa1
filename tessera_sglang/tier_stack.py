"""Lower tiers as ``TESSERA_CONFIG`` asks for them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from tessera_sglang.memory_pool.disk import DiskStore
from tessera_sglang.memory_pool.host import HostTier
from tessera_sglang.memory_pool.lower import Store
from tessera_sglang.memory_pool.manifest import Manifest, weights_fingerprint
from tessera_sglang.memory_pool.tiers import TierStack

from .config import VARIABLE, Config, ConfigError
from .kv_memory import KvMemory, kv_memory

logger = logging.getLogger(__name__)


def manifest_of(ctx: Any, *, rope: str, identity: str, key: str) -> Manifest:
    """What computes the KV of a server; ``ctx`` is SGLang's ``TreeCacheBuildContext``.

    ``identity`` names what it names within a process, ``key`` what asked for it. Raises ConfigError
    where the weights can not be named.
    """
    model, pool = ctx.model_config, ctx.params.token_to_kv_pool_allocator.get_kvcache()
    memory = kv_memory(pool, ctx.params.page_size)
    settings = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "config": _config_digest(model.hf_config),
    }
    return Manifest(
        architecture=str(model.hf_config.architectures),
        weights=_weights(model, ctx.server_args.load_format, identity, key),
        settings=json.dumps(settings, sort_keys=True),
        rope=rope,
        rows=tuple(memory.layout) if memory is not None else (),
        kv_dtype=str(pool.dtype),
        page_tokens=ctx.params.page_size,
        tp_rank=ctx.tp_rank,
        tp_size=ctx.tp_size,
    )


def _config_digest(hf_config: Any) -> str:
    fields = hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # say nothing of what is computed
        fields.pop(name, None)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _weights(model: Any, load_format: Any, identity: str, key: str) -> str:
    if "dummy" in str(load_format).lower():
        return f"dummy {uuid.uuid4()}"  # drawn anew in each process
    started = time.perf_counter()
    directory = Path(model.model_path)
    if not directory.is_dir():
        cached = try_to_load_from_cache(model.model_path, "config.json", revision=model.revision)
        if not isinstance(cached, str):
            raise ConfigError(
                f"{VARIABLE}: {key}: the weights of {identity} lie in no directory that is "
                "known, so what is stored can not be named by them; serve it from a local directory"
            )
        directory = Path(cached).parent
    try:
        found = weights_fingerprint(directory)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{VARIABLE}: {key}: {error}") from error
    logger.info("weights %s, named in %.2f s", found[:16], time.perf_counter() - started)
    return found


def tiers_of(config: Config, manifest: Manifest | None) -> Callable[[KvMemory], TierStack] | None:
    """What opens the lower tiers over a pool's memory; None where none is wanted.

    ``manifest`` names what computes the KV; a tier that outlives the process needs one. Opening raises
    ConfigError where a tier can not be had.
    """
    if not config.host_bytes:
        return None

    def opened(memory: KvMemory) -> TierStack:
        try:
            return _open(config, manifest, memory)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {error}") from error

    return opened


def _open(config: Config, manifest: Manifest | None, memory: KvMemory) -> TierStack:
    size = memory.page_bytes
    host = HostTier(size, config.host_bytes, pinned=True)
    logger.info(
        "host tier: %d pages of %d B, %.3f GB%s",
        *(host.page_count, size, host.page_count * size / 1e9),
        ", page-locked" if host.pinned else "",
    )
    if manifest is None:
        return TierStack(host)
    return TierStack(host, _disk(config, manifest, memory) or _remote(config, manifest, memory))


def _disk(config: Config, manifest: Manifest, memory: KvMemory) -> Store | None:
    if config.disk_tier_path is None:
        return None
    assert config.disk_tier_bytes is not None
    try:
        store = DiskStore.open(
            Path(config.disk_tier_path).expanduser(),
            manifest=manifest.json(),
            page_bytes=memory.page_bytes,
            layout=json.dumps(memory.layout).encode(),
            capacity_bytes=config.disk_tier_bytes,
        )
    except ValueError as error:
        raise ConfigError(
            f"{VARIABLE}: disk_tier_path {config.disk_tier_path!r}: {error}"
        ) from error
    logger.info(
        "disk tier: %s, up to %.3f GB, records of %s",
        *(config.disk_tier_path, config.disk_tier_bytes / 1e9, store.digest.hex()[:16]),
    )
    return store


def _remote(config: Config, manifest: Manifest, memory: KvMemory) -> Store:
    from .remote import RemoteStore  # engines bring libraries of their own

    assert config.remote_tier is not None
    store = RemoteStore(
        config.remote_tier,
        config.remote_tier_extra_config,
        page_bytes=memory.page_bytes,
        manifest_digest=bytes.fromhex(manifest.digest),
    )
    logger.info("remote tier: %s, values of %s", config.remote_tier, manifest.digest[:16])
    return store
