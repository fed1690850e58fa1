"""Agents over one document: how many times less stock's wall time is, beside what counting promises.

Reads ``figures["surface"]``, a list of ``{"agents", "document_tokens", "wall_stock_by_tessera",
"bound_by_tokens"}``.
"""

from __future__ import annotations

from typing import Any

from benchmarks.saved import Saved

from .style import SERIES, TIMES


def draw(pyplot: Any, result: Saved) -> Any:
    """A colour for each document length: measured as a line, counted dashed."""
    cells = result.figures["surface"]
    figure, axes = pyplot.subplots(figsize=(8.0, 4.2))
    for number, tokens in enumerate(sorted({cell["document_tokens"] for cell in cells})):
        row = sorted(
            (cell for cell in cells if cell["document_tokens"] == tokens),
            key=lambda cell: int(cell["agents"]),
        )
        agents = [cell["agents"] for cell in row]
        colour = SERIES[number % len(SERIES)]
        walls = [cell["wall_stock_by_tessera"] for cell in row]
        axes.plot(agents, walls, "o-", color=colour, label=f"document of {tokens:,} tokens")
        axes.plot(agents, [cell["bound_by_tokens"] for cell in row], "--", color=colour, alpha=0.7)
    axes.plot([], [], "--", color=SERIES[0], alpha=0.7, label="by counting tokens")
    _logarithmic(axes, sorted({cell["agents"] for cell in cells}))
    axes.set_xlabel("agents that read the document, each behind a preamble of its own")
    axes.set_ylabel("stock / Tessera")
    axes.set_title("Wall time, and prompt tokens that have to be computed: how many times less")
    axes.legend(loc="upper left")
    return figure


def _logarithmic(axes: Any, agents: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(agents, [str(count) for count in agents])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}{TIMES}")
