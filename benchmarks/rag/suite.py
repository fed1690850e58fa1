"""What is asked, of whom, and how often."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import rag as package
from benchmarks.report import argument_parser
from benchmarks.serving import progress, servers
from benchmarks.serving.replay import replay
from benchmarks.serving.servers import Urls
from benchmarks.serving.state import state_of
from benchmarks.workloads import rag
from benchmarks.workloads.jsonl import tokenizer
from benchmarks.workloads.rag import Shape
from tessera_sglang.bench.agents import Encode, Request
from tessera_sglang.bench.sides import STOCK, TESSERA
from tessera_sglang.config import PAGE_TOKENS
from tessera_sglang.demo.client import Answer, cache_state, flush
from tessera_sglang.inspection import VARIABLE as INSPECT

from . import spans
from .results import PARTS, Curve, Steady, report

if TYPE_CHECKING:
    from tqdm import tqdm

SEED = 1
ROOM_DOCUMENTS = 25
CORPUS_BY_POOL = 4
LOOK_EVERY = 5  # draws between two looks at the pool


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one run of the command."""

    steady: Shape
    steady_draws: int
    curve_draws: int
    stock_draws: int
    document_tokens: tuple[int, int]  # of the large corpus


FULL = Plan(
    Shape(documents=20, document_tokens=(256, 2048), documents_per_draw=(14, 14)),
    steady_draws=100,
    curve_draws=1000,
    stock_draws=100,
    document_tokens=(192, 320),
)
QUICK = Plan(
    Shape(documents=20, document_tokens=(128, 384), documents_per_draw=(14, 14)),
    steady_draws=40,
    curve_draws=50,
    stock_draws=10,
    document_tokens=(128, 256),
)


def main() -> int:
    """Measure and report; 0 if all checks hold."""
    parser = argument_parser(package.__doc__ or "")
    parser.add_argument("--model", type=Path, default=servers.MODEL)
    parser.add_argument("--draws", type=int, help="from the large corpus")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    encode, _ = tokenizer(options.model)
    corpus = rag.corpus(plan.steady, encode, SEED)
    steady_requests = drawn(plan.steady, plan.steady_draws, encode)
    pool_tokens = room(corpus, steady_requests)
    shape = large(plan, pool_tokens)
    requests = drawn(shape, options.draws or plan.curve_draws, encode)
    stock_requests = requests[: plan.stock_draws]
    total = len(steady_requests) + len(requests) + len(stock_requests)
    inspected = {INSPECT: "1", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    with (
        servers.both(options.model, pool_tokens, environment=inspected) as urls,
        progress.bar(total, "draw") as bar,
    ):
        steady = _steady(urls[TESSERA], corpus, steady_requests, bar)
        curve = Curve(
            shape,
            pool_tokens,
            sum(map(len, rag.corpus(shape, encode, SEED))),
            tuple(_asked(urls, TESSERA, requests, bar)),
            tuple(_asked(urls, STOCK, stock_requests, bar)),
        )
    return report(steady, curve).emit(as_json=options.json, save=options.save)


def room(corpus: Sequence[Sequence[int]], requests: Sequence[Request]) -> int:
    """Tokens of the pool: documents of the mean size, the root, and what one request has to itself."""
    mean = statistics.mean(len(document) for document in corpus)
    own = max(spans.own_tokens(request) for request in requests)
    return servers.whole_pages(int(ROOM_DOCUMENTS * mean) + own + 2 * PAGE_TOKENS)


def large(plan: Plan, pool_tokens: int) -> Shape:
    """A corpus of a multiple of the pool."""
    mean = statistics.mean(plan.document_tokens)
    return Shape(
        documents=round(CORPUS_BY_POOL * pool_tokens / mean),
        document_tokens=plan.document_tokens,
        documents_per_draw=(5, 5),
        popularity="zipf",
    )


def drawn(shape: Shape, draws: int, encode: Encode) -> list[Request]:
    """Three fifths that are new, and the first two of them once more."""
    part = draws // PARTS
    made = rag.requests(dataclasses.replace(shape, draws=3 * part), encode, SEED)
    return made + [_again(request) for request in made[: 2 * part]]


def _again(request: Request) -> Request:
    """The same documents behind another text as long, so that nothing else can be found again."""
    start = request.spans[0][0]
    before = request.input_ids[:start]
    return dataclasses.replace(request, input_ids=before[::-1] + request.input_ids[start:])


def _steady(
    url: str, corpus: Sequence[Sequence[int]], requests: Sequence[Request], bar: tqdm[Any]
) -> Steady:
    bar.set_description("steady, tessera")
    known = spans.digests(corpus)
    flush(url)
    answers: list[Answer] = []
    looks = [state_of(url)]
    stored = []
    for first in range(0, len(requests), LOOK_EVERY):
        some = requests[first : first + LOOK_EVERY]
        answers += replay(url, TESSERA, some, bar.update)
        stored.append(spans.stored_pages(cache_state(url), known))
        looks.append(state_of(url))
    prefix_hits = [look.prefix_hit_tokens or 0 for look in looks]
    return Steady(
        answers=tuple(answers),
        stored_pages=tuple(stored),
        corpus_pages=spans.shared_pages(corpus),
        corpus_tokens=sum(map(len, corpus)),
        prefix_hit_tokens=tuple(after - before for before, after in pairwise(prefix_hits)),
    )


def _asked(urls: Urls, side: str, requests: Sequence[Request], bar: tqdm[Any]) -> list[Answer]:
    bar.set_description(f"larger than the cache, {side}")
    flush(urls[side])
    return replay(urls[side], side, requests, bar.update)
