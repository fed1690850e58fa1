"""Which plot is drawn from which result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.saved import Saved

from . import multi_agent, quality, rag, traces

Draw = Callable[[Any, Saved], Any]  # pyplot, result -> figure


@dataclass(frozen=True, slots=True)
class Plot:
    """``title`` says in a sentence what is seen."""

    benchmark: str
    title: str
    draw: Draw


PLOTS = {
    "multi_agent": Plot(
        "multi_agent",
        "Stock's wall time by Tessera's over agents and document lengths, beside the token count",
        multi_agent.draw,
    ),
    "rag": Plot(
        "rag",
        "Hit rate over draws from a corpus larger than the cache, stock and Tessera",
        rag.draw,
    ),
    "quality": Plot(
        "quality",
        "Distance to full attention and right answers, by root and linked pages, for each model",
        quality.draw,
    ),
    "traces": Plot(
        "traces",
        "Share of prompt tokens served from the cache in each recorded session, stock and Tessera",
        traces.draw,
    ),
}
