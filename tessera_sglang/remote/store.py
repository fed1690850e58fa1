"""A tier in a storage engine that several servers share.

    store = RemoteStore("file", {"directory": "/mnt/kv"}, page_bytes=..., manifest_digest=...)

Threads: lookups, reads and writes have a lane each, and a staging half of their own where they move
bytes; within a lane one call runs at a time. Whatever an engine does wrong is a miss and a counter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from tessera_sglang.config import VARIABLE, ConfigError
from tessera_sglang.memory_pool.lower import PageName, Worth

from .avoided import Avoided
from .backend import Backend, parse_extra
from .calls import Caller, GivenUp, Turn
from .record import Rejected, fits, key_text, pack, record_bytes, verified
from .staging import StagingPool

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # of reading or writing what fits the staging memory
LOOKUP_TIMEOUT_S = 0.25  # a scheduler waits for it
LOG_EVERY_S = 60.0

T = TypeVar("T")


class RemoteStore:
    """A :class:`~tessera_sglang.memory_pool.lower.Store` over one of SGLang's HiCache backends."""

    def __init__(
        self,
        backend_name: str,
        extra_config: dict[str, Any] | str | None,
        *,
        page_bytes: int,
        manifest_digest: bytes,
        model_name: str = "tessera",
    ) -> None:
        """Build the engine.

        Args:
            backend_name: one of SGLang's storage backends, or ``dynamic``.
            extra_config: its settings; ``timeout_s`` and ``lookup_timeout_s`` in it are ours.
            page_bytes: size of a page of this rank.
            manifest_digest: names model, layout and rank, 32 bytes; values of another are not found.
            model_name: prefix that engines put to keys; servers that share pages need the same.

        Raises:
            ConfigError: settings are wrong, or the engine can not be built.
        """
        assert len(manifest_digest) == 32, "a manifest's digest has 32 bytes"
        extra = parse_extra(backend_name, extra_config)
        timeout_s = _seconds(extra, "timeout_s", TIMEOUT_S)
        lookup_timeout_s = _seconds(extra, "lookup_timeout_s", LOOKUP_TIMEOUT_S)
        self._page_bytes = page_bytes
        self._manifest = manifest_digest
        self._pool = StagingPool(record_bytes(page_bytes))
        self._backend = Backend(backend_name, extra, self._pool, model_name.replace("/", "-"))
        self._lookups = Caller("lookup", lookup_timeout_s)
        self._reads = Caller("read", timeout_s)
        self._writes = Caller("write", timeout_s)
        self._avoided = Avoided()
        self._lock = threading.Lock()  # guards what follows
        self._counts: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()  # by reason
        self._failures: Counter[str] = Counter()  # by operation and reason
        self._logged = -LOG_EVERY_S
        self._closed = False

    @property
    def damaged(self) -> int:
        """Values that were read and were not the page that had been asked for."""
        with self._lock:
            return self._rejected.total()

    @property
    def evicted(self) -> int:
        """0: the engine decides about that, and does not say."""
        return 0

    def state(self) -> dict[str, object]:
        """Counters: pages, but for ``failures``, which are calls."""
        with self._lock:
            return {
                "backend": self._backend.name,
                "record_bytes": self._pool.size_per_token,
                **{name: self._counts[name] for name in ("read", "absent", "stored", "not_stored")},
                "oversized_names": self._counts["oversized_names"],
                "rejected": dict(self._rejected),
                "failures": dict(self._failures),
            }

    def contains(self, names: list[PageName]) -> list[bool]:
        """Which pages the engine says it has.

        A page whose predecessor in the list is its parent and is not there is not asked about: nobody
        can use it, and an engine answers only up to the first key that it lacks.
        """
        keys = [key_text(self._manifest, name) for name in names]
        there = [False] * len(names)
        bad = self._avoided.among(keys)

        def look_up() -> list[bool]:
            at = 0
            while at < len(keys):
                end = next((i for i in range(at, len(keys)) if keys[i] in bad), len(keys))
                found = min(self._backend.leading(keys[at:end]), end - at) if end > at else 0
                there[at : at + found] = [True] * found
                at += found + 1  # past the one that is lacking
                while at < len(keys) and names[at].parent == names[at - 1].key:
                    at += 1
            return there

        return list(
            self._guarded("lookup", self._lookups, lambda turn: turn.call(look_up)) or there
        )

    def read(self, names: list[PageName], into: memoryview) -> list[bool]:
        """Read pages into ``into``; which of them landed, verified."""
        landed: list[bool] = []
        for start in range(0, len(names), self._pool.slots):
            part = names[start : start + self._pool.slots]
            target = into[start * self._page_bytes :]
            landed += self._read(part, target)
        return landed

    def _read(self, names: list[PageName], into: memoryview) -> list[bool]:
        keys = [key_text(self._manifest, name) for name in names]
        landed = [False] * len(names)

        def run(turn: Turn) -> list[bool]:
            for row in range(len(keys)):
                self._pool.rows[row][:24] = bytes(24)  # an engine that brings nothing must not pass
            found = turn.call(lambda: self._backend.get(keys, 0))
            for number, (name, there) in enumerate(zip(names, found, strict=True)):
                if there:
                    page = into[number * self._page_bytes :]
                    landed[number] = self._land(number, keys[number], name, page)
                elif there is None:
                    self._reject(keys[number], "unreadable")
            with self._lock:
                self._counts["absent"] += sum(there is False for there in found)
                self._counts["read"] += sum(landed)
            return landed

        return self._guarded("read", self._reads, run) or [False] * len(names)

    def _land(self, row: int, key: str, name: PageName, into: memoryview) -> bool:
        record = self._pool.rows[row]
        try:
            page = verified(record, name, self._page_bytes, manifest=self._manifest)
        except Rejected as error:
            self._reject(key, error.reason)
            return False
        into[: self._page_bytes] = page
        return True

    def _reject(self, key: str, reason: str) -> None:
        self._avoided.add(key)
        with self._lock:
            self._rejected[reason] += 1
        self._log("a value is not the page that it should be (%s); key %s", reason, key)

    def write(self, names: list[PageName], pages: memoryview, worth: list[Worth]) -> list[bool]:
        """Store pages; which of them the engine holds now. It keeps what it has under a key.

        What pages are worth is of no use here: engines decide by themselves what to drop.
        """
        stored: list[bool] = []
        for start in range(0, len(names), self._pool.slots):
            part = names[start : start + self._pool.slots]
            stored += self._write(part, pages[start * self._page_bytes :])
        return stored

    def _write(self, names: list[PageName], pages: memoryview) -> list[bool]:
        size, first = self._page_bytes, self._pool.slots
        keys = [key_text(self._manifest, name) for name in names]
        bad = self._avoided.among(keys)  # engines keep what they have under a key
        fitting = [number for number, name in enumerate(names) if fits(name)]
        chosen = [number for number in fitting if keys[number] not in bad]
        stored = [False] * len(names)

        def run(turn: Turn) -> list[bool]:
            for row, number in enumerate(chosen, first):
                page = pages[number * size : (number + 1) * size]
                pack(names[number], page, manifest=self._manifest, into=self._pool.rows[row])
            wanted = [keys[number] for number in chosen]
            done = turn.call(lambda: self._backend.set(wanted, first))
            for number, held in zip(chosen, done, strict=True):
                stored[number] = held
            return stored

        if chosen:
            self._guarded("write", self._writes, run)
        with self._lock:
            self._counts["oversized_names"] += len(names) - len(fitting)
            self._counts["stored"] += sum(stored)
            self._counts["not_stored"] += len(stored) - sum(stored)
        return stored

    def close(self) -> None:
        """Let the engine finish; what is asked for afterwards is a miss."""
        with self._lock:
            if self._closed:
                return
        self._guarded("close", self._writes, lambda turn: turn.call(self._backend.close))
        with self._lock:
            self._closed = True
        for caller in (self._lookups, self._reads, self._writes):
            caller.stop()

    def _guarded(self, what: str, caller: Caller, run: Callable[[Turn], T]) -> T | None:
        """What ``run`` returns; None where the engine failed, which is counted."""
        with self._lock:
            if self._closed:
                return None
        try:
            with caller.turn() as turn:
                return run(turn)
        except GivenUp as error:
            reason = error.reason
        except Exception as error:  # an engine may raise anything; here it is a miss
            reason = "error"
            self._log("the shared engine failed to %s: %r", what, error)
        with self._lock:
            self._failures[f"{what}_{reason}"] += 1
        return None

    def _log(self, message: str, *values: object) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._logged < LOG_EVERY_S:
                return
            self._logged = now
        logger.warning("remote tier %r: " + message, self._backend.name, *values)


def _seconds(extra: dict[str, Any], key: str, default: float) -> float:
    value = extra.pop(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(
            f"{VARIABLE}: remote_tier_extra_config: {key} must be a number of seconds above 0, got "
            f"{value!r}"
        )
    return float(value)
