"""Planes: tensors of equal rows, and the regions that a row is made of.

A packed FP8 MLA layer, for example, is one plane with a row per token::

    latent 512 × E4M3 | scale 4 × FP32 | rope 64 × BF16      512 + 16 + 128 = 656 B

Nothing is allocated here, and torch is imported only by whoever asks for a torch dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BITS_PER_BYTE = 8


class Dtype(Enum):
    """Element type of a region: the torch dtype that stores it, and its width in bits.

    FP4 is packed two a byte and UE8M0 (a power of two as an 8-bit exponent) is one byte; both are
    stored as ``uint8``, which every torch can index and copy.
    """

    BF16 = ("bfloat16", 16)
    FP16 = ("float16", 16)
    FP32 = ("float32", 32)
    FP8_E4M3 = ("float8_e4m3fn", 8)
    FP4_E2M1 = ("uint8", 4)
    UE8M0 = ("uint8", 8)

    @property
    def bits(self) -> int:
        """Width of one element."""
        return self.value[1]

    @property
    def torch_name(self) -> str:
        """Name of the storing dtype in the ``torch`` module."""
        return self.value[0]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The storing dtype itself; imports torch."""
        import torch

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def storage_bytes(self) -> int:
        """Size of one stored item: a byte for FP4, which holds two elements."""
        return max(self.bits, BITS_PER_BYTE) // BITS_PER_BYTE


class Tier(Enum):
    """Where a plane lives: pages that grow with the context, or a fixed slot per request."""

    PAGED = "paged"
    ARENA = "arena"


@dataclass(frozen=True, slots=True)
class Region:
    """A run of equal elements inside a row."""

    name: str
    elements: int
    dtype: Dtype
    metadata: bool = False  # scales: stored beside the content, and left out of published tables

    def __post_init__(self) -> None:
        if self.elements <= 0:
            raise ValueError(f"region {self.name!r}: {self.elements} elements; at least one needed")
        bits = self.elements * self.dtype.bits
        if bits % BITS_PER_BYTE:
            raise ValueError(
                f"region {self.name!r}: {self.elements} elements of {self.dtype.name} are "
                f"{bits} bits, which is no whole number of bytes"
            )

    @property
    def bytes(self) -> int:
        """Size in a row."""
        return self.elements * self.dtype.bits // BITS_PER_BYTE

    @property
    def storage_elements(self) -> int:
        """Items of :attr:`Dtype.torch_dtype` that hold the region: half of them for FP4."""
        return self.bytes // self.dtype.storage_bytes


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of equal rows: ``uint8 [..., rows, row_bytes]``, regions one behind the other.

    ``tokens`` consecutive tokens share a row: 1 for plain KV, 4 for CSA, 128 for HCA. A paged plane
    has ``page_tokens / tokens`` rows in every page and ``rows`` 0; an arena plane has ``rows`` of
    them in every request's slot.
    """

    name: str
    tier: Tier
    tokens: int
    regions: tuple[Region, ...]
    rows: int = 0
    padding_bytes: int = 0  # behind the last region, up to the stride that kernels read
    transient: bool = False  # arena: a group in the making, empty at every block boundary

    def __post_init__(self) -> None:
        if self.tokens <= 0 or self.padding_bytes < 0 or not self.regions:
            raise ValueError(
                f"plane {self.name!r}: needs a region, a positive number of tokens per row "
                f"(got {self.tokens}) and no negative padding (got {self.padding_bytes})"
            )
        refuse_duplicates(f"plane {self.name!r}", [region.name for region in self.regions])
        if (self.rows > 0) != (self.tier is Tier.ARENA):
            raise ValueError(
                f"plane {self.name!r}: {self.rows} rows per slot in the {self.tier.value} tier; "
                "an arena plane has at least one, a paged plane none"
            )
        if self.transient and self.tier is Tier.PAGED:
            raise ValueError(f"plane {self.name!r}: only an arena plane can be transient")
        for region in self.regions:
            width = region.dtype.storage_bytes
            if self.offset(region.name) % width or self.row_bytes % width:
                raise ValueError(
                    f"plane {self.name!r}: region {region.name!r} of {region.dtype.name} at byte "
                    f"{self.offset(region.name)} of a row of {self.row_bytes} is not aligned to {width}"
                )

    @property
    def row_bytes(self) -> int:
        """Stride from row to row, padding included."""
        return sum(region.bytes for region in self.regions) + self.padding_bytes

    @property
    def content_bytes(self) -> int:
        """What a row holds of the model's own numbers: neither scales nor padding."""
        return sum(region.bytes for region in self.regions if not region.metadata)

    @property
    def bytes_per_token(self) -> Fraction:
        """A token's share of a row, exactly."""
        return Fraction(self.row_bytes, self.tokens)

    @property
    def content_bytes_per_token(self) -> Fraction:
        """A token's share of a row's content, exactly."""
        return Fraction(self.content_bytes, self.tokens)

    @property
    def slot_bytes(self) -> int:
        """Size in a request's slot; 0 for a paged plane."""
        return self.rows * self.row_bytes

    def region(self, name: str) -> Region:
        """The region of that name; KeyError if the row has none."""
        return self.regions[self._index(name)]

    def offset(self, name: str) -> int:
        """First byte of a region in the row; KeyError if the row has none of that name."""
        return sum(region.bytes for region in self.regions[: self._index(name)])

    def _index(self, name: str) -> int:
        for index, region in enumerate(self.regions):
            if region.name == name:
                return index
        known = ", ".join(region.name for region in self.regions)
        raise KeyError(f"plane {self.name!r} has no region {name!r}; it has {known}")


def refuse_duplicates(owner: str, names: Sequence[str]) -> None:
    """ValueError if a name stands twice in what ``owner`` is made of."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{owner}: {', '.join(twice)} named more than once")
