"""Agents with tool definitions in varying order: each definition is a span.

    python -m benchmarks.tools [--quick] [--json] [--model DIR]

Agents arrive together, each with 5 to 40 definitions of a common set of 40, in an order of its own, on
stock's prefix tree and on Tessera, in turns; then the same with 5, 20 and 40 each. Definitions are
short: of some four pages the first is computed in place, and what does not fill a page is not shared,
so less is saved than on documents. The check is that Tessera never computes more than stock does.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from .report import Check, Report, Table, argument_parser
from .serving import progress, servers, table
from .serving.compare import Comparison, compare, runs
from .workloads import tools
from .workloads.jsonl import tokenizer
from .workloads.tools import Shape

MIXED = "5 to 40 tools"
SHAPES = {
    MIXED: Shape(),
    "5 tools": Shape(tools_per_agent=(5, 5)),
    "20 tools": Shape(tools_per_agent=(20, 20)),
    "40 tools": Shape(tools_per_agent=(40, 40)),
}
QUICK_SHAPES = {MIXED: Shape(agents=6)}
ROUNDS, QUICK_ROUNDS = 3, 1
POOL_TOKENS = 262_144
WARM_UP = Shape(agents=4, tools_per_agent=(5, 5))


def main() -> int:
    """Measure and report; 0 if all checks hold."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, default=servers.MODEL)
    parser.add_argument("--rounds", type=int, help=f"of {MIXED}; the others run once")
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    shapes = QUICK_SHAPES if options.quick else SHAPES
    encode, _ = tokenizer(options.model)
    total = runs(rounds + len(shapes), warm_up=False)
    with servers.both(options.model, POOL_TOKENS) as urls, progress.bar(total) as bar:

        def measured(name: str, shape: Shape, rounds: int) -> Comparison:
            made = partial(tools.requests, shape, encode)
            return compare(
                urls, options.model, made, rounds=rounds, bar=bar, label=name, warm_up=False
            )

        measured("warm-up", WARM_UP, 1)
        found = {
            name: measured(name, shape, rounds if name == MIXED else 1)
            for name, shape in shapes.items()
        }
    return _report(found, shapes).emit(as_json=options.json, save=options.save)


def _report(found: dict[str, Comparison], shapes: dict[str, Shape]) -> Report:
    rows = []
    for name, one in found.items():
        ratios = [one.ratio(figure) for figure in ("computed_tokens", "held_tokens", "wall_s")]
        rows.append(
            (
                name,
                len(one.stock),
                round(one.median("tessera", "prompt_tokens")),
                *(f"{ratio:.3f}" if ratio else "-" for ratio in ratios),
                f"{one.median('tessera', 'span_hit_share'):.1%}",
                f"{one.median('stock', 'cached_share'):.1%}",
            )
        )
    columns = ("each agent has", "rounds", "prompt tokens", "computed", "pool held", "wall")
    ratios_table = Table("Tessera / stock", (*columns, "span hits, tessera", "cached, stock"), rows)
    return Report(
        "tools",
        settings={name: asdict(shape) for name, shape in shapes.items()},
        checks=[
            Check.at_most(
                f"{name}: tokens computed, tessera / stock", one.ratio("computed_tokens"), 1
            )
            for name, one in found.items()
        ],
        figures={name: table.figures(one) for name, one in found.items()},
        tables=[table.compared(MIXED, found[MIXED]), ratios_table],
        notes=[
            "Computed counts everything that ran: definitions, their first pages again, the root."
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
