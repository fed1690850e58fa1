"""What spans cost in quality, by root and linked pages.

Reads ``figures["rows"]``, those with ``by == "all"``: ``model``, ``setting`` (``auto/1``: root and
linked pages, or a name), ``root``, ``link_pages``, ``simulated``, ``right`` (what ``recall`` is),
``recall``, ``recall_spread``, ``kl``, ``kl_spread``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.quality.ways import DEFAULT
from benchmarks.saved import Saved

from .style import BOUND, SOFT, STOCK, TESSERA

Row = Mapping[str, Any]
_LEAST_KL = 1e-4  # of a logarithmic axis; full attention's may be 0


def draw(pyplot: Any, result: Saved) -> Any:
    """A line of panels for each model: KL, and right answers."""
    rows = [row for row in result.figures["rows"] if row["by"] == "all"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    most = max(sum(row["model"] == model for row in rows) for model in models)
    size = (9.0, (0.26 * most + 1.1) * len(models))
    figure, panels = pyplot.subplots(len(models), 2, figsize=size, sharey="row", squeeze=False)
    for line, model in zip(panels, models, strict=True):
        _model(line, [row for row in rows if row["model"] == model])
    figure.tight_layout()
    return figure


def _model(panels: Sequence[Any], rows: Sequence[Row]) -> None:
    rows = rows[::-1]  # the first one on top
    places = range(len(rows))
    colours = [_colour(row) for row in rows]
    kl, right = panels
    shown = [max(row["kl"], _LEAST_KL) for row in rows]
    spreads = _within([row["kl_spread"] for row in rows], shown)
    kl.barh(places, shown, xerr=spreads, color=colours, ecolor=SOFT)
    kl.set_xscale("log")
    kl.set_xlim(left=_LEAST_KL)
    kl.set_yticks(places, [_name(row) for row in rows])
    kl.set_title(f"{rows[0]['model']}\nKL to full attention, nats")
    recalls = [100 * row["recall"] for row in rows]
    errors = [100 * row["recall_spread"] for row in rows]
    right.barh(places, recalls, xerr=errors, color=colours, ecolor=SOFT)
    right.set_xlim(0, 105)
    right.set_title(f"\n{rows[0]['right']}, %")
    for panel in panels:
        panel.grid(visible=False, axis="y")


def _within(spreads: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    """Both ways, and never past what a logarithmic axis can show."""
    below = [min(spread, 0.99 * value) for spread, value in zip(spreads, values, strict=True)]
    return [below, list(spreads)]


def _colour(row: Row) -> str:
    if row["setting"] == DEFAULT:
        return TESSERA
    if row["simulated"]:
        return STOCK
    return "#86b3de" if row["root"] else BOUND


def _name(row: Row) -> str:
    if row["root"]:
        pages = row["link_pages"]
        return f"root {row['root']}, {pages} linked"
    return f"{row['setting']} (simulated)" if row["simulated"] else str(row["setting"])
