"""Log lines that can come often: one an interval, and what was held back is said with the next one."""

from __future__ import annotations

import time


class RateLimit:
    """``held = limit.pass_at(now)``; log unless that is None."""

    __slots__ = ("_held", "_interval_s", "_next_s")

    def __init__(self, interval_s: float = 60.0) -> None:
        """At most one line in ``interval_s`` seconds."""
        self._interval_s = interval_s
        self._next_s = float("-inf")
        self._held = 0

    def pass_at(self, now_s: float | None = None) -> int | None:
        """How many lines were held back since the last one that passed; None: hold this one, too.

        ``now_s`` is on the clock of ``time.monotonic``, which is asked where it is None.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if now_s < self._next_s:
            self._held += 1
            return None
        held, self._held = self._held, 0
        self._next_s = now_s + self._interval_s
        return held
