"""The two-tier pool: pages for what grows with the context, an arena for what a request carries along.

The pool owns the memory of both tiers, the table that their addresses point into, and the accounting
that a scheduler reads. It does not know what the pages contain: the index, which does, is passed in
where pages are to be given up.

Relief is per tier. Pages are short: the index gives up pages, and the states saved with them go along.
Slots are short: saved states go, least recently used first, and no page is touched, since a page is
worth more than a state that can be recomputed from it. Where a tier can not be relieved by as much as
is asked for, nothing is given up and the one who asked is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from .arena import Arena
from .geometry import Geometry
from .handles import RegionTable
from .paged import NO_PAGES, PagedTier, PageIds
from .units import AnyIds


class SealedPages(Protocol):
    """What the pool asks of the content index. Counts are pages."""

    @property
    def page_count(self) -> int:
        """Pages that belong to the index."""

    @property
    def locked_pages(self) -> int:
        """Those that running requests read."""

    @property
    def held_pages(self) -> int:
        """Those kept for waiting requests, and not locked."""

    @property
    def evictable_pages(self) -> int:
        """Those that ``evict`` can drop without breaking a hold: all others."""

    def evict(self, page_count: int, /, *, break_holds: bool = False) -> PageIds:
        """Drop up to ``page_count`` pages; int64, the caller's to free."""


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier in its own units, pages or slots. Asserts that every unit is counted once."""

    size: int
    available: int  # nobody's
    evictable: int  # given up on demand
    protected: int  # in the index, and locked or held
    in_use: int  # open pages, slots of running requests

    def __post_init__(self) -> None:
        counts = (self.available, self.evictable, self.protected, self.in_use)
        assert min(counts) >= 0 and sum(counts) == self.size, f"the tier does not add up: {self}"

    @classmethod
    def of_pages(cls, index: SealedPages, *, size: int, available: int) -> TierView:
        """The paged tier: what is neither available nor the index's are open pages."""
        return cls(
            size=size,
            available=available,
            evictable=index.evictable_pages,
            protected=index.locked_pages + index.held_pages,
            in_use=size - available - index.page_count,
        )


@dataclass(frozen=True, slots=True)
class PoolView:
    """Both tiers at one moment."""

    paged: TierView
    arena: TierView


@dataclass(frozen=True, slots=True)
class Relief:
    """Outcome of :meth:`TwoTierPool.relieve`."""

    enough: bool  # what was asked for is available now; otherwise nothing was given up
    evicted: PageIds  # int64, in the order they went; free already
    dropped_states: int  # saved states that went, those of evicted pages included


class TwoTierPool:
    """Memory of one model on one device. Not thread safe: one scheduler owns it.

    ``pages``, ``slots`` and ``running`` do not count what is reserved, which is allocated on top.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        pages: int,
        slots: int,
        running: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """At most ``running`` of the slots are those of requests; None for all of them.

        Raises ValueError for a pool without pages, and where requests need slots, for one in which
        none could run, or more than there are slots.
        """
        if pages < 1:
            raise ValueError(f"{geometry.name}: a pool needs at least one page, got {pages}")
        running = slots if running is None else running
        if geometry.slot_bytes and not 1 <= running <= slots:
            raise ValueError(
                f"{geometry.name}: each request carries {geometry.slot_bytes} bytes of windows and "
                f"tails, so the arena needs at least one slot, and one for each that runs; got "
                f"{slots} for {running}"
            )
        self.geometry = geometry
        self.table = RegionTable()
        on = torch.device(device)
        self.paged = PagedTier(geometry, pages=pages, table=self.table, device=on)
        self.arena = Arena(
            geometry, slots=slots, running=running, pages=pages, table=self.table, device=on
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, the reserved page and slot included."""
        return self.paged.nbytes + self.arena.nbytes

    def free(self, pages: AnyIds) -> None:
        """Give back whole pages, integer [n], each owned and named once; their saved states go too."""
        self.paged.free(pages)
        self.arena.drop(pages)

    def free_tokens(self, tokens: AnyIds) -> PageIds:
        """Give back tokens, integer [n]; see :meth:`PagedTier.free_tokens`. Returns released pages."""
        released = self.paged.free_tokens(tokens)
        self.arena.drop(released)
        return released

    def save(self, slot: int, page: int, length: int) -> bool:
        """Keep a request's state at ``length`` tokens with the page that ends there.

        Whether it was kept; see :meth:`Arena.save`. The page must be owned, and goes with its state.
        """
        self.paged.check_owned(np.array([page]))
        return self.arena.save(slot, page, length)

    def restore(self, page: int, slot: int) -> bool:
        """Let a request go on from a page; False where no state was saved with it."""
        self.paged.check_owned(np.array([page]))
        return self.arena.restore(page, slot)

    def match_limit(self, pages: AnyIds) -> int:
        """How many of a run of matched pages can be gone on from: up to the last saved state."""
        return self.arena.match_limit(pages)

    def clear(self) -> None:
        """Take everything back, for a flush; handles are stale from here on. Reset the index too."""
        self.paged.clear()
        self.arena.clear()

    # --- accounting ------------------------------------------------------------------------------

    def view(self, index: SealedPages) -> PoolView:
        """What a scheduler may count on. O(slots)."""
        paged, arena = self.paged, self.arena
        return PoolView(
            paged=TierView.of_pages(index, size=paged.size, available=paged.available),
            arena=TierView(
                size=arena.size,
                available=arena.available,
                evictable=arena.saved,
                protected=0,
                in_use=arena.running,
            ),
        )

    def relieve(
        self,
        index: SealedPages,
        *,
        pages: int = 0,
        slots: int = 0,
        break_holds: bool = False,
        keep: AnyIds = NO_PAGES,
    ) -> Relief:
        """Make that many pages, and slots for requests, available at the cost of the short tier.

        ``break_holds`` lets the index give up held pages as well. ``keep`` (integer [n]) are pages whose
        states are not dropped for want of slots: those that the one who asks wants to restore.
        """
        paged, arena = self.paged, self.arena
        short_pages = max(0, pages - paged.available)
        short_slots = 0 if arena.empty else max(0, slots - arena.available)
        sparable = index.evictable_pages + (index.held_pages if break_holds else 0)
        crowded = not arena.empty and slots > arena.startable
        if (
            crowded
            or short_pages > sparable
            or (short_slots and short_slots > arena.droppable(keep))
        ):
            return Relief(False, NO_PAGES, 0)
        evicted, dropped = NO_PAGES, 0
        if short_pages:
            evicted = index.evict(short_pages, break_holds=break_holds)
            assert len(evicted) == short_pages, "the index has fewer pages to give up than it says"
            paged.free(evicted)
            dropped = arena.drop(evicted)
        if short_slots > dropped:
            dropped += arena.drop_oldest(short_slots - dropped, keep)
            assert slots <= arena.available, "the arena has fewer states to drop than it says"
        return Relief(True, evicted, dropped)

    def check_invariants(self, index: SealedPages | None = None, sealed: AnyIds = NO_PAGES) -> None:
        """Assert everything that must hold between operations. O(tokens + slots + planes).

        ``sealed`` (integer [n]) are the pages that the index maps: owned, and each mapped once.
        """
        self.table.check_invariants()
        self.paged.check_invariants()
        self.arena.check_invariants()
        self.paged.check_owned(self.arena.saved_pages())
        paged = (self.paged.size + 1) * self.geometry.page_bytes
        bytes_expected = paged + self.arena.expected_bytes
        assert self.nbytes == self.table.nbytes == bytes_expected, "a byte nobody accounts for"
        self.paged.check_owned(sealed)
        assert len(np.unique(sealed)) == len(sealed), "the index maps a page twice"
        if index is not None:
            assert len(sealed) == index.page_count
            self.view(index)
