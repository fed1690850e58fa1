"""Who owns the equal units that regions are cut into, and a bulk allocator of them.

Units are numbered from 0. Everything takes and returns whole arrays of numbers; nothing here costs a
Python step per unit. Misuse is a bug of ours, and asserts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

UnitIds = npt.NDArray[np.int64]
AnyIds = npt.NDArray[np.integer[Any]]  # taken as well: the index keeps its ids in 32 bits

NOBODY = 0


class Ownership:
    """Which claim owns each unit of the regions that are cut alike."""

    __slots__ = ("generations",)
    _next_generation: ClassVar[int] = 1  # of the process, so that a foreign handle never fits

    def __init__(self, units: int) -> None:
        self.generations: UnitIds = np.zeros(units, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.generations)

    def take(self, units: AnyIds) -> None:
        """Own free units (integer [n], no two equal), each by a claim of its own. O(n)."""
        assert not self.generations[units].any(), "took a unit that is owned"
        first = self._reserve(len(units))
        self.generations[units] = np.arange(first, first + len(units))

    def take_run(self, first: int, end: int) -> int:
        """Own the free units ``[first, end)`` by one claim; returns its generation. O(n)."""
        assert not self.generations[first:end].any(), "took a unit that is owned"
        generation = self._reserve(1)
        self.generations[first:end] = generation
        return generation

    def drop(self, units: AnyIds) -> None:
        """Give up owned units (integer [n]); their handles are stale from here on. O(n)."""
        assert self.generations[units].all(), "gave up a unit that nobody owns"
        self.generations[units] = NOBODY

    def owns_exactly(self, generation: int, first: int, end: int) -> bool:
        """Whether the claim owns ``[first, end)`` and nothing beside it. O(1)."""
        units = self.generations
        return (
            0 <= first < end <= len(units)
            and generation != NOBODY
            and bool(units[first] == units[end - 1] == generation)
            and (first == 0 or bool(units[first - 1] != generation))
            and (end == len(units) or bool(units[end] != generation))
        )

    def run_of(self, unit: int) -> tuple[int, int]:
        """First unit of the claim that owns ``unit``, and one past its last. O(units)."""
        run = np.flatnonzero(self.generations == self.generations[unit])
        return int(run[0]), int(run[-1]) + 1

    def clear(self) -> None:
        """Give up all units."""
        self.generations[:] = NOBODY

    def check_invariants(self) -> None:
        """Assert that every claim is one run, and was handed out. O(units log units)."""
        owned = np.flatnonzero(self.generations)
        generations = self.generations[owned]
        assert (generations > 0).all() and (generations < Ownership._next_generation).all()
        runs = 1 + np.count_nonzero((np.diff(generations) != 0) | (np.diff(owned) != 1))
        claims = len(np.unique(generations))
        assert claims == (runs if len(owned) else 0), "a claim has a hole"

    @staticmethod
    def _reserve(count: int) -> int:
        first = Ownership._next_generation
        Ownership._next_generation += count
        return first


class UnitAllocator:
    """Units ``1 .. count``, handed out and taken back in bulk; unit 0 is reserved for padding.

    What came back last goes out first, so that a small working set stays in few pages of memory and
    every tensor-parallel rank that replays the same calls hands out the same units.
    """

    __slots__ = ("_free", "available", "ownership")

    def __init__(self, count: int) -> None:
        self.ownership = Ownership(count + 1)
        self._free: UnitIds = np.empty(count, dtype=np.int64)  # a stack; the top is at `available`
        self.available = 0
        self.clear()

    @property
    def count(self) -> int:
        """Units that can be handed out."""
        return len(self._free)

    @property
    def allocated(self) -> int:
        """Units that somebody owns."""
        return self.count - self.available

    @property
    def owned(self) -> npt.NDArray[np.bool_]:
        """By number, whether somebody owns the unit; bool [count + 1]. O(units)."""
        owned: npt.NDArray[np.bool_] = self.ownership.generations != NOBODY
        return owned

    def allocate(self, count: int) -> UnitIds | None:
        """Own ``count`` units, int64 [count]; None, and nothing changes, when there are fewer."""
        assert count >= 0, "allocated a negative number of units"
        if count > self.available:
            return None
        rest = self.available - count
        units = self._free[rest : self.available][::-1].copy()
        self.available = rest
        self.ownership.take(units)
        return units

    def free(self, units: AnyIds) -> None:
        """Take back units (integer [n]), each owned and named once. O(n log n)."""
        self.check_owned(units)
        assert len(np.unique(units)) == len(units), "freed a unit twice"
        self.ownership.drop(units)
        self._free[self.available : self.available + len(units)] = units[::-1]
        self.available += len(units)

    def check_owned(self, units: AnyIds) -> None:
        """Assert that units (integer [n]) were handed out and not taken back. O(n)."""
        if len(units):
            assert units.min() > 0 and units.max() <= self.count, "not a unit that is handed out"
            assert self.ownership.generations[units].all(), "nobody owns the unit"

    def clear(self) -> None:
        """Take everything back; all handles are stale from here on."""
        self._free[:] = np.arange(self.count, 0, -1)
        self.available = self.count
        self.ownership.clear()

    def check_invariants(self) -> None:
        """Assert that each unit is either free or owned, and that nobody owns the reserved one."""
        self.ownership.check_invariants()
        assert 0 <= self.available <= self.count
        free = np.sort(self._free[: self.available])
        nobody = np.flatnonzero(self.ownership.generations == NOBODY)
        assert np.array_equal(nobody, np.concatenate([[0], free])), (
            "a unit is lost or has two owners"
        )
