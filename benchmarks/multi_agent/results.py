"""What was measured for every shape, and the report that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.report import Check, Report, Table
from benchmarks.serving import bound, servers, table
from benchmarks.serving.compare import Comparison
from benchmarks.workloads.multi_agent import Shape
from tessera_sglang.bench.sides import STOCK, TESSERA

BARS = {
    "computed_tokens": ("tokens computed", 1 / 9),
    "wall_s": ("wall time", 1 / 8),
    "held_tokens": ("pool tokens held", 1 / 9),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A shape, what was measured for it, and what the first round's requests come to by counting."""

    shape: Shape
    found: Comparison
    stock_work: bound.Work
    tessera_work: bound.Work

    def work(self, side: str) -> bound.Work:
        """Of one side."""
        return self.stock_work if side == STOCK else self.tessera_work

    @property
    def times(self) -> float:
        """How often Tessera's wall time goes into stock's."""
        return self.found.median(STOCK, "wall_s") / self.found.median(TESSERA, "wall_s")


def report(claim: Cell, cells: Sequence[Cell], quick: bool) -> Report:
    everything = [claim, *cells]
    cost = bound.fit(
        [cell.stock_work for cell in everything],
        [cell.found.median(STOCK, "wall_s") for cell in everything],
    )
    title = f"{claim.shape.agents} agents, one document of {claim.shape.document_tokens:,} tokens"
    return Report(
        "multi_agent",
        settings={"shape": asdict(claim.shape), "quick": quick},
        checks=[
            Check.at_most(f"{name}, tessera / stock", claim.found.ratio(figure), bar)
            for figure, (name, bar) in BARS.items()
        ],
        figures={
            "claim": table.figures(claim.found),
            "cost": asdict(cost),
            "surface": [_figures(cell, cost) for cell in everything],
        },
        tables=[
            table.compared(title, claim.found),
            _surface(everything, cost),
            _parts(everything, cost),
        ],
        notes=_notes(cost),
    )


def _predicted(cell: Cell, cost: bound.Cost) -> float:
    return cost.of(cell.stock_work) / cost.of(cell.tessera_work)


def _by_tokens(cell: Cell) -> float:
    return cell.stock_work.tokens / cell.tessera_work.tokens


def _figures(cell: Cell, cost: bound.Cost) -> dict[str, object]:
    return {
        "agents": cell.shape.agents,
        "document_tokens": cell.shape.document_tokens,
        "rounds": len(cell.found.stock),
        "wall_stock_by_tessera": cell.times,
        "computed_stock_by_tessera": 1 / (cell.found.ratio("computed_tokens") or float("nan")),
        "bound_by_tokens": _by_tokens(cell),
        "bound_by_tokens_and_pairs": _predicted(cell, cost),
        "work": {side: asdict(cell.work(side)) for side in servers.SIDES},
        "compared": table.figures(cell.found),
    }


def _surface(cells: Sequence[Cell], cost: bound.Cost) -> Table:
    rows = []
    for cell in cells:
        computed = cell.found.ratio("computed_tokens")
        rows.append(
            (
                cell.shape.agents,
                cell.shape.document_tokens,
                len(cell.found.stock),
                *(f"{cell.found.median(side, 'wall_s'):.2f}" for side in servers.SIDES),
                f"{_by_tokens(cell):.2f}",
                f"{1 / computed:.2f}" if computed else "-",
                f"{_predicted(cell, cost):.2f}",
                f"{cell.times:.2f}",
                f"{cell.times / _predicted(cell, cost):.2f}",
            )
        )
    columns = (
        *("agents", "document", "rounds", "stock, s", "tessera, s"),
        *("by counting tokens", "tokens computed", "by tokens, pairs, requests", "wall time"),
        "of the last bound",
    )
    return Table("Stock / Tessera, medians: how often better", columns, rows)


def _parts(cells: Sequence[Cell], cost: bound.Cost) -> Table:
    rows = []
    for cell in cells:
        for side in servers.SIDES:
            work, wall = cell.work(side), cell.found.median(side, "wall_s")
            parts = (
                cost.token_s * work.tokens,
                cost.pair_s * work.pairs,
                cost.request_s * work.requests,
            )
            rows.append(
                (
                    cell.shape.agents if side == STOCK else "",
                    cell.shape.document_tokens if side == STOCK else "",
                    side,
                    work.tokens,
                    f"{work.pairs / 1e6:,.1f}",
                    *(f"{part:.2f}" for part in parts),
                    f"{wall - sum(parts):.2f}",
                    f"{wall:.2f}",
                )
            )
    columns = (
        *("agents", "document", "side", "tokens", "million pairs"),
        *("for tokens, s", "for pairs, s", "for requests, s", "rest, s", "wall, s"),
    )
    return Table("Where the time goes", columns, rows)


def _notes(cost: bound.Cost) -> list[str]:
    return [
        f"Fitted to stock's runs: {cost.token_s * 1e6:.0f} µs a token, {cost.pair_s * 1e9:.2f} ns a "
        f"pair, {cost.request_s * 1e3:.1f} ms a request, decoding included. Tessera's rest is what "
        "these do not explain: attention in parts that are merged, a span's prefill before its "
        "readers', passes that are not full.",
        "By counting tokens: every prompt whole, against the document and the root once and of each "
        "prompt what is not shared: preamble, linked page, question. Pairs: those tokens see the "
        "whole document.",
        "All agents arrive together, on an empty cache. Cells with many tokens ran once.",
    ]
