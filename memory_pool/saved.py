"""Which slot holds the state saved with which page, and which of them was used least recently.

Numpy on the host, both ways: by page and by slot. A logical clock orders uses, so that every
tensor-parallel rank drops the same states.
"""

from __future__ import annotations

import numpy as np

from .paged import NO_PAGES, PageIds
from .units import AnyIds, UnitIds

_NO_PAGE = 0  # the reserved page has no state
_NO_SLOT = 0


class SavedStates:
    """A map of pages to slots, at most one each. Both are numbered from 1."""

    __slots__ = ("_clock", "_page", "_slot", "_used")

    def __init__(self, *, slots: int, pages: int) -> None:
        self._page = np.full(slots + 1, _NO_PAGE, dtype=np.int64)  # by slot
        self._used = np.zeros(slots + 1, dtype=np.int64)  # by slot: its last use
        self._slot = np.full(pages + 1, _NO_SLOT, dtype=np.int64)  # by page
        self._clock = 0

    def __len__(self) -> int:
        return int(np.count_nonzero(self._page))

    def slot(self, page: int) -> int | None:
        """The slot of a page's state, None where it has none. O(1)."""
        assert _NO_PAGE < page < len(self._slot), "no such page"
        slot = int(self._slot[page])
        return None if slot == _NO_SLOT else slot

    def slots(self) -> UnitIds:
        """Slots that hold a state, ascending. O(slots)."""
        return np.flatnonzero(self._page)

    def pages(self) -> PageIds:
        """Pages that have a state, in no order. O(slots)."""
        pages: PageIds = self._page[self.slots()]
        return pages

    def put(self, page: int, slot: int) -> None:
        """Enter a state, as just used. Neither page nor slot has one."""
        assert self._page[slot] == _NO_PAGE and self.slot(page) is None
        self._page[slot] = page
        self._slot[page] = slot
        self.touch(np.array([page]))

    def touch(self, pages: AnyIds) -> None:
        """Mark the states of pages (integer [n]) as just used, those that have one. O(n)."""
        self._clock += 1
        slots = self._slot[pages]
        self._used[slots[slots != _NO_SLOT]] = self._clock

    def move(self, page: int, other: int) -> None:
        """Let the state of a page belong to another, which has none. O(1)."""
        slot = self.slot(page)
        assert slot is not None and self.slot(other) is None
        self._slot[page], self._slot[other] = _NO_SLOT, slot
        self._page[slot] = other

    def remove(self, pages: AnyIds) -> UnitIds:
        """Forget the states of pages (integer [n], no two equal); returns the slots freed. O(n)."""
        found = self._slot[pages]
        slots: UnitIds = found[found != _NO_SLOT]
        self._slot[pages] = _NO_SLOT
        self._page[slots] = _NO_PAGE
        return slots

    def oldest_first(self, keep: AnyIds = NO_PAGES) -> PageIds:
        """Pages that have a state and are not in ``keep`` (integer [n]), least recently used first.

        O(slots log slots).
        """
        slots = self.slots()
        slots = slots[~np.isin(self._page[slots], keep)]
        pages: PageIds = self._page[slots[np.lexsort((slots, self._used[slots]))]]
        return pages

    def reach(self, pages: AnyIds) -> int:
        """How many of pages in row order (integer [n]) go up to the last that has a state. O(n)."""
        saved = np.flatnonzero(self._slot[pages])
        return int(saved[-1]) + 1 if len(saved) else 0

    def clear(self) -> None:
        """Forget all states."""
        self._page[:] = _NO_PAGE
        self._slot[:] = _NO_SLOT

    def check_invariants(self) -> None:
        """Assert that both directions say the same. O(slots + pages)."""
        slots = self.slots()
        assert np.array_equal(self._slot[self._page[slots]], slots), "a state lost its page"
        assert np.count_nonzero(self._slot) == len(slots), "a page has a state that is not there"
        assert self._page[0] == _NO_PAGE and self._slot[0] == _NO_SLOT, "the reserved have a state"
        assert (self._used <= self._clock).all()
