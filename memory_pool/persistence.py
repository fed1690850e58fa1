"""What outlives a request of its sliding windows, and what has to be computed again to go on.

A page holds the rows of layers that keep their whole context. Layers with a window keep theirs in a
request's slot, and at a page boundary a sequence goes on from the last rows of each. Three strategies
say how many of these are stored with the pages (:class:`Kind`).

**Why ``none`` needs window x layers tokens.** The row of a token in one layer is computed from what the
layer below gave for it, which has looked at ``W - 1`` tokens before it; so each layer with a window
reaches ``W - 1`` tokens further back. Computing begins with nothing before it, and layer by layer
``W - 1`` more of its first rows are wrong. After ``sum(W - 1)`` tokens, the *reach*, the last ``W - 1``
rows are right in every layer, and they are what the next token sees. Layers that page do not add to it:
their rows are there, for every token. They are to be read as they are, for what is computed anew for
tokens inside the reach is wrong in them, too.

A window is told by the rows of a layer's arena planes, the most of them. Other state of fewer rows (the
overlap of DeepSeek-V4's CSA) is stored and computed along with it. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from .geometry import Geometry, Plane, Tier

CHECKPOINT_TOKENS = 2048  # between states where nothing is said, rounded up to whole pages


class Kind(Enum):
    """How windows are stored. Values are those of ``swa_persistence``."""

    FULL = "full"  # rows of every token that a page boundary may want: nothing is computed again
    CHECKPOINT = "checkpoint"  # the rows at some page boundaries: computed again from the last one
    NONE = "none"  # nothing: computed again from the reach


@dataclass(frozen=True, slots=True)
class Strategy:
    """A kind and its interval. Rows are stored at multiples of ``every_tokens``; at none if it is 0."""

    kind: Kind
    every_tokens: int

    @classmethod
    def of(cls, kind: Kind, *, page_tokens: int, checkpoint_tokens: int | None = None) -> Strategy:
        """For pages of that size; ``checkpoint_tokens`` None for about :data:`CHECKPOINT_TOKENS`.

        Raises ValueError where ``checkpoint_tokens`` is not a positive number of whole pages.
        """
        if checkpoint_tokens is None:
            checkpoint_tokens = -(-CHECKPOINT_TOKENS // page_tokens) * page_tokens
        if checkpoint_tokens < 1 or checkpoint_tokens % page_tokens:
            nearest = max(1, round(checkpoint_tokens / page_tokens)) * page_tokens
            raise ValueError(
                f"swa_checkpoint_tokens {checkpoint_tokens}: states are taken where a page of "
                f"{page_tokens} tokens ends, so it must be a multiple of that; use {nearest}"
            )
        every = {Kind.FULL: page_tokens, Kind.CHECKPOINT: checkpoint_tokens, Kind.NONE: 0}
        return cls(kind, every[kind])

    def keeps(self, boundary: int) -> bool:
        """Whether rows are stored at that page boundary."""
        return self.every_tokens > 0 and boundary > 0 and boundary % self.every_tokens == 0

    def last_kept(self, boundary: int) -> int:
        """The last boundary up to that one at which rows are stored; 0 for the beginning."""
        return boundary // self.every_tokens * self.every_tokens if self.every_tokens else 0

    def stored(self, plane: Plane, boundary: int) -> range:
        """Tokens whose rows of an arena plane are stored at a boundary that is kept.

        Those that no boundary before has stored, as far as one from here on may want them: all of the
        interval, or a window's worth where the window is shorter.
        """
        assert self.keeps(boundary) and boundary % plane.tokens == 0
        return range(boundary - min(self.every_tokens, plane.rows * plane.tokens), boundary)

    def bytes_at_boundary(self, geometry: Geometry) -> int:
        """Size of what is stored at each boundary that is kept."""
        if not self.every_tokens:
            return 0
        return sum(
            len(self.stored(plane, self.every_tokens)) // plane.tokens * plane.row_bytes
            for _, plane in kept_planes(geometry)
        )

    def bytes_per_token(self, geometry: Geometry) -> Fraction:
        """Of a token's share in them, all layers of one rank."""
        return Fraction(self.bytes_at_boundary(geometry), self.every_tokens or 1)


@dataclass(frozen=True, slots=True)
class Restore:
    """How to go on from ``boundary``: put back the rows at ``kept_at``, compute the rest again."""

    boundary: int
    kept_at: int  # whose rows are put back: at most a window before it in each plane; 0 for none
    compute_from: int  # first token to compute again, with nothing but those rows before it

    @property
    def tokens(self) -> int:
        """To compute again."""
        return self.boundary - self.compute_from

    @property
    def from_nothing(self) -> bool:
        """Whether the first tokens computed miss what stood before them.

        Their rows are wrong but for the first layer's, and must not be found afterwards: all before
        ``boundary`` less the window, without the token that looks back.
        """
        return self.compute_from > self.kept_at == 0

    def restored(self, plane: Plane) -> range:
        """Tokens whose rows of an arena plane are put back.

        All are stored at ``kept_at``, or where the interval is shorter than the window at the kept
        boundaries before it.
        """
        return range(max(0, self.kept_at - plane.rows * plane.tokens), self.kept_at)


def window_of(planes: tuple[Plane, ...]) -> int:
    """Tokens that a layer with these arena planes sees, the one that looks included; 0 for no window."""
    return max((p.rows * p.tokens for p in planes if not p.transient), default=0)


def reach_of(geometry: Geometry) -> int:
    """Tokens before a boundary from which everything behind it can be computed; 0 without windows."""
    return sum(max(window_of(layer.arena) - 1, 0) for layer in geometry.layers)


def kept_planes(geometry: Geometry) -> Iterator[tuple[int, Plane]]:
    """Arena planes that a boundary needs, with their layers: without groups in the making."""
    return ((n, plane) for n, plane in geometry.planes(Tier.ARENA) if not plane.transient)


def plan_restore(
    strategy: Strategy, boundary: int, *, reach: int, last_kept: int | None = None
) -> Restore:
    """The way to go on from a page boundary that computes least, and of equal ones reads nothing.

    ``last_kept`` is the last boundary whose rows can be had where that is not what the strategy says
    (damaged, dropped); 0 for none. One that lies before the reach is of no use.
    """
    if last_kept is None:
        last_kept = strategy.last_kept(boundary)
    assert 0 <= last_kept <= boundary
    from_nothing = max(0, boundary - reach)
    if from_nothing < last_kept:
        return Restore(boundary, last_kept, last_kept)
    return Restore(boundary, 0, from_nothing)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a strategy costs a model on one rank, in a context longer than interval and reach."""

    strategy: str
    every_tokens: int  # 0: never
    bytes_per_token: Fraction
    times_paged: Fraction | None  # that, by what pages hold of a token; None where nothing is paged
    restored_bytes: int  # put back at most for one restore
    most_tokens: int  # computed again for a restore at the worst boundary
    mean_tokens: Fraction  # the same over all page boundaries


def costs(geometry: Geometry, *, checkpoint_tokens: int | None = None) -> tuple[Cost, ...]:
    """Of all three strategies; none for a model without windows. Raises ValueError as Strategy.of."""
    page, reach = geometry.page_tokens, reach_of(geometry)
    every = [Strategy.of(k, page_tokens=page, checkpoint_tokens=checkpoint_tokens) for k in Kind]
    if not any(True for _ in kept_planes(geometry)):
        return ()
    return tuple(_cost(geometry, strategy, reach) for strategy in every)


def _cost(geometry: Geometry, strategy: Strategy, reach: int) -> Cost:
    page, size = geometry.page_tokens, strategy.bytes_per_token(geometry)
    most, mean = reach, Fraction(reach)
    if strategy.every_tokens:
        # Boundaries of an interval lie 0, 1, 2 ... pages behind its state; from `near` on they lie as
        # far as the reach or further.
        boundaries = strategy.every_tokens // page
        near = min(boundaries, -(-reach // page))
        most = min(strategy.every_tokens - page, reach)
        mean = Fraction(page * near * (near - 1) // 2 + (boundaries - near) * reach, boundaries)
    return Cost(
        strategy=strategy.kind.value,
        every_tokens=strategy.every_tokens,
        bytes_per_token=size,
        times_paged=size / geometry.bytes_per_token if geometry.bytes_per_token else None,
        restored_bytes=geometry.boundary_bytes if strategy.every_tokens else 0,
        most_tokens=most,
        mean_tokens=mean,
    )
