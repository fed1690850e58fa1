"""Addresses in the pool: ``{region, offset, length}``, checked where they are made.

A *region* is a run of bytes that the pool allocated, cut into equal units: pages of one plane, or
request slots of another. The table knows for every unit which claim owns it, so

* two live handles never overlap: a claim takes units that nobody owns, or fails;
* a handle outlives nothing: every claim gets a generation that the process never uses again, and a
  handle resolves only while its units, and no others, carry it. Released, retired, foreign and
  invented handles all fail the same comparison;
* resolving is an index operation: two look-ups and a slice, no search and no copy.

Regions that are cut alike share one :class:`Ownership`, because a page is owned once, in all planes
of all layers. The tier that hands their units out claims them in bulk, and
:meth:`RegionTable.handle` names one; a region of its own is claimed with :meth:`RegionTable.claim`.

A dict of live handles would do the same for a Python step per page and plane.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from .units import NOBODY, Ownership

LIMIT = 1 << 64


class StaleHandle(LookupError):
    """The handle names nothing that is claimed: released, retired, or of another table."""


@dataclass(frozen=True, slots=True)
class Handle:
    """``length`` bytes from byte ``offset`` on in a region; every field is unsigned, 64 bits.

    Raises ValueError where a field or the end does not fit.
    """

    region: int
    offset: int
    length: int
    generation: int

    def __post_init__(self) -> None:
        for name in ("region", "offset", "length", "generation"):
            value = getattr(self, name)
            if not 0 <= value < LIMIT:
                raise ValueError(f"handle: {name} {value} is not an unsigned 64-bit number")
        if self.end > LIMIT:
            raise ValueError(f"handle: offset {self.offset} + length {self.length} exceed 64 bits")

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class _Region:
    name: str
    storage: torch.Tensor  # uint8 [bytes]: the buffer that was registered, flat
    unit_bytes: int
    ownership: Ownership
    private: bool  # claimed through the table, not by a tier


class RegionTable:
    """Every region of a pool, by number. Not thread safe: one scheduler owns it."""

    def __init__(self) -> None:
        self._regions: list[_Region] = []

    def __len__(self) -> int:
        return len(self._regions)

    def register(
        self,
        name: str,
        buffer: torch.Tensor,
        unit_bytes: int,
        ownership: Ownership | None = None,
    ) -> int:
        """Enter a buffer (any shape and dtype, contiguous) as a region; returns its number.

        ``ownership`` is that of regions which are cut alike, and is then claimed by its owner only.
        Raises ValueError where the buffer is not contiguous or not a whole number of units.
        """
        if not buffer.is_contiguous():
            raise ValueError(f"region {name!r}: its buffer of {tuple(buffer.shape)} has gaps")
        if unit_bytes <= 0 or buffer.nbytes % unit_bytes:
            raise ValueError(
                f"region {name!r}: {buffer.nbytes} bytes are no whole number of units of "
                f"{unit_bytes} bytes"
            )
        units = buffer.nbytes // unit_bytes
        if ownership is not None and len(ownership) != units:
            raise ValueError(
                f"region {name!r}: {units} units, but its ownership has {len(ownership)}"
            )
        storage = buffer.view(-1).view(torch.uint8)
        owner = Ownership(units) if ownership is None else ownership
        self._regions.append(_Region(name, storage, unit_bytes, owner, ownership is None))
        return len(self._regions) - 1

    def claim(self, region: int, offset: int, length: int) -> Handle:
        """Own ``[offset, offset + length)``, both in bytes and multiples of the region's unit.

        Raises ValueError where that is not inside the region, or overlaps a live claim. O(units
        claimed).
        """
        entry = self._private(region)
        wanted = f"region {entry.name!r}: bytes [{offset}, {offset + length})"
        if offset < 0 or length <= 0 or offset + length > entry.storage.nbytes:
            raise ValueError(f"{wanted} are not inside its {entry.storage.nbytes} bytes")
        if offset % entry.unit_bytes or length % entry.unit_bytes:
            raise ValueError(f"{wanted} do not begin and end on units of {entry.unit_bytes} bytes")
        first, end = offset // entry.unit_bytes, (offset + length) // entry.unit_bytes
        taken = np.flatnonzero(entry.ownership.generations[first:end])
        if len(taken):
            other, other_end = entry.ownership.run_of(first + int(taken[0]))
            raise ValueError(
                f"{wanted} overlap the live claim of bytes "
                f"[{other * entry.unit_bytes}, {other_end * entry.unit_bytes})"
            )
        return Handle(region, offset, length, entry.ownership.take_run(first, end))

    def handle(self, region: int, unit: int) -> Handle:
        """Name a unit that its tier handed out. Raises StaleHandle where nobody owns it. O(1)."""
        entry = self._entry(region)
        if not 0 <= unit < len(entry.ownership):
            raise ValueError(f"region {entry.name!r}: no unit {unit} in {len(entry.ownership)}")
        generation = int(entry.ownership.generations[unit])
        if generation == NOBODY:
            raise StaleHandle(f"region {entry.name!r}: nobody owns unit {unit}")
        return Handle(region, unit * entry.unit_bytes, entry.unit_bytes, generation)

    def release(self, handle: Handle) -> None:
        """Give up a claim. Raises StaleHandle where it is none, or no longer. O(units claimed)."""
        first, end = self._live_units(handle)
        self._private(handle.region).ownership.drop(np.arange(first, end))

    def resolve(self, handle: Handle) -> torch.Tensor:
        """The bytes of a live handle: a view, uint8 [length]. Raises StaleHandle. O(1)."""
        self._live_units(handle)
        return self._regions[handle.region].storage[handle.offset : handle.end]

    def retire(self, region: int) -> None:
        """Make every handle of a region stale; it can be claimed anew from here on. O(units)."""
        self._private(region).ownership.clear()

    def name(self, region: int) -> str:
        """What the region was registered as."""
        return self._entry(region).name

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(entry.storage.nbytes for entry in self._regions)

    def check_invariants(self) -> None:
        """Assert that regions are whole, claims are runs, and no byte is in two regions."""
        extents = []
        for entry in self._regions:
            storage, ownership = entry.storage, entry.ownership
            assert storage.dtype == torch.uint8 and storage.is_contiguous() and storage.dim() == 1
            assert storage.nbytes == len(ownership) * entry.unit_bytes, "a region lost its shape"
            if storage.nbytes and storage.device.type != "meta":
                start = storage.data_ptr()
                extents.append((str(storage.device), start, start + storage.nbytes, entry.name))
        for ownership in {id(e.ownership): e.ownership for e in self._regions}.values():
            ownership.check_invariants()
        extents.sort()
        for (device, _, end, name), (other_device, start, _, other) in pairwise(extents):
            assert device != other_device or end <= start, f"{name!r} and {other!r} share bytes"

    def _entry(self, region: int) -> _Region:
        if not 0 <= region < len(self._regions):
            raise ValueError(f"no region {region} in a table of {len(self._regions)}")
        return self._regions[region]

    def _private(self, region: int) -> _Region:
        entry = self._entry(region)
        if not entry.private:
            raise ValueError(f"region {entry.name!r} is claimed and released by its tier")
        return entry

    def _live_units(self, handle: Handle) -> tuple[int, int]:
        """Units of a live handle: the one check that every use of a handle goes through."""
        if handle.region >= len(self._regions):
            raise StaleHandle(f"{handle} is of another table: this one has no such region")
        entry = self._regions[handle.region]
        first, rest = divmod(handle.offset, entry.unit_bytes)
        end, more = divmod(handle.end, entry.unit_bytes)
        if rest or more or not entry.ownership.owns_exactly(handle.generation, first, end):
            raise StaleHandle(f"{handle} names no live claim of region {entry.name!r}")
        return first, end
