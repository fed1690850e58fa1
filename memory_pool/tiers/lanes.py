"""Threads that work off jobs, and where finished ones wait to be collected.

A lane is a queue with threads of its own, so that copies never wait for a disk, nor reads for writes.
Threads are daemons: a disk that never answers must not keep the process from ending, which
``concurrent.futures`` would.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Protocol

logger = logging.getLogger(__name__)


class Job(Protocol):
    """Work of one thread. What it did is in its own fields; only ``failed`` is set by the lane."""

    failed: bool

    def run(self) -> None:
        """On a thread of the lane."""


class Finished:
    """Jobs that are done, in the order in which they were."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._arrived = threading.Condition()

    def put(self, job: Job) -> None:
        """Any thread."""
        with self._arrived:
            self._jobs.append(job)
            self._arrived.notify_all()

    def take(self) -> Job | None:
        """The next job, or None. Never waits."""
        return self._jobs.popleft() if self._jobs else None

    def wait(self, deadline: float) -> bool:
        """Until a job is there; False when ``deadline``, of ``time.monotonic()``, passes first."""
        with self._arrived:
            while not self._jobs:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._arrived.wait(left)
            return True


class Lane:
    """Jobs in order of arrival. One thread submits."""

    def __init__(self, name: str, threads: int, finished: Finished) -> None:
        self._finished = finished
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._open = True
        self._threads = [
            threading.Thread(target=self._work, name=f"tessera-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Never waits for one."""
        with self._changed:
            assert self._open, "submitted to a lane that is closed"
            self._jobs.append(job)
            self._changed.notify()

    def withdraw(self, job: Job) -> bool:
        """Take a job back that no thread has begun; False where one has. O(jobs)."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            return True

    def close(self, deadline: float) -> bool:
        """No more jobs: those queued are forgotten. Whether all threads ended before ``deadline``."""
        with self._changed:
            self._open = False
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if not self._open:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
            attempt(job)
            self._finished.put(job)


def attempt(job: Job) -> None:
    """Run a job here; one that raises has failed, and nobody else suffers."""
    try:
        job.run()
    except Exception:
        job.failed = True
        logger.exception("a copy of KV pages failed: %s", type(job).__name__)
