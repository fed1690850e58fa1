"""What the cache of a model looks like, and everything that follows from it.

A model is a sequence of layers; a layer keeps *planes*; a plane is one tensor of rows with one
stride, each row shared by a number of tokens (:mod:`memory_pool.planes`).

Block size, pool shapes, bytes per token and what a page costs are consequences, and are derived
here in exact arithmetic (:class:`fractions.Fraction`): a row that 128 tokens share may well cost a
token four and a half bytes. Sizes are of one tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from .planes import Dtype, Plane, Region, Tier, refuse_duplicates

__all__ = [
    "FLASHMLA_PAGE_TOKENS",
    "PAGE_TOKENS",
    "Dtype",
    "Geometry",
    "LayerGeometry",
    "LayerKind",
    "Plane",
    "Region",
    "Tier",
    "block_tokens",
    "default_page_tokens",
]

FLASHMLA_PAGE_TOKENS = 64  # FlashMLA's dense and sparse decode read pages of this many rows
PAGE_TOKENS = 64  # a page where the geometry asks for less


class LayerKind(Enum):
    """How a layer attends, as far as its cache is concerned."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"
    SWA = "SWA"  # sliding window only
    CSA = "CSA"  # compressed sparse attention: short overlapping groups, chosen by an indexer
    HCA = "HCA"  # heavily compressed attention: long groups, all of them read


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer keeps on one tensor-parallel rank."""

    kind: LayerKind
    planes: tuple[Plane, ...]
    replicas: int = 1  # ranks that hold the same bytes: all of them where heads are not split

    def __post_init__(self) -> None:
        if not self.planes or self.replicas < 1:
            raise ValueError(f"a {self.kind.value} layer needs a plane and at least one replica")
        refuse_duplicates(f"{self.kind.value} layer", [plane.name for plane in self.planes])

    @property
    def paged(self) -> tuple[Plane, ...]:
        """Planes that grow with the context."""
        return tuple(plane for plane in self.planes if plane.tier is Tier.PAGED)

    @property
    def arena(self) -> tuple[Plane, ...]:
        """Planes of a request's slot."""
        return tuple(plane for plane in self.planes if plane.tier is Tier.ARENA)

    @property
    def bytes_per_token(self) -> Fraction:
        """What one more token of context costs in pages; 0 for a layer of windows only."""
        return sum((plane.bytes_per_token for plane in self.paged), Fraction(0))

    @property
    def content_bytes_per_token(self) -> Fraction:
        """The same without scales and padding: what published tables count."""
        return sum((plane.content_bytes_per_token for plane in self.paged), Fraction(0))

    @property
    def slot_bytes(self) -> int:
        """Arena bytes of one request."""
        return sum(plane.slot_bytes for plane in self.arena)

    def plane(self, name: str) -> Plane:
        """The plane of that name; KeyError if the layer has none."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        known = ", ".join(plane.name for plane in self.planes)
        raise KeyError(f"a {self.kind.value} layer has no plane {name!r}; it has {known}")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The cache of a whole model, cut into pages of ``page_tokens`` tokens.

    Raises ValueError where a page would end inside a compression group or inside what a kernel
    reads at once.
    """

    name: str
    layers: tuple[LayerGeometry, ...]
    page_tokens: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"{self.name}: a geometry needs at least one layer")
        block = self.block_tokens
        if self.page_tokens <= 0 or self.page_tokens % block:
            raise ValueError(
                f"{self.name}: a page of {self.page_tokens} tokens is no multiple of its block of "
                f"{block} tokens{self._block_reason()}; use {default_page_tokens(self.layers)}"
            )

    @property
    def block_tokens(self) -> int:
        """The smallest page that splits nothing."""
        return block_tokens(self.layers)

    @property
    def bytes_per_token(self) -> Fraction:
        """Paged bytes that one more token costs, over all layers."""
        return sum((layer.bytes_per_token for layer in self.layers), Fraction(0))

    @property
    def content_bytes_per_token(self) -> Fraction:
        """The same without scales and padding."""
        return sum((layer.content_bytes_per_token for layer in self.layers), Fraction(0))

    @property
    def page_bytes(self) -> int:
        """What a page costs over all layers; the arena is not in it."""
        return sum(math.prod(self.page_shape(plane)) for _, plane in self.planes(Tier.PAGED))

    @property
    def slot_bytes(self) -> int:
        """Arena bytes of one request, over all layers; 0 for a model whose layers all page."""
        return sum(layer.slot_bytes for layer in self.layers)

    @property
    def boundary_bytes(self) -> int:
        """The part of a slot that a block boundary needs: without the groups in the making."""
        return sum(plane.slot_bytes for _, plane in self.planes(Tier.ARENA) if not plane.transient)

    @property
    def metadata_share(self) -> Fraction:
        """Scales and padding as a share of a page; 0 where nothing is paged."""
        if not self.page_bytes:
            return Fraction(0)
        return 1 - self.content_bytes_per_token / self.bytes_per_token

    def planes(self, tier: Tier) -> Iterator[tuple[int, Plane]]:
        """Every plane of a tier with the index of its layer, in layer order."""
        for index, layer in enumerate(self.layers):
            for plane in layer.planes:
                if plane.tier is tier:
                    yield index, plane

    def page_shape(self, plane: Plane) -> tuple[int, int]:
        """Rows of a paged plane in one page, and their stride in bytes."""
        assert plane.tier is Tier.PAGED, f"plane {plane.name!r} is not paged"
        return self.page_tokens // plane.tokens, plane.row_bytes

    def pages(self, tokens: int) -> int:
        """Pages that hold a context; the last may be partly filled."""
        return -(-tokens // self.page_tokens)

    def _block_reason(self) -> str:
        strides = sorted({plane.tokens for _, plane in self.planes(Tier.PAGED)} - {1})
        reasons = [f"groups of {' and '.join(map(str, strides))} tokens"] if strides else []
        if any(layer.kind is LayerKind.MLA for layer in self.layers):
            reasons.append(f"FlashMLA reads {FLASHMLA_PAGE_TOKENS} at once")
        return f" ({', '.join(reasons)})" if reasons else ""


def block_tokens(layers: Iterable[LayerGeometry]) -> int:
    """Least common multiple of the strides, and of what FlashMLA reads where a layer is MLA."""
    block = 1
    for layer in layers:
        if layer.kind is LayerKind.MLA:
            block = math.lcm(block, FLASHMLA_PAGE_TOKENS)
        for plane in layer.paged:
            block = math.lcm(block, plane.tokens)
    return block


def default_page_tokens(layers: Sequence[LayerGeometry]) -> int:
    """The smallest multiple of the block that has at least :data:`PAGE_TOKENS` tokens."""
    block = block_tokens(layers)
    return -(-PAGE_TOKENS // block) * block
