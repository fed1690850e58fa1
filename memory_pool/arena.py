"""The arena: per-request state of layers that keep a window, a tail or an overlap instead of pages.

A running request owns a *slot*, which has the rows of every arena plane of every layer. It is private,
and it is gone when the request is: a prefix that the index finds has pages but no window. What a later
request needs to go on from a page boundary is therefore *saved*: copied into a slot that belongs to the
page where it was taken, dropped when the page goes or when running requests are short of slots. A page
without a saved state can be read, but not gone on from; whoever matched it goes on from an earlier page
and recomputes the rest.

What is empty at every page boundary (a compression group in the making) is never saved. Such planes are
kept for as many requests as run at once and no more: a running request has a *tail* of them beside its
slot. They can be most of its state (three quarters in DeepSeek-V4), and a saved state does without.

Slot 0 is reserved for padding. A geometry without arena planes (a pure MLA model, say) has no slots:
every request's slot is 0, saving and restoring do nothing, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from .geometry import Geometry, Plane, Tier
from .handles import Handle, RegionTable
from .paged import NO_PAGES, PageIds
from .ring import Ring, Slots
from .saved import SavedStates
from .storage import Placement, TierStorage
from .units import AnyIds, UnitAllocator

_NO_TAIL = 0


class Arena:
    """``slots`` slots besides the reserved one, for a paged tier of ``pages`` pages."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        slots: int,
        running: int,
        pages: int,
        table: RegionTable,
        device: torch.device,
    ) -> None:
        """``running`` requests at most have a slot at the same time; all others hold saved states."""
        self.geometry = geometry
        self.empty = geometry.slot_bytes == 0
        self._slots = UnitAllocator(0 if self.empty else slots)
        self._tails = UnitAllocator(0 if self.empty else running)
        self._tail = np.zeros(self.size + 1, dtype=np.int64)  # by slot; not 0: a request runs in it
        self._saved = SavedStates(slots=self.size, pages=0 if self.empty else pages)
        self._storage = TierStorage(self._placements(), table=table, device=device)
        self._rings = tuple(
            Ring(
                bank.plane,
                units=bank.data.shape[1],
                tails=self._tail,
                by_tail=bank.plane.transient,
            )
            for bank in self._storage.banks
        )

    # --- slots of running requests ---------------------------------------------------------------

    @property
    def size(self) -> int:
        """Slots that can be handed out; 0 for an empty arena."""
        return self._slots.count

    @property
    def available(self) -> int:
        """Slots that nobody owns."""
        return self._slots.available

    @property
    def running(self) -> int:
        """Slots of running requests."""
        return self._tails.allocated

    @property
    def startable(self) -> int:
        """Requests that can still run beside those that do, given slots."""
        return self._tails.available

    @property
    def saved(self) -> int:
        """Slots that hold the saved state of a page. O(slots)."""
        return len(self._saved)

    def allocate(self, requests: int) -> Slots | None:
        """A slot for each request, nothing readable in it; int64 [requests].

        None, and nothing changes, when there are fewer, or too many would run. Zeros for an empty
        arena.
        """
        if self.empty:
            return np.zeros(requests, dtype=np.int64)
        if requests > min(self._slots.available, self._tails.available):
            return None
        slots, tails = self._slots.allocate(requests), self._tails.allocate(requests)
        assert slots is not None and tails is not None
        self._tail[slots] = tails
        return slots

    def free(self, slots: AnyIds) -> None:
        """Give back slots of running requests, integer [n], each once."""
        if self.empty:
            return
        assert self._tail[slots].all(), "freed a slot that no request runs in"
        for ring in self._rings:
            ring.clear(slots)
        self._tails.free(self._tail[slots])
        self._tail[slots] = _NO_TAIL
        self._slots.free(slots)

    # --- states saved with pages -----------------------------------------------------------------

    def save(self, slot: int, page: int, length: int) -> bool:
        """Keep what going on from ``length`` tokens needs, with the page that ends there.

        Where no slot is free, the least recently used state makes room. False where nothing is kept:
        the slot has no longer (or not yet) all the rows that the boundary needs, or requests run in
        all slots. Planes that are empty at a boundary are not copied. O(slot bytes + slots).
        """
        if self.empty:
            return True
        assert self._tail[slot], "saved from a slot that no request runs in"
        assert length > 0 and length % self.geometry.page_tokens == 0, "saved inside a page"
        if self._saved.slot(page) is not None:
            self._saved.touch(np.array([page]))
            return True
        if not all(ring.holds_boundary(slot, length) for ring in self._rings):
            return False
        if not self.available:
            self.drop_oldest(1)
        target = self._slots.allocate(1)
        if target is None:
            return False
        self._copy(slot, int(target[0]), length)
        self._saved.put(page, int(target[0]))
        return True

    def restore(self, page: int, slot: int) -> bool:
        """Give a running request the state saved with a page, in place of what its slot held.

        False, and nothing changes, where the page has none. O(slot bytes).
        """
        if self.empty:
            return True
        assert self._tail[slot], "restored into a slot that no request runs in"
        source = self._saved.slot(page)
        if source is None:
            return False
        self._copy(source, slot)
        self._saved.touch(np.array([page]))
        return True

    def saved_slot(self, page: int) -> int | None:
        """Where the state saved with a page is, as just used; None where it has none. O(1)."""
        slot = None if self.empty else self._saved.slot(page)
        if slot is not None:
            self._saved.touch(np.array([page]))
        return slot

    def _copy(self, source: int, target: int, length: int | None = None) -> None:
        for bank, ring in zip(self._storage.banks, self._rings, strict=True):
            if bank.plane.transient:
                ring.clear(np.array([target]))
                continue
            bank.data[:, target] = bank.data[:, source]
            ring.copy(source, target, length)

    def match_limit(self, pages: AnyIds) -> int:
        """How many of a run of matched pages can be gone on from: up to the last saved state.

        ``pages`` is integer [n], in row order. All of them for an empty arena. O(n).
        """
        return len(pages) if self.empty else self._saved.reach(pages)

    def drop(self, pages: AnyIds) -> int:
        """Forget the states of pages that go, integer [n]; those without one count for nothing.

        Returns how many slots that freed. O(n).
        """
        if self.empty:
            return 0
        slots = self._saved.remove(pages)
        for ring in self._rings:
            ring.clear(slots)
        self._slots.free(slots)
        return len(slots)

    def hand_over(self, pages: AnyIds, others: AnyIds) -> None:
        """Let states go to other pages that hold the same tokens, pair by pair; integer [n] each.

        A page that has a state keeps it. O(n).
        """
        if self.empty:
            return
        for page, other in zip(pages.tolist(), others.tolist(), strict=True):
            if self._saved.slot(page) is not None and self._saved.slot(other) is None:
                self._saved.move(page, other)

    def droppable(self, keep: AnyIds = NO_PAGES) -> int:
        """States that :meth:`drop_oldest` could drop beside those of the pages ``keep``."""
        return len(self._saved.oldest_first(keep))

    def drop_oldest(self, states: int, keep: AnyIds = NO_PAGES) -> int:
        """Forget up to ``states`` states, least recently used first, none of the pages ``keep``.

        Returns how many slots that freed. O(slots log slots).
        """
        return self.drop(self._saved.oldest_first(keep)[:states])

    def saved_pages(self) -> PageIds:
        """Pages that have a saved state, int64, in no order. O(slots)."""
        return self._saved.pages()

    def clear(self) -> None:
        """Take all slots back, for a flush; handles to them are stale from here on."""
        for ring in self._rings:
            ring.clear(np.arange(self.size + 1))
        self._slots.clear()
        self._tails.clear()
        self._tail[:] = _NO_TAIL
        self._saved.clear()

    # --- bytes -----------------------------------------------------------------------------------

    def ring(self, layer: int, plane: str) -> Ring:
        """The rows of a plane by position, shared by all layers that have the same plane."""
        return self._rings[self._storage.bank_number(layer, plane)]

    def tensor(self, layer: int, plane: str) -> torch.Tensor:
        """A layer's plane by the rows of its ring, uint8 [units * rows, row_bytes]."""
        return self._storage.tensor(layer, plane).flatten(0, 1)

    def view(self, layer: int, plane: str, region: str) -> torch.Tensor:
        """A region of a plane in its own dtype, [units, rows, elements]; no copy."""
        return self._storage.view(layer, plane, region)

    def handle(self, layer: int, plane: str, slot: int) -> Handle:
        """The address of a slot in a layer's plane. Raises StaleHandle where nobody owns it."""
        return self._storage.handle(layer, plane, self.ring(layer, plane).unit(slot))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, the reserved slot and tail included; 0 for an empty arena."""
        return self._storage.nbytes

    @property
    def expected_bytes(self) -> int:
        """What the geometry gives them."""
        kept = self.geometry.boundary_bytes
        return (self.size + 1) * kept + (self._tails.count + 1) * (self.geometry.slot_bytes - kept)

    def check_invariants(self) -> None:
        """Assert counts, one owner per slot, what can be read, and bytes."""
        self._slots.check_invariants()
        self._tails.check_invariants()
        self._saved.check_invariants()
        running = self._tail != _NO_TAIL
        slots = np.concatenate([np.flatnonzero(running), self._saved.slots()])
        assert np.array_equal(np.flatnonzero(self._slots.owned), np.sort(slots)), "a slot is lost"
        tails = np.sort(self._tail[running])
        assert np.array_equal(np.flatnonzero(self._tails.owned), tails), "a tail is lost"
        for ring in self._rings:
            ring.check_invariants(self._owners(ring.plane).owned)
        self._storage.check_invariants(self._placements())
        assert self.nbytes == self.expected_bytes, "the arena is not as large as its geometry says"

    def _placements(self) -> Iterator[Placement]:
        for layer, plane in self.geometry.planes(Tier.ARENA):
            yield Placement(layer, plane, plane.rows, self._owners(plane).ownership)

    def _owners(self, plane: Plane) -> UnitAllocator:
        return self._tails if plane.transient else self._slots
