"""Which position each row of a sliding window holds.

A plane of the arena is, in every slot, a ring: the row of position ``p`` is ``p mod rows``. A slot that
changes hands, a window that is not full yet, a row that a later position took: in all of them the bytes
of a row are not those of the position that a reader wants. So a ring is tagged, and a reader who names
positions gets rows only where the tag says that this owner wrote them. All others are answered with row
0, in the reserved slot that nobody owns; writes that need not be kept go there as well, so that a
kernel can scatter a whole batch without a filter.

Tags are numpy on the host and cover all layers of a bank: a forward pass writes the same positions in
each of them. What is written once for several tokens (``plane.tokens``) has one tag.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .geometry import Plane
from .units import AnyIds, UnitIds

Positions = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]
Slots = UnitIds

PADDING_ROW = 0
_UNWRITTEN = -1


class Ring:
    """Tags of one plane. Rows are numbered through all units: ``unit * rows + row``."""

    __slots__ = ("_tags", "_tails", "_units", "plane")

    def __init__(self, plane: Plane, *, units: int, tails: UnitIds, by_tail: bool) -> None:
        """``tails`` is the arena's record, int64 [slots + 1]: not 0 where a request runs.

        A plane that only running requests have (``by_tail``) is found by it; in any other the unit of
        a slot is the slot. ``units`` count the reserved one.
        """
        self.plane = plane
        self._tails = tails
        self._units = tails if by_tail else np.arange(len(tails))
        self._tags = np.full((units, plane.rows), _UNWRITTEN, dtype=np.int64)

    def unit(self, slot: int) -> int:
        """Where a slot is in the plane's tensor; 0 where it has no part in the plane."""
        return int(self._units[slot])

    def write_rows(self, slots: Slots, positions: Positions) -> Rows:
        """Where to write positions of running requests; from here on they can be read.

        Both int64 [n], pair by pair, in any order; slot 0 is padding. Returns int64 [n]. Where a
        later position of the same call takes the row, the earlier is sent to the padding row. O(n).
        """
        assert len(slots) == len(positions) and (positions >= 0).all()
        assert self._tails[slots[slots > 0]].all(), "wrote a slot that no request runs in"
        numbers = positions // self.plane.tokens
        rows = self._rows(slots, numbers)
        flat = self._tags.reshape(-1)
        flat[rows] = _UNWRITTEN
        np.maximum.at(flat, rows, numbers)
        kept = flat[rows] == numbers
        self._tags[0] = _UNWRITTEN
        return np.where(kept & (slots > 0), rows, PADDING_ROW)

    def read_rows(self, slots: Slots, positions: Positions) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Where positions of running requests are, and which of them are there at all.

        Both int64 [n], pair by pair; returns int64 [n] and bool [n]. What is not there (never
        written, left the window, written by another owner, before the prompt) has the padding row.
        O(n).
        """
        assert self._tails[slots[slots > 0]].all(), "read a slot that no request runs in"
        numbers = positions // self.plane.tokens
        rows = self._rows(slots, numbers)
        readable = (self._tags.reshape(-1)[rows] == numbers) & (positions >= 0)
        return np.where(readable, rows, PADDING_ROW), readable

    def saved_rows(self, slot: int, positions: Positions) -> Rows:
        """Where the saved state in ``slot`` has positions, int64 [n]; all must be there. O(n)."""
        assert slot > 0 and not self._tails[slot], "not the slot of a saved state"
        numbers = positions // self.plane.tokens
        rows = self._rows(np.full(len(numbers), slot), numbers)
        assert (self._tags.reshape(-1)[rows] == numbers).all(), "a state without these positions"
        return rows

    def forget(self, slots: Slots, positions: Positions) -> int:
        """Make positions of running requests unreadable. Returns how many rows that freed.

        Both int64 [n], pair by pair. Positions that have no row count for nothing. O(n).
        """
        rows, readable = self.read_rows(slots, positions)
        flat = self._tags.reshape(-1)
        gone = np.unique(rows[readable])
        flat[gone] = _UNWRITTEN
        return len(gone)

    def holds_boundary(self, slot: int, length: int) -> bool:
        """Whether a slot has all that goes on from ``length`` tokens: its last ``rows`` entries.

        Always so for a transient plane, which is empty at a boundary.
        """
        if self.plane.transient:
            return True
        assert length % self.plane.tokens == 0, "a boundary inside a row"
        end = length // self.plane.tokens
        needed = np.arange(max(0, end - self.plane.rows), end)
        return bool((self._tags[self._units[slot], needed % self.plane.rows] == needed).all())

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Give a slot the tags of another, without those from ``length`` tokens on."""
        tags = self._tags[self._units[source]]
        if length is not None:
            tags = np.where(tags < length // self.plane.tokens, tags, _UNWRITTEN)
        self._tags[self._units[target]] = tags

    def clear(self, slots: AnyIds) -> None:
        """Make all of some slots (integer [n]) unreadable."""
        self._tags[self._units[slots]] = _UNWRITTEN

    def check_invariants(self, owned: npt.NDArray[np.bool_]) -> None:
        """Assert that tags stand in their own rows, and only in units that somebody owns."""
        rows = self.plane.rows
        written = self._tags != _UNWRITTEN
        assert (self._tags >= _UNWRITTEN).all()
        assert (self._tags % rows == np.arange(rows))[written].all(), "a tag in a foreign row"
        assert not written[~owned].any(), "a unit that nobody owns can be read"

    def _rows(self, slots: Slots, numbers: Positions) -> Rows:
        return self._units[slots] * self.plane.rows + numbers % self.plane.rows


def eviction_frontier(length: int, *, window: int, page_tokens: int) -> int:
    """Tokens at the start of a request that its window no longer needs, in whole pages.

    Holds back the window, but no less than a page, rounded up to pages, so that the last page is never
    all evicted.
    """
    held_back = -(-max(window, page_tokens) // page_tokens) * page_tokens
    return max(0, length - held_back) // page_tokens * page_tokens
