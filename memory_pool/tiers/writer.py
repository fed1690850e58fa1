"""Which pages of host memory are written to the store, and when."""

from __future__ import annotations

from ..host import HostTier
from ..lower import Store
from ..worth import Entry
from .jobs import Write
from .lanes import Finished, Lane
from .records import TierCounters

ATTEMPTS = 2  # a page that the store does not take: once when it is sealed, once when it must go


class Writer:
    """Dirty pages in the order in which they came, and those that a thread writes now.

    A page that is queued for the thread is pinned and read where it lies. Not more than ``most`` pages
    are; the others wait and can be evicted meanwhile.
    """

    BATCH = 8  # pages of a job, so that a store may sync once for them

    def __init__(
        self, host: HostTier, store: Store, finished: Finished, counters: TierCounters, most: int
    ) -> None:
        self.lane = Lane("write", 1, finished)  # a store that appends gains nothing from a second
        self.jobs: set[Write] = set()
        self.writing = 0  # pages
        self._host = host
        self._store = store
        self._counters = counters
        self._most = most
        self._waiting: dict[Entry, None] = {}

    @property
    def busy(self) -> bool:
        """Whether pages wait or are written."""
        return bool(self.jobs or self._waiting)

    @property
    def behind(self) -> bool:
        """Whether pages wait because the queue is full."""
        return bool(self._waiting)

    def add(self, entry: Entry) -> None:
        """A page was sealed. Written with the next :meth:`feed` that has room."""
        if entry.dirty:
            self._waiting[entry] = None

    def feed(self) -> None:
        """Queue as many waiting pages as there is room for. O(those)."""
        while self._waiting and self.writing < self._most:
            batch: list[Entry] = []
            while self._waiting and len(batch) < min(self.BATCH, self._most - self.writing):
                entry = next(iter(self._waiting))
                del self._waiting[entry]
                if entry.alive:  # else it was found damaged
                    batch.append(entry)
            if batch:
                self._submit(sorted(batch, key=lambda entry: entry.slot))

    def rescue(self, entry: Entry) -> bool:
        """A dirty page must go: write it now if there is room, and keep it until that is done."""
        self._waiting.pop(entry, None)
        if entry.attempts >= ATTEMPTS or self.writing >= self._most:
            return False
        self._submit([entry])
        return True

    def written(self, job: Write) -> list[Entry]:
        """Take up what a job did; returns the pages that the store has now."""
        self.jobs.remove(job)
        self.writing -= len(job.entries)
        for entry in job.entries:
            if entry in job.damaged:
                self._host.reject(entry)
            elif entry in job.stored:
                entry.dirty = False
                self._counters.written += 1
            else:
                entry.attempts += 1
                self._counters.write_refused += 1
            self._host.unpin(entry)
        return list(job.stored)

    def clear(self) -> None:
        """Nothing that waits will be written."""
        self._waiting.clear()

    def check_invariants(self) -> None:
        """Assert that no more is queued than there is room for, and that only dirty pages wait."""
        assert self.writing == sum(len(job.entries) for job in self.jobs) <= self._most
        assert all(entry.dirty for entry in self._waiting if entry.alive)

    def _submit(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._host.pin(entry)
        job = Write(self._host, self._store, entries)
        self.jobs.add(job)
        self.writing += len(entries)
        self.lane.submit(job)
