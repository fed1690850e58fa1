"""Calls of an engine that may never come back.

A call that is given up may still write to the memory it was given. So whoever uses that memory has a
turn, and a turn that was given up ends when its call does, if ever: until then others are refused at
once instead of queueing up behind it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

PAUSE_S = 1.0  # after a call that was given up: an engine in trouble is not asked in every step

T = TypeVar("T")


class GivenUp(Exception):
    """No answer in time. ``reason``: ``timeout`` of this call, ``busy`` where it was not made."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Call:
    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.result: object = None
        self.error: BaseException | None = None
        self.done = threading.Event()


class Turn:
    """Exclusive use of a lane and of the memory that goes with it."""

    def __init__(self, caller: Caller, deadline: float) -> None:
        self._caller = caller
        self.deadline = deadline
        self.given_up = False  # with a call in it, which ends the turn when it comes back

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns or raises.

        Raises:
            GivenUp: it did not come back before the turn's deadline.
        """
        result: T = self._caller._call(self, function)  # type: ignore[assignment]
        return result


class Caller:
    """A thread that makes one call at a time."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """``timeout_s``: of a whole turn, with the wait for it."""
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._state = threading.Lock()  # guards what follows
        self._abandoned: _Call | None = None
        self._resume = 0.0
        # A daemon: an engine that never answers must not keep the process from ending.
        threading.Thread(target=self._work, name=f"tessera-remote-{name}", daemon=True).start()

    @contextlib.contextmanager
    def turn(self) -> Iterator[Turn]:
        """Wait for a turn; it ends with the block.

        Raises:
            GivenUp: no turn was to be had in time.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._state:
            if self._abandoned is not None or time.monotonic() < self._resume:
                raise GivenUp("busy")
        if not self._turn.acquire(timeout=self._timeout_s):
            raise GivenUp("busy")
        turn = Turn(self, deadline)
        try:
            yield turn
        finally:
            if not turn.given_up:
                self._turn.release()

    def stop(self) -> None:
        """No call comes after those that were made."""
        self._calls.put(None)

    def _call(self, turn: Turn, function: Callable[[], object]) -> object:
        call = _Call(function)
        self._calls.put(call)
        if not call.done.wait(max(0.0, turn.deadline - time.monotonic())):
            with self._state:
                if not call.done.is_set():
                    self._abandoned = call
                    turn.given_up = True
                    self._resume = time.monotonic() + PAUSE_S
                    raise GivenUp("timeout")
        if call.error is not None:
            if isinstance(call.error, Exception):
                raise call.error
            raise RuntimeError(f"an engine raised {call.error!r}") from call.error
        return call.result

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.function()
            except BaseException as error:  # the caller's to handle
                call.error = error
            with self._state:
                call.done.set()
                if self._abandoned is call:
                    self._abandoned = None
                    self._turn.release()
            del call  # with all that its function refers to
