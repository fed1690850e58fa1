"""Time that may be spent: nothing new starts late, and nothing that hangs is waited for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

START_WITHIN_S = 7 * 60.0
STOP_AFTER_S = 7 * 60.0 + 40.0


class OverBudgetError(BaseException):  # no library that breaks may be taken for it
    """A section was cut off."""


class Budget:
    """Counts from the moment it is made."""

    def __init__(self, start_within_s: float = START_WITHIN_S, stop_after_s: float = STOP_AFTER_S):
        self._begin = time.monotonic()
        self._start_within_s, self._stop_after_s = start_within_s, stop_after_s
        self.skipped: list[str] = []

    @property
    def spent_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._begin

    def allows(self, what: str) -> bool:
        """Whether something may start; what may not is remembered."""
        if self.spent_s < self._start_within_s:
            return True
        self.skipped.append(what)
        return False

    @contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Cut off what is inside when time is up, between two steps of Python: say, while nvcc runs."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread gets signals
            return

        def stop(number: int, frame: FrameType | None) -> None:
            raise OverBudgetError(what)

        previous = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(self._stop_after_s - self.spent_s, 1e-3))
        try:
            yield
        except OverBudgetError:
            self.skipped.append(f"{what}, cut off")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous)
