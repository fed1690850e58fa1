"""Which shapes are measured, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import multi_agent as package
from benchmarks.report import argument_parser
from benchmarks.serving import bound, progress, servers
from benchmarks.serving.compare import compare, runs
from benchmarks.serving.state import state_of
from benchmarks.workloads import multi_agent
from benchmarks.workloads.jsonl import tokenizer
from benchmarks.workloads.multi_agent import Shape
from tessera_sglang.bench.agents import Encode
from tessera_sglang.bench.sides import TESSERA

from .results import Cell, report

if TYPE_CHECKING:
    from tqdm import tqdm

CLAIM = Shape(agents=16, document_tokens=8192)
AGENTS, DOCUMENTS = (1, 4, 16, 64), (1024, 4096, 16384)
LARGEST = Shape(agents=64, document_tokens=16384)  # a million tokens: eight minutes of stock
QUICK_AGENTS, QUICK_DOCUMENTS = (4,), (2048,)
ROUNDS = 3
REPEATED_TOKENS = 20_000  # of all documents of a cell: larger ones run once
WARM_UP = Shape(agents=4, document_tokens=1024)
PER_REQUEST_TOKENS = 512  # preamble, question, answer, and a page that is not full
SEED = 1


@dataclass(frozen=True, slots=True)
class Bench:
    """Two running servers, and what is needed to ask them."""

    urls: servers.Urls
    model: Path
    encode: Encode
    geometry: bound.Geometry
    bar: tqdm[Any]

    def cell(self, shape: Shape, rounds: int) -> Cell:
        """Measure a shape. The servers have worked before, so there is no warm-up."""
        made = partial(multi_agent.requests, shape, self.encode)
        label = f"{shape.agents} x {shape.document_tokens:,}"
        found = compare(
            *(self.urls, self.model, made),
            rounds=rounds,
            bar=self.bar,
            label=label,
            warm_up=False,
            seed=SEED,
        )
        first = made(SEED)
        return Cell(shape, found, bound.whole(first), bound.shared(first, self.geometry))


def main() -> int:
    """Measure and report; 0 if all checks hold."""
    parser = argument_parser(package.__doc__ or "")
    parser.add_argument("--model", type=Path, default=servers.MODEL)
    parser.add_argument("--rounds", type=int, help="of the checked shape and of small cells")
    parser.add_argument("--largest", action="store_true", help="64 agents on 16k tokens too")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    agents, documents = (QUICK_AGENTS, QUICK_DOCUMENTS) if options.quick else (AGENTS, DOCUMENTS)
    grid = [Shape(agents=a, document_tokens=d) for d in documents for a in agents]
    shapes = [shape for shape in grid if shape != LARGEST or options.largest]
    repeats = [_repeats(shape, rounds) for shape in shapes]
    pool_tokens = max(_pool_tokens(shape) for shape in (CLAIM, *shapes))
    encode, _ = tokenizer(options.model)
    total = runs(1 + rounds + sum(repeats), warm_up=False)
    with servers.both(options.model, pool_tokens) as urls, progress.bar(total) as bar:
        state = state_of(urls[TESSERA])
        geometry = bound.Geometry(state.page_tokens, state.link_pages, state.root_tokens)
        bench = Bench(urls, options.model, encode, geometry, bar)
        bench.cell(WARM_UP, 1)
        claim = bench.cell(CLAIM, rounds)
        cells = [bench.cell(shape, n) for shape, n in zip(shapes, repeats, strict=True)]
    return report(claim, cells, options.quick).emit(as_json=options.json, save=options.save)


def _repeats(shape: Shape, rounds: int) -> int:
    return rounds if shape.agents * shape.document_tokens <= REPEATED_TOKENS else 1


def _pool_tokens(shape: Shape) -> int:
    return shape.agents * (shape.document_tokens + PER_REQUEST_TOKENS)
