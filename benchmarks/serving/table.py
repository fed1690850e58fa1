"""A comparison for readers and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report import Table
from tessera_sglang.bench.sides import STOCK, TESSERA

from .compare import Comparison
from .servers import SIDES

RATIO = "tessera / stock"


@dataclass(frozen=True, slots=True)
class Figure:
    """A field or property of `Run`, how it is headed and shown."""

    name: str
    heading: str
    shown: Callable[[float], object]
    compared: bool = True


def _count(value: float) -> object:
    return round(value)


def _share(value: float) -> object:
    return f"{value:.1%}"


def _time(value: float) -> object:
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


FIGURES = (
    Figure("prompt_tokens", "prompt tokens", _count),
    Figure("computed_tokens", "computed", _count),
    Figure("prefix_hit_share", "prefix hits", _share, compared=False),
    Figure("span_hit_share", "span hits", _share, compared=False),
    Figure("held_tokens", "pool tokens held", _count),
    Figure("wall_s", "wall", _time),
    Figure("throughput_tokens_per_s", "tokens/s", _count),
    Figure("ttft_p50_s", "TTFT p50", _time),
    Figure("ttft_p99_s", "TTFT p99", _time),
    Figure("itl_p50_s", "ITL p50", _time),
)


def compared(title: str, found: Comparison) -> Table:
    """A row for each figure: stock, Tessera, ratio, and the spread of each side."""
    rows = [_row(found, figure) for figure in FIGURES]
    columns = ("", *SIDES, RATIO, *(f"spread, {side}" for side in SIDES))
    return Table(f"{title}; medians of {len(found.stock)} rounds in turns", columns, rows)


def _row(found: Comparison, figure: Figure) -> Sequence[object]:
    medians = (figure.shown(found.median(side, figure.name)) for side in SIDES)
    if not figure.compared:
        return (figure.heading, *medians, "", "", "")
    ratio = found.ratio(figure.name)
    spreads = (f"{found.spread(side, figure.name):.0%}" for side in SIDES)
    return (figure.heading, *medians, "-" if ratio is None else f"{ratio:.4f}", *spreads)


def figures(found: Comparison) -> dict[str, object]:
    """Every round of both sides, medians and ratios."""
    return {
        "ratio": {figure.name: found.ratio(figure.name) for figure in FIGURES if figure.compared},
        **{
            side: {
                "median": {figure.name: found.median(side, figure.name) for figure in FIGURES},
                "rounds": [dataclasses.asdict(run) for run in found.runs(side)],
            }
            for side in (STOCK, TESSERA)
        },
    }
