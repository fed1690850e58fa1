"""The host tier: pages that left the device, in one block of memory, found by name.

A key discovers; the name decides: a look-up whose namespace, parent, tokens or mark differ from those
that the slot was filled under is a miss and a collision. What is found is as it was filled: each page
is sealed by an xxh3-64 checksum, which is compared before a page goes back to the device or down to a
store. A page that differs is dropped, counted, and a miss.

A page is *filling* from the reservation of its slot until it is sealed, and *ready* from then on. Pins
keep it: while a worker fills or writes it, while a request waits for it, while it is copied. The ends of
chains go first, since nothing behind a missing page can be used, and among them what is worth least
(:mod:`memory_pool.worth`). What is dropped while pinned can not be found any more, and its slot is free
when the last pin goes.

Everything here runs on the scheduler's thread, but :meth:`HostTier.buffer` and
:meth:`HostTier.checksum`, which workers use on slots that are pinned for them.
Checksums ran at 25 GB/s on one core, without the interpreter's lock; the copy they go with, at 10.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import xxhash

from .lower import PageName, TierKey, Worth
from .worth import CostModel, Entry, GreedyDual

logger = logging.getLogger(__name__)


class HostTier:
    """Pages of one size by name. See the module for who may call what."""

    def __init__(
        self,
        page_bytes: int,
        capacity_bytes: int,
        pinned: bool = False,
        *,
        checksums: bool = True,
        costs: CostModel | None = None,
    ) -> None:
        """Allocates all of it at once, uint8 [pages, page_bytes].

        Args:
            page_bytes: of one page in all layers.
            capacity_bytes: rounded down to whole pages.
            pinned: page-locked, for copies that a CUDA device does itself; without CUDA, as False.
            checksums: seal pages, and verify them before they are used.
            costs: what eviction goes by.

        Raises:
            ValueError: there is no room for a page, or the memory can not be had.
        """
        pages = capacity_bytes // page_bytes
        if pages < 1:
            raise ValueError(
                f"host_tier_bytes = {capacity_bytes} holds no page of {page_bytes} bytes; give at "
                "least that many, or 0 for no host tier"
            )
        self.page_bytes = page_bytes
        self.page_count = pages
        self.pinned = pinned and torch.cuda.is_available()
        try:
            self.data = torch.empty(
                (pages, page_bytes), dtype=torch.uint8, pin_memory=self.pinned
            )  # uint8 [pages, page_bytes]
        except RuntimeError as error:  # also of CUDA, for memory that can not be locked
            kind = "page-locked " if self.pinned else ""
            raise ValueError(
                f"host_tier_bytes = {capacity_bytes}: the machine can not give that much {kind}memory "
                f"({error}); lower host_tier_bytes"
            ) from error
        self._rows = self.data.numpy()
        self.checksums = checksums
        self.collisions = 0  # only grow, as all counts here
        self.damaged = 0
        self.evicted = 0
        self.lost = 0  # of the evicted: no store below had them
        # Asked of a page that is about to go and is dirty: True to pin it and keep it for now.
        self.rescue: Callable[[Entry], bool] = lambda entry: False
        self._queue = GreedyDual(costs or CostModel(), page_bytes)
        self._entries: dict[TierKey, Entry] = {}
        self._slots: list[Entry | None] = [None] * pages  # dropped ones that are pinned, too
        self._free = list(range(pages))  # a heap: neighbours are read and written at once
        self._children: dict[TierKey, int] = {}  # entries by the key of their parent, here or not

    # --- look-up ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Pages that can be found, filling ones too."""
        return len(self._entries)

    def entry(self, name: PageName) -> Entry | None:
        """The page of that name, ready or filling; None, and a collision, where another has its key."""
        entry = self._entries.get(name.key)
        if entry is None:
            return None
        if entry.name is not name and entry.name != name:
            self.collisions += 1
            return None
        return entry

    def find(self, name: PageName) -> Entry | None:
        """The page of that name if it is ready."""
        entry = self.entry(name)
        return entry if entry is not None and entry.ready else None

    def leading(self, names: Sequence[PageName]) -> Iterator[Entry]:
        """Pages from the first on as long as they are ready."""
        for name in names:
            entry = self.find(name)
            if entry is None:
                return
            yield entry

    def entries(self) -> Iterator[Entry]:
        """All that can be found."""
        return iter(self._entries.values())

    def slots(self) -> Iterator[Entry]:
        """All that have a slot: also those that were dropped and are pinned."""
        return (entry for entry in self._slots if entry is not None)

    @property
    def free_slots(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    # --- filling ---------------------------------------------------------------------------------

    def reserve(self, name: PageName, worth: Worth, *, dirty: bool = False) -> Entry | None:
        """A slot for a page that is not there, pinned once for whoever fills it. O(log pages).

        None when no slot can be had, or when the key belongs to another page (a collision).
        """
        there = self._entries.get(name.key)
        if there is not None:
            assert there.name != name, "reserved a page that is there"
            self.collisions += 1
            return None
        if not self._free and not self._make_room():
            return None
        entry = Entry(name, heapq.heappop(self._free), worth, dirty=dirty)
        entry.pins = 1
        self._slots[entry.slot] = entry
        self._entries[name.key] = entry
        entry.children = self._children.get(name.key, 0)
        self._count_child(name.parent, 1)
        return entry

    def seal(self, entry: Entry, checksum: int | None) -> None:
        """Its slot is filled. The pin of the reservation stays."""
        assert entry.alive and not entry.ready
        assert (checksum is not None) == self.checksums, "sealed without its checksum"
        entry.ready, entry.checksum = True, checksum
        self._queue.rank(entry)

    def use(self, entry: Entry, worth: Worth | None = None) -> None:
        """It was read, or computed once more, then with what is known of its worth."""
        entry.uses += 1
        if worth is not None:
            old = entry.worth
            entry.worth = Worth(worth.start, old.shared or worth.shared, max(old.hits, worth.hits))
        self._queue.rank(entry)

    def buffer(self, slot: int, pages: int = 1) -> memoryview:
        """Bytes of neighbouring slots, writable. Any thread, on slots that are pinned for it."""
        flat: Any = self._rows[slot : slot + pages].reshape(-1)  # mypy knows no buffers before 3.12
        return memoryview(flat)

    def checksum(self, slot: int) -> int | None:
        """What a slot's bytes would be sealed with. Any thread, likewise."""
        return int(xxhash.xxh3_64_intdigest(self._rows[slot])) if self.checksums else None

    # --- keeping and dropping --------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Keep a page until :meth:`unpin`."""
        assert entry.alive
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Undo one :meth:`pin`."""
        assert entry.pins > 0, "unpinned a page that is not pinned"
        entry.pins -= 1
        if entry.pins:
            return
        if entry.alive:
            self._queue.offer(entry)
        else:
            self._give_back(entry)

    def verify(self, entry: Entry) -> bool:
        """Whether a ready page is as it was sealed; else it is dropped, counted and logged."""
        if entry.checksum is None or self.checksum(entry.slot) == entry.checksum:
            return True
        self.reject(entry)
        return False

    def reject(self, entry: Entry) -> None:
        """Drop a page whose bytes are not what they were sealed as."""
        if entry.alive:
            self.damaged += 1
            if (
                self.damaged & (self.damaged - 1) == 0
            ):  # the 1st, 2nd, 4th ...: memory may go on failing
                logger.warning(
                    "host tier: page %s is damaged (%d so far); it is computed again or read "
                    "from below",
                    entry.name.key.hex()[:16],
                    self.damaged,
                )
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Let nobody find a page any more. Its slot is free when it is no longer pinned."""
        assert self._entries.get(entry.name.key) is entry and entry.alive
        entry.alive = False
        del self._entries[entry.name.key]
        self._count_child(entry.name.parent, -1)
        if not entry.pins:
            self._give_back(entry)

    def clear(self) -> None:
        """Drop all pages, for a flush."""
        for entry in list(self._entries.values()):
            self.drop(entry)
        self._queue.clear()

    # --- internals -------------------------------------------------------------------------------

    def _give_back(self, entry: Entry) -> None:
        assert self._slots[entry.slot] is entry
        self._slots[entry.slot] = None
        heapq.heappush(self._free, entry.slot)

    def _count_child(self, parent: TierKey, change: int) -> None:
        count = self._children.get(parent, 0) + change
        if count:
            self._children[parent] = count
        else:
            del self._children[parent]
        above = self._entries.get(parent)
        if above is not None:
            above.children = count
            self._queue.offer(above)

    def _make_room(self) -> bool:
        """Evict until a slot is free; False when nothing may go."""
        while not self._free:
            entry = self._queue.pop()
            if entry is None:
                return False
            if entry.dirty:
                if self.rescue(entry):
                    assert entry.pins, "kept a page without a pin"
                    continue  # offered again when it is unpinned
                self.lost += 1
            self._queue.evicted(entry)
            self.evicted += 1
            self.drop(entry)
        return True

    def check_invariants(self) -> None:
        """Assert everything that must hold between operations. O(pages)."""
        used = list(self.slots())
        assert len(used) + len(self._free) == self.page_count, "a slot is lost or owned twice"
        assert all(self._slots[slot] is None for slot in self._free), "a slot in use is free"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert all(self._slots[entry.slot] is entry for entry in used)
        alive = [entry for entry in used if entry.alive]
        assert len(alive) == len(self._entries), "a page without a slot"
        children: dict[TierKey, int] = {}
        for entry in used:
            assert entry.pins >= 0 and (entry.alive or entry.pins), "a dropped page keeps its slot"
            assert entry.ready or entry.pins, "nobody fills a page"
            assert entry.queued or not entry.evictable, "an evictable page is not queued"
        for entry in alive:
            assert self._entries[entry.name.key] is entry, "a page can not be found"
            assert not entry.ready or (entry.checksum is not None) == self.checksums
            children[entry.name.parent] = children.get(entry.name.parent, 0) + 1
        assert children == self._children, "children were miscounted"
        assert all(entry.children == children.get(entry.name.key, 0) for entry in alive)
        queued = list(self._queue.queued())
        assert len(set(queued)) == len(queued), "a page is queued twice"
        assert all(entry.queued for entry in queued)
