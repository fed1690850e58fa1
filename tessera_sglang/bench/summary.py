"""Rounds of one side or two: medians, spread, and what one side gains over the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .metrics import Metrics

# Tokens that arrive in one piece have no time between them: less than this was not measured.
LEAST_TIME_S = 1e-4


@dataclass(frozen=True, slots=True)
class Figure:
    """A compared figure: a field of `Metrics`, its heading, and whether more of it is better."""

    name: str
    heading: str
    more_is_better: bool


THROUGHPUT = Figure("throughput_tokens_per_s", "tokens/s", True)
CACHED = Figure("cached_share", "cached", True)
FIGURES = (
    THROUGHPUT,
    Figure("output_tokens_per_s", "output/s", True),
    Figure("ttft_p50_s", "TTFT p50", False),
    Figure("ttft_p99_s", "TTFT p99", False),
    Figure("itl_p50_s", "ITL p50", False),
    Figure("tpot_p50_s", "TPOT p50", False),
    CACHED,
)


@dataclass(frozen=True, slots=True)
class Side:
    """All counted rounds of one side."""

    name: str
    rounds: tuple[Metrics, ...]

    def values(self, figure: Figure) -> list[float]:
        """The figure in each round, without those that do not have it."""
        found = [getattr(one, figure.name) for one in self.rounds]
        least = float("-inf") if figure.more_is_better else LEAST_TIME_S
        return [value for value in found if value is not None and value >= least]

    def median(self, figure: Figure) -> float | None:
        """Over the rounds; None where no round has the figure."""
        values = self.values(figure)
        return statistics.median(values) if values else None

    def spread(self, figure: Figure) -> float | None:
        """Largest by smallest round, less 1; None for fewer than two rounds or a smallest of 0."""
        values = self.values(figure)
        if len(values) < 2 or not min(values):
            return None
        return max(values) / min(values) - 1


def gain(stock: Side, tessera: Side, figure: Figure) -> float | None:
    """Median by median, above 1 where Tessera is better; None where one of them is missing or 0.

    Cached shares have no gain: stock's may be 0, and then any is infinitely better.
    """
    if figure is CACHED:
        return None
    before, after = stock.median(figure), tessera.median(figure)
    if not before or not after:
        return None
    return after / before if figure.more_is_better else before / after


def only(sides: Sequence[Side], name: str) -> Side:
    """The side of that name."""
    return next(side for side in sides if side.name == name)
