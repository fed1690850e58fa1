"""Which run goes first: SGLang's policies by their names, on a logical clock.

A policy maps a run to a priority; the lowest goes first. Priorities of a run never fall, which is
what lets the queue be corrected lazily: an entry that is too low is found at the front and put back.
No wall time and no object identity enters, so every tensor-parallel rank names the same victims.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .runs import Run

Priority = tuple[int, int]
Policy = Callable[[Run], Priority]

POLICIES = ("lru", "lfu", "slru")
PROTECTED_HITS = 2  # SLRU: uses from which on a run is protected, as in SGLang


def _lru(run: Run) -> Priority:
    return (0, run.tick)


def _lfu(run: Run) -> Priority:
    return (run.hits, run.tick)


def policy(name: str, protected_hits: int = PROTECTED_HITS) -> Policy:
    """The policy of a name that SGLang's ``--radix-eviction-policy`` knows: lru, lfu or slru.

    Raises:
        ValueError: another name.
    """
    if name == "lru":
        return _lru
    if name == "lfu":
        return _lfu
    if name == "slru":
        return lambda run: (int(run.hits >= protected_hits), run.tick)
    raise ValueError(f"unknown eviction policy {name!r}; known are {', '.join(POLICIES)}")


class EvictionQueue:
    """Runs that could go, lowest priority first; O(log runs) each."""

    __slots__ = ("_heap", "_serial", "priority")

    def __init__(self, policy: Policy) -> None:
        self.priority = policy
        self._heap: list[tuple[Priority, int, Run]] = []
        self._serial = 0

    def offer(self, run: Run) -> None:
        """Queue a run if it could go now and is not queued."""
        if not run.queued and evictable(run):
            run.queued = True
            self._push(run)

    def pop(self) -> Run | None:
        """The run that goes first, taken out of the queue; None when no run can go."""
        while self._heap:
            priority, _, run = heapq.heappop(self._heap)
            run.queued = False
            if not evictable(run):
                continue  # offered again when that changes
            if self.priority(run) == priority:
                return run
            run.queued = True  # used since it was queued
            self._push(run)
        return None

    def clear(self) -> None:
        """Forget all entries."""
        self._heap.clear()

    def _push(self, run: Run) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.priority(run), self._serial, run))


def evictable(run: Run) -> bool:
    """Whether a run's last page may go: nothing below it, and nobody keeps it."""
    return run.alive and not run.locks and not run.holds and not run.children and run.page_count > 0


def held_leaf(run: Run) -> bool:
    """Whether only waiting requests keep a run's last page."""
    return run.alive and run.holds > 0 and not run.locks and not run.children
