"""SGLang's storage engines behind one face: which keys are there, read rows, write rows.

Engines have one of two interfaces: the one in use (``batch_get_v1``: rows of a registered pool) and an
older one (``batch_get``: tensors). Which engine has which is written into SGLang's controller.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from tessera_sglang import compat
from tessera_sglang.config import VARIABLE, ConfigError

from .staging import StagingPool

# As in sglang.srt.managers.cache_controller, attach_storage_backend
_ROWS = frozenset(
    ("hf3fs", "mooncake", "npu_memcache", "eic", "nixl", "simm", "mori", "tensorcast", "seaweedfs")
)
_NO_BYTES = {
    "sim": "it keeps keys and no bytes",
    "shm": "it keeps nothing: it stands for an allocator",
}
DIRECTORY = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


def known_names() -> list[str]:
    """What ``remote_tier`` may be."""
    names = {*compat.storage_backend_names(), "dynamic"}
    return sorted(names - _NO_BYTES.keys())


def parse_extra(name: str, extra: dict[str, Any] | str | None) -> dict[str, Any]:
    """Settings of an engine, as ``--hicache-storage-backend-extra-config`` takes them.

    An object, its JSON text, or ``@path`` of a .json, .toml or .yaml file. What SGLang's controller
    takes for itself (``prefetch_threshold`` …) is checked and left out: no prefetch of SGLang's runs.
    For ``file``, ``directory`` is another word for the engine's own ``file_storage_path``.

    Raises:
        ConfigError: it can not be read, or ``file`` has no directory.
    """
    text = json.dumps(extra) if isinstance(extra, dict) else extra
    try:
        found = compat.parse_storage_config(text)
    except Exception as error:  # an OSError, or whatever a parser raises
        raise ConfigError(
            f"{VARIABLE}: remote_tier_extra_config can not be used: {error}; give an object, or "
            '"@path" of a .json, .toml or .yaml file'
        ) from error
    if name != "file":
        return found
    directory = found.pop("directory", None) or found.get("file_storage_path")
    override = os.environ.get(DIRECTORY)
    if not directory and not override:
        raise ConfigError(
            f'{VARIABLE}: remote_tier "file" needs a directory that the servers share: '
            f'"remote_tier_extra_config": {{"directory": "/path"}}, or the variable {DIRECTORY}'
        )
    if directory and override and os.path.abspath(override) != os.path.abspath(directory):
        raise ConfigError(
            f"{VARIABLE}: remote_tier_extra_config says directory {directory!r}, and {DIRECTORY}, which "
            f"SGLang puts first, says {override!r}; drop one of them"
        )
    return {**found, "file_storage_path": override or directory}


class Backend:
    """An engine and the pool whose rows it reads and writes."""

    def __init__(
        self, name: str, extra: dict[str, Any], pool: StagingPool, model_name: str
    ) -> None:
        """Build the engine; may take as long as it takes to reach its servers.

        Raises:
            ConfigError: it can not be built.
        """
        self.name = name
        self._pool = pool
        self._rows = name in _ROWS or (name == "dynamic" and bool(extra.get("interface_v1", 0)))
        if name in _NO_BYTES or name not in known_names():
            why = _NO_BYTES.get(name, "SGLang knows no such storage backend")
            raise ConfigError(
                f"{VARIABLE}: remote_tier {name!r}: {why}. Known: {', '.join(known_names())}"
            )
        try:
            self._engine = compat.storage_backend(name, dict(extra), pool, model_name)
            self._engine.register_mem_pool_host(pool)
            self._engine.on_host_pools_registered()
        except Exception as error:  # an import, a connection, a setting: theirs to say
            raise ConfigError(
                f"{VARIABLE}: remote_tier {name!r} could not be built: {type(error).__name__}: {error}. "
                "Its settings go into remote_tier_extra_config; install what it needs, or choose "
                f"another of {', '.join(known_names())}"
            ) from error

    def leading(self, keys: list[str]) -> int:
        """How many of the first keys are there."""
        return int(self._engine.batch_exists(keys))

    def get(self, keys: list[str], first: int) -> list[bool | None]:
        """Read values into rows from ``first`` on.

        Which of them the engine says it read; None for those over which it raised. Engines that fail
        as a whole for one bad value are asked again for each. Raises what the engine raises where it
        does so for all.
        """
        try:
            landed = self._get(keys, first)
        except Exception:
            if len(keys) == 1:
                raise
            landed = [False] * len(keys)
        if any(landed) or len(keys) == 1:
            return [*landed]
        outcome: list[bool | None] = []
        failed: Exception | None = None
        for number, key in enumerate(keys):
            try:
                outcome += self._get([key], first + number)
            except Exception as error:
                failed = error
                outcome.append(None)
        if failed is not None and all(landed is None for landed in outcome):
            raise failed
        return outcome

    def set(self, keys: list[str], first: int) -> list[bool]:
        """Store rows from ``first`` on; which of them the engine holds now."""
        if self._rows:
            indices = torch.arange(first, first + len(keys), dtype=torch.int64)
            return [bool(done) for done in self._engine.batch_set_v1(keys, indices)]
        values = list(self._pool.kv_buffer[first : first + len(keys)])
        if self._engine.batch_set(keys, values):
            return [True] * len(keys)
        return [bool(self._engine.exists(key)) for key in keys]

    def close(self) -> None:
        """Let the engine finish, where it has a way to."""
        close = getattr(self._engine, "close", None)
        if close is not None:
            close()

    def _get(self, keys: list[str], first: int) -> list[bool]:
        if self._rows:
            indices = torch.arange(first, first + len(keys), dtype=torch.int64)
            return [bool(landed) for landed in self._engine.batch_get_v1(keys, indices)]
        targets = list(self._pool.kv_buffer[first : first + len(keys)])
        found = self._engine.batch_get(keys, targets) or [None] * len(keys)
        return [_brought(value, target) for value, target in zip(found, targets, strict=True)]


def _brought(value: Any, target: torch.Tensor) -> bool:
    if value is None or value is False:
        return False
    if isinstance(value, torch.Tensor) and value.data_ptr() != target.data_ptr():
        raw = value.reshape(-1).view(torch.uint8)
        if raw.numel() != target.numel():
            return False
        target.copy_(raw)
    return True
