"""The tensors of one tier, and their bytes as regions.

Planes of one name and shape are one allocation, a *bank* ``uint8 [layers, units, rows, row_bytes]``,
so that a page or a slot is copied and compared in all layers at once. Each layer's plane is a contiguous
slice of its bank and a region of the pool's table. A unit is a page, or a request's slot; unit 0 is the
reserved one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .geometry import Plane
from .handles import Handle, RegionTable
from .units import AnyIds, Ownership

_COMPARE_BYTES = 8 << 20  # gathered at once, of each side
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Placement(NamedTuple):
    """A plane that a tier keeps: how many rows of it make a unit, and who owns the units."""

    layer: int
    plane: Plane
    rows: int
    ownership: Ownership


@dataclass(frozen=True, slots=True)
class Bank:
    """One plane of every layer that has it. ``data`` is uint8 [layers, units, rows, row_bytes]."""

    plane: Plane
    layers: tuple[int, ...]
    data: torch.Tensor
    regions: tuple[int, ...]  # numbers in the pool's table, layer by layer


class TierStorage:
    """All banks of one tier. Memory is zeroed: padding that attention masks must be finite."""

    def __init__(
        self, placements: Iterable[Placement], *, table: RegionTable, device: torch.device
    ) -> None:
        groups: dict[Plane, list[Placement]] = {}
        for placement in placements:
            groups.setdefault(placement.plane, []).append(placement)
        banks: list[Bank] = []
        self._place: dict[tuple[int, str], tuple[int, int]] = {}
        for plane, group in groups.items():
            _, _, rows, ownership = group[0]
            shape = (len(group), len(ownership), rows, plane.row_bytes)
            data = torch.zeros(shape, dtype=torch.uint8, device=device)
            regions = []
            for place, (layer, *_) in enumerate(group):
                name = f"layer {layer} {plane.name}"
                regions.append(table.register(name, data[place], data[place, 0].nbytes, ownership))
                self._place[layer, plane.name] = (len(banks), place)
            banks.append(Bank(plane, tuple(layer for layer, *_ in group), data, tuple(regions)))
        self.banks = tuple(banks)
        self._table = table

    def bank_number(self, layer: int, plane: str) -> int:
        """Which bank holds a plane of a layer; KeyError where the tier has none of that name."""
        return self._placed(layer, plane)[0]

    def tensor(self, layer: int, plane: str) -> torch.Tensor:
        """A layer's plane: uint8 [units, rows, row_bytes], contiguous."""
        bank, place = self._placed(layer, plane)
        return self.banks[bank].data[place]

    def view(self, layer: int, plane: str, region: str) -> torch.Tensor:
        """A region of every row in its own dtype, without a copy: [units, rows, elements].

        Rows keep their stride. FP4 and UE8M0 stay bytes.
        """
        bank, place = self._placed(layer, plane)
        shape = self.banks[bank].plane
        start, part = shape.offset(region), shape.region(region)
        raw = self.banks[bank].data[place, ..., start : start + part.bytes]
        return raw.view(part.dtype.torch_dtype)

    def handle(self, layer: int, plane: str, unit: int) -> Handle:
        """The address of a unit in a layer's plane. Raises StaleHandle where nobody owns it."""
        bank, place = self._placed(layer, plane)
        return self._table.handle(self.banks[bank].regions[place], unit)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, the reserved unit included."""
        return sum(bank.data.nbytes for bank in self.banks)

    def check_invariants(self, placements: Iterable[Placement]) -> None:
        """Assert that each plane has the bytes the geometry gives it, and no tensor has others."""
        expected = 0
        for layer, plane, rows, ownership in placements:
            tensor = self.tensor(layer, plane.name)
            assert tensor.shape == (len(ownership), rows, plane.row_bytes)
            assert tensor.is_contiguous() and tensor.nbytes == tensor.numel()
            expected += tensor.nbytes
        assert self.nbytes == expected, "a bank holds more than its layers"
        for bank in self.banks:
            assert bank.data.untyped_storage().nbytes() == bank.data.nbytes

    def _placed(self, layer: int, plane: str) -> tuple[int, int]:
        try:
            return self._place[layer, plane]
        except KeyError:
            have = sorted(name for other, name in self._place if other == layer)
            raise KeyError(
                f"layer {layer} has no plane {plane!r} in this tier; it has {', '.join(have) or 'none'}"
            ) from None


def equal_units(
    layers: Iterable[torch.Tensor],
    units: AnyIds,
    others: AnyIds,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> npt.NDArray[np.bool_]:
    """Whether units hold the same bytes in every layer, pair by pair; bool [n].

    ``layers`` are uint8 [units, rows, row_bytes], ``units`` and ``others`` integer [n]; ``ranges`` are
    the bytes of a row that count, all of them for None. Layer by layer, and in the widest words that
    the ranges divide into: nine times as fast as all layers at once in bytes, which leaves the
    processor's cache.
    """
    layers = tuple(layers)
    device = layers[0].device
    mine, theirs = torch.from_numpy(units).to(device), torch.from_numpy(others).to(device)
    equal = torch.ones(len(mine), dtype=torch.bool, device=device)
    for layer in layers:
        _, rows, row_bytes = layer.shape
        counted = ((0, row_bytes),) if ranges is None else ranges
        width = math.gcd(row_bytes, *itertools.chain(*counted), max(_WORDS))
        words = layer.view(_WORDS[width])
        step = max(1, _COMPARE_BYTES // (rows * row_bytes))
        for first in range(0, len(mine), step):
            part = slice(first, first + step)
            one, other = words.index_select(0, mine[part]), words.index_select(0, theirs[part])
            for start, end in counted:
                columns = slice(start // width, end // width)
                equal[part] &= (one[..., columns] == other[..., columns]).flatten(1).all(1)
    return equal.cpu().numpy()
