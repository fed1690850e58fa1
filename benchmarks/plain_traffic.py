"""Plain traffic through the server: the content index against SGLang's own tree.

    python -m benchmarks.plain_traffic [--quick] [--json] [--model DIR]

Two servers with ``--attention-backend tessera``, one with the content index and one with
``{"index": "radix"}``, get the same requests from ``sglang.benchmark.serving``, in turns, as in
``tessera-sglang bench --ab``: prompts that share long beginnings, and random ones. The compared figure
is output plus input tokens a second, the median of all rounds. Nobody declares spans, so this is what
Tessera costs those who do not use it; on a CPU both sides run the same attention kernel, on a GPU both
run SGLang's.

The example model is tiny, so the scheduler, and with it the index, is most of what is measured: a model
of any size hides differences that show here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tessera_sglang.bench.client import drive
from tessera_sglang.bench.metrics import Metrics
from tessera_sglang.bench.rounds import Opener, in_turns
from tessera_sglang.bench.sides import STOCK, TESSERA, Launch, running, started
from tessera_sglang.bench.summary import THROUGHPUT, Side, gain
from tessera_sglang.config import VARIABLE

from .report import ROOT, Check, Report, Table, argument_parser, progress

SIDES = {"content": TESSERA, "radix": STOCK}
BAR = 0.99
POOL_TOKENS = 131_072
ROUNDS, QUICK_ROUNDS = 5, 2
QUICK_SHARE = 4  # a quick round has a quarter of the prompts

WORKLOADS = {
    "shared prefixes": (
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "8"),
        *("--gsp-prompts-per-group", "{prompts}", "--gsp-system-prompt-len", "1024"),
        *("--gsp-question-len", "128", "--gsp-output-len", "32"),
    ),
    "random": (
        *("--dataset-name", "random-ids", "--num-prompts", "{prompts}"),
        *("--random-input-len", "768", "--random-output-len", "32", "--random-range-ratio", "0.5"),
    ),
}
PROMPTS = {"shared prefixes": 8, "random": 48}  # of a group; in all


def main() -> int:
    """Measure and report; 0 if the bar is met."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/tiny-mla")
    parser.add_argument("--rounds", type=int, help="of each side and workload")
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    os.environ.pop(VARIABLE, None)  # both sides have all else by default
    launch = Launch(str(options.model), POOL_TOKENS)
    with ExitStack() as stack:
        servers: dict[str, Opener] = {}
        for name, side in SIDES.items():
            server = stack.enter_context(started(launch, side))
            servers[name] = partial(running, server.url)
        measured = {
            workload: in_turns(
                servers, rounds, partial(_drive, options.model, workload, rounds, options.quick)
            )
            for workload in WORKLOADS
        }
    return _report(measured, rounds).emit(as_json=options.json, save=options.save)


def _drive(
    model: Path, workload: str, rounds: int, quick: bool, side: str, url: str, number: int
) -> Metrics:
    """One round on an empty cache."""
    progress(f"{workload}: round {number + 1} of {rounds}, {side}")
    prompts = PROMPTS[workload] // (QUICK_SHARE if quick else 1)
    arguments = [argument.format(prompts=prompts) for argument in WORKLOADS[workload]]
    command = (
        *("--backend", "sglang", "--model", str(model), "--tokenizer", str(model)),
        *("--max-concurrency", "8", *arguments),
    )
    return drive(url, command, seed=number + 1)


def _report(measured: Mapping[str, Mapping[str, list[Metrics]]], rounds: int) -> Report:
    checks, rows, figures = [], [], {}
    for workload, found in measured.items():
        content, radix = (Side(name, tuple(found[name])) for name in SIDES)
        ratio = gain(radix, content, THROUGHPUT)
        checks.append(Check.at_least(f"{workload}: throughput, content / radix", ratio, BAR))
        medians = (round(side.median(THROUGHPUT) or 0) for side in (content, radix))
        spreads = (f"{side.spread(THROUGHPUT) or 0:.0%}" for side in (content, radix))
        rows.append((workload, *medians, f"{ratio or 0:.3f}", *spreads))
        figures[workload] = {side.name: side.values(THROUGHPUT) for side in (content, radix)}
    columns = ("workload", *SIDES, "ratio", "spread", "spread")
    table = Table(f"Tokens a second, medians of {rounds} rounds in turns", columns, rows)
    return Report(
        "plain_traffic",
        checks=checks,
        figures={"tokens_per_s": figures, "rounds": rounds},
        tables=[table],
    )


if __name__ == "__main__":
    sys.exit(main())
