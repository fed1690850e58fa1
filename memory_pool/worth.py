"""What a page is worth keeping: the time it takes to compute again, by how often it was used, by bytes.

GreedyDual-Size-Frequency (Cherkasova, *Improving WWW Proxies Performance with
Greedy-Dual-Size-Frequency Caching Policy*, HP Labs 1998): a page has the priority
``clock + frequency * cost / bytes`` as of its last use, the lowest one goes, and the clock rises to
it. So what is dear and used stays long, and what is no longer used is overtaken by the clock, however
dear it was. No wall time enters: whoever sees the same operations names the same victims.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from .keys import TOKEN_BYTES
from .lower import PageName, Worth


class Entry:
    """A page in host memory. Only the tier changes one, but for `dirty` and `attempts`."""

    __slots__ = (
        "alive",  # can be found; cleared when it is dropped, though pins keep its slot
        "attempts",  # times the store was offered it and did not take it
        "checksum",  # of a ready page; None where the tier keeps none
        "children",  # pages behind it that are in host memory
        "dirty",  # has a store below that is not known to hold it
        "name",
        "pins",
        "priority",  # as of its last use
        "queued",  # has an entry in the eviction queue
        "ready",
        "slot",
        "uses",  # in this tier
        "worth",
    )

    def __init__(self, name: PageName, slot: int, worth: Worth, *, dirty: bool) -> None:
        self.name = name
        self.slot = slot
        self.worth = worth
        self.dirty = dirty
        self.alive, self.ready, self.queued = True, False, False
        self.children = self.pins = self.uses = self.attempts = 0
        self.priority = 0.0
        self.checksum: int | None = None

    @property
    def evictable(self) -> bool:
        """Whether it may go now: the end of a chain, and nobody keeps it."""
        return self.alive and self.ready and not self.pins and not self.children


@dataclass(frozen=True, slots=True)
class CostModel:
    """Time to compute a page again, in units of a token's projections and experts.

    ``quadratic`` is what each token before it adds for attention. The default has both equal at 32k
    tokens: an 8B model of 32 layers and 4096 channels needs 16 GFLOP a token, and 0.5 MFLOP for each
    one that it attends to. A page of a span's body stands for ``shared`` pages: whoever declares the
    span reads it, wherever in a prompt, and waits for it before being scheduled.
    """

    linear: float = 1.0
    quadratic: float = 1 / 32768
    shared: float = 4.0

    def recompute(self, worth: Worth, tokens: int) -> float:
        """Cost of a page of ``tokens`` tokens."""
        seen = worth.start + tokens / 2
        cost = tokens * (self.linear + self.quadratic * seen)
        return cost * self.shared if worth.shared else cost


class GreedyDual:
    """Pages that could go, on a clock that only grows. O(log pages) each."""

    __slots__ = ("_costs", "_heap", "_page_bytes", "_serial", "clock")

    # What was read a thousand times and never again would else outlive a thousand turnovers.
    MOST_USES = 32

    def __init__(self, costs: CostModel, page_bytes: int) -> None:
        self._costs = costs
        self._page_bytes = page_bytes
        self._heap: list[tuple[float, int, Entry]] = []
        self._serial = 0
        self.clock = 0.0

    def rank(self, entry: Entry) -> None:
        """The page is used now. Its priority never falls, so the queue is corrected lazily."""
        frequency = min(1 + entry.worth.hits + entry.uses, self.MOST_USES)
        cost = self._costs.recompute(entry.worth, len(entry.name.tokens) // TOKEN_BYTES)
        entry.priority = self.clock + frequency * cost / self._page_bytes
        self.offer(entry)

    def offer(self, entry: Entry) -> None:
        """Queue a page if it could go now and is not queued."""
        if not entry.queued and entry.evictable:
            entry.queued = True
            self._push(entry)

    def pop(self) -> Entry | None:
        """The page that goes first, taken out of the queue; None when no page can go."""
        while self._heap:
            priority, _, entry = heapq.heappop(self._heap)
            entry.queued = False
            if not entry.evictable:
                continue  # offered again when that changes
            if entry.priority == priority:
                return entry
            entry.queued = True  # used since it was queued
            self._push(entry)
        return None

    def evicted(self, entry: Entry) -> None:
        """A page that was popped went."""
        self.clock = max(self.clock, entry.priority)

    def clear(self) -> None:
        """Forget all pages; the clock stands."""
        for entry in self.queued():
            entry.queued = False
        self._heap.clear()

    def queued(self) -> Iterator[Entry]:
        """Pages in the queue, in no order; some can not go any more."""
        return (entry for _, _, entry in self._heap)

    def _push(self, entry: Entry) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (entry.priority, self._serial, entry))
