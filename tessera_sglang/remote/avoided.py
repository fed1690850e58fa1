"""Keys that are not worth a call for a while: their values are bad, and no engine deletes a key."""

from __future__ import annotations

import threading
import time

AVOID_S = 300.0  # then somebody may have cleared the engine, or what could not be read can be
MOST_KEYS = 1 << 16


class Avoided:
    """A set whose members leave by themselves. Any thread may call it."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, key: str) -> None:
        """Avoid a key from now on."""
        with self._lock:
            self._until.pop(key, None)
            self._until[key] = time.monotonic() + AVOID_S
            if len(self._until) > MOST_KEYS:
                del self._until[next(iter(self._until))]

    def among(self, keys: list[str]) -> set[str]:
        """Those of the keys that are in it."""
        with self._lock:
            if not self._until:
                return set()
            now = time.monotonic()
            return {key for key in keys if self._until.get(key, 0.0) > now}
