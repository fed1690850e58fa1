"""The paged tier: KV of the layers whose cache grows with the context.

A page holds ``page_tokens`` consecutive tokens in every paged plane of every layer, under one number.
Page 0 is reserved: warm-up and padding write there, it is never handed out, and so no index can map
it. The bookkeeping is numpy on the host, the bytes are torch on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from .geometry import Geometry, Plane, Tier
from .handles import Handle, RegionTable
from .storage import Placement, TierStorage, equal_units
from .units import AnyIds, UnitAllocator, UnitIds

PageIds = UnitIds  # int64 [n], physical pages
NO_PAGES: PageIds = np.empty(0, dtype=np.int64)

# Regions that are nothing but rotated channels. Keys per head and of an indexer are rotated as well,
# but are all there is to compare; two pages of one chain stand at the same position.
ROTATED_REGIONS = frozenset({"rope"})


class PagedTier:
    """``pages`` pages besides the reserved one. Not thread safe: one scheduler owns it."""

    def __init__(
        self, geometry: Geometry, *, pages: int, table: RegionTable, device: torch.device
    ) -> None:
        self.geometry = geometry
        self._units = UnitAllocator(pages)
        # Tokens of allocated pages that were freed one by one; a page goes with its last one.
        self._gone = np.zeros((pages + 1, geometry.page_tokens), dtype=np.bool_)
        self._storage = TierStorage(self._placements(), table=table, device=device)

    # --- pages -----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Pages that can be handed out."""
        return self._units.count

    @property
    def available(self) -> int:
        """Pages that nobody owns."""
        return self._units.available

    def allocate(self, pages: int) -> PageIds | None:
        """Own that many pages, int64 [pages]; None, and nothing changes, when there are fewer.

        O(pages). They hold what their last owner wrote.
        """
        return self._units.allocate(pages)

    def free(self, pages: AnyIds) -> None:
        """Give back whole pages, integer [n]. A page that is not owned, or named twice, asserts."""
        self._units.check_owned(pages)
        assert not self._gone[pages].any(), "freed a page of which tokens were freed before"
        self._units.free(pages)

    def free_tokens(self, tokens: AnyIds) -> PageIds:
        """Give back tokens, ``page * page_tokens + offset``, integer [n]; each once.

        A page is released when its last token goes, whatever calls they came in; of a page that was
        not filled, the tokens that never came are named as well. Returns the pages released,
        ascending. O(n log n).
        """
        pages, offsets = np.divmod(tokens, self.geometry.page_tokens)
        touched = np.unique(pages)
        self._units.check_owned(touched)
        assert not self._gone[pages, offsets].any(), "freed a token twice"
        before = int(np.count_nonzero(self._gone[touched]))
        self._gone[pages, offsets] = True
        assert np.count_nonzero(self._gone[touched]) == before + len(tokens), "named a token twice"
        released: PageIds = touched[self._gone[touched].all(axis=1)]
        self._gone[released] = False
        self._units.free(released)
        return released

    def check_owned(self, pages: AnyIds) -> None:
        """Assert that pages (integer [n]) are handed out. O(n)."""
        self._units.check_owned(pages)

    def clear(self) -> None:
        """Take all pages back, for a flush; handles to them are stale from here on."""
        self._units.clear()
        self._gone[:] = False

    # --- bytes -----------------------------------------------------------------------------------

    def tensor(self, layer: int, plane: str) -> torch.Tensor:
        """A layer's plane, uint8 [pages + 1, rows per page, row_bytes]; KeyError for no such plane."""
        return self._storage.tensor(layer, plane)

    def view(self, layer: int, plane: str, region: str) -> torch.Tensor:
        """A region of a plane in its own dtype, [pages + 1, rows per page, elements]; no copy."""
        return self._storage.view(layer, plane, region)

    def handle(self, layer: int, plane: str, page: int) -> Handle:
        """The address of a page in a layer's plane. Raises StaleHandle where nobody owns it."""
        return self._storage.handle(layer, plane, page)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, the reserved page included."""
        return self._storage.nbytes

    def copy_rows(self, source_page: int, target_page: int, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of a page, in all layers: the fork of a partial page.

        Raises ValueError where they end inside a compression group, whose one row also holds what
        comes after.
        """
        self.check_owned(np.array([source_page, target_page]))
        if not 0 <= tokens <= self.geometry.page_tokens:
            raise ValueError(
                f"can not copy {tokens} tokens of a page of {self.geometry.page_tokens}"
            )
        for bank in self._storage.banks:
            if tokens % bank.plane.tokens:
                raise ValueError(
                    f"can not fork a page behind {tokens} tokens: a row of {bank.plane.name!r} "
                    f"is shared by {bank.plane.tokens}; fork at a multiple of that"
                )
        for bank in self._storage.banks:
            rows = tokens // bank.plane.tokens
            bank.data[:, target_page, :rows] = bank.data[:, source_page, :rows]

    def equal_pages(self, pages: AnyIds, others: AnyIds) -> npt.NDArray[np.bool_]:
        """Whether pages hold the same identity bytes (:func:`identity_ranges`), pair by pair.

        Both integer [n]; bool [n]. Compares bytes, so equal NaNs are equal and the two zeros are not.
        """
        self.check_owned(pages)
        self.check_owned(others)
        equal = np.ones(len(pages), dtype=np.bool_)
        for bank in self._storage.banks:
            equal &= equal_units(bank.data, pages, others, identity_ranges(bank.plane))
        return equal

    def check_invariants(self) -> None:
        """Assert counts, disjointness and bytes. O(tokens + planes)."""
        self._units.check_invariants()
        partly = self._gone.any(axis=1)
        assert not self._gone.all(axis=1).any(), "a page outlived its last token"
        self.check_owned(np.flatnonzero(partly))
        self._storage.check_invariants(self._placements())
        assert self.nbytes == (self.size + 1) * self.geometry.page_bytes

    def _placements(self) -> Iterator[Placement]:
        for layer, plane in self.geometry.planes(Tier.PAGED):
            rows, _ = self.geometry.page_shape(plane)
            yield Placement(layer, plane, rows, self._units.ownership)


def identity_ranges(plane: Plane) -> tuple[tuple[int, int], ...]:
    """Byte ranges of a row that do not depend on the position of its tokens, ascending.

    Neither rotated channels nor padding; ``((0, 528),)`` for a packed FP8 MLA row of 656 bytes.
    """
    ranges: list[tuple[int, int]] = []
    for region in plane.regions:
        if region.name in ROTATED_REGIONS:
            continue
        start = plane.offset(region.name)
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, plane.offset(region.name) + region.bytes))
    return tuple(ranges)
