"""Real head shapes: DeepSeek-V2-Lite, DeepSeek-V3 and Kimi-K2, on SGLang's prefix tree and with Tessera.

    python -m benchmarks.head_shapes [--quick] [--json] [--save]

Four agents arrive together with one document of 1,024 tokens behind preambles of their own. The models
have random weights and one or two layers (`benchmarks.models`), with the heads, latents and hidden sizes
of those they are named after: what is compared is the time of attention and projections of that shape. A
whole model adds experts and layers, to both sides alike. The wide ones have one round, for a layer of
that width is half a minute of work for a CPU: read the ratios, not the seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.report import Check, Report, Table, argument_parser
from benchmarks.serving import servers, table
from benchmarks.serving.compare import Comparison, compare, runs
from benchmarks.serving.progress import bar
from benchmarks.workloads import multi_agent
from benchmarks.workloads.jsonl import tokenizer
from benchmarks.workloads.multi_agent import Shape
from tessera_sglang.bench.sides import STOCK, TESSERA
from tessera_sglang.demo.client import generate

if TYPE_CHECKING:
    from tqdm import tqdm

WORKLOAD = Shape(agents=4, document_tokens=1024, output_tokens=4)
QUICK = Shape(agents=2, document_tokens=256, output_tokens=2)
POOL_TOKENS = 16_384
CONTEXT_TOKENS = 4096  # rows of the server's table are as long
ROUNDS = {"deepseek-v2-lite": 3, "deepseek-v3": 1, "kimi-k2": 1}  # a wide one takes half a minute
WARM_UP = range(2, 98)  # token ids of a prompt that nobody else sends
BAR = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 0 if Tessera computes less and takes less time for every model."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--models", nargs="+", choices=models.HEAD_SHAPES, default=None)
    parser.add_argument("--rounds", type=int, help="of each side and model")
    options = parser.parse_args(arguments)
    names = options.models or (models.HEAD_SHAPES[:1] if options.quick else models.HEAD_SHAPES)
    often = 1 if options.quick else options.rounds
    rounds = {name: often or ROUNDS[name] for name in names}
    shape = QUICK if options.quick else WORKLOAD
    folders = {name: models.ready(name) for name in names}
    with bar(sum(runs(often, warm_up=False) for often in rounds.values())) as moving:
        found = {
            name: _measure(name, at, shape, rounds[name], moving) for name, at in folders.items()
        }
    return _report(found, shape, rounds).emit(as_json=options.json, save=options.save)


def _measure(name: str, model: Path, shape: Shape, rounds: int, moving: tqdm[Any]) -> Comparison:
    moving.set_description(f"{name}: starting two servers")
    encode, _ = tokenizer(model)
    arguments = ("--context-length", str(CONTEXT_TOKENS))
    with servers.both(model, POOL_TOKENS, arguments) as urls:
        for url in urls.values():
            generate(url, WARM_UP, (), 2)
        return compare(
            urls,
            model,
            partial(multi_agent.requests, shape, encode),
            rounds=rounds,
            bar=moving,
            label=name,
            warm_up=False,
        )


def _report(found: dict[str, Comparison], shape: Shape, rounds: dict[str, int]) -> Report:
    checks = [
        Check.below(f"{name}: {what}, tessera / stock", one.ratio(figure), BAR)
        for name, one in found.items()
        for figure, what in (("computed_tokens", "tokens computed"), ("wall_s", "wall time"))
    ]
    figures = {
        name: {"shape": _attention(name), **table.figures(one)} for name, one in found.items()
    }
    return Report(
        "head_shapes",
        settings={"shape": shape, "rounds": rounds},
        checks=checks,
        figures={"models": figures},
        tables=[_table(found)],
        notes=[_NOTE],
    )


def _attention(name: str) -> dict[str, object]:
    shape = models.SHAPES[name]
    names = ("layers", "hidden", "heads", "query_rank", "latent", "rope", "nope", "value")
    return {field: getattr(shape, field) for field in names}


def _table(found: dict[str, Comparison]) -> Table:
    rows = []
    for name, one in found.items():
        shape = models.SHAPES[name]
        rows.append(
            (
                name,
                shape.heads,
                shape.hidden,
                shape.layers,
                len(one.stock),
                *(round(one.median(side, "computed_tokens")) for side in (STOCK, TESSERA)),
                *(one.median(side, "wall_s") for side in (STOCK, TESSERA)),
                *(one.median(side, "ttft_p50_s") for side in (STOCK, TESSERA)),
                one.ratio("wall_s"),
            )
        )
    columns = (
        *("model's heads", "heads", "hidden", "layers", "rounds"),
        *(f"computed, {side}" for side in (STOCK, TESSERA)),
        *(f"wall s, {side}" for side in (STOCK, TESSERA)),
        *(f"TTFT p50 s, {side}" for side in (STOCK, TESSERA)),
        "wall, tessera / stock",
    )
    return Table("Real head shapes, medians of rounds in turns", columns, rows)


_NOTE = (
    "Random weights, one or two layers, no experts, vocabulary of 264 bytes; hidden size, heads, "
    "latents, query rank and rotary settings are the real ones."
)


if __name__ == "__main__":
    sys.exit(main())
