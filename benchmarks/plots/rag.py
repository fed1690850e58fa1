"""Retrieval from a corpus that is larger than the cache: the hit rate along the draws.

Reads ``figures["curve"]``: ``draws_a_point``, and the hit rates ``tessera`` and ``stock``, one a point.
"""

from __future__ import annotations

from typing import Any

from benchmarks.saved import Saved

from .style import STOCK, TESSERA


def draw(pyplot: Any, result: Saved) -> Any:
    """Both sides over the draws."""
    curve = result.figures["curve"]
    width = curve["draws_a_point"]
    figure, axes = pyplot.subplots(figsize=(8.0, 3.4))
    for side, colour in (("tessera", TESSERA), ("stock", STOCK)):
        rates = curve[side]
        draws = [width * (number + 1) for number in range(len(rates))]
        axes.plot(draws, [100 * rate for rate in rates], "o-", color=colour, label=side)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"draws, {width} a point")
    axes.set_ylabel("% of prompt tokens cached")
    axes.set_title("Documents drawn by Zipf's law from a corpus four times the cache")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return figure
