"""The server answers what the Hugging Face model answers under the design's visibility.

Float32, both sides. Every request is asked cold after warm-up by others, warm, cold on its own, and
all together, which also shows that warm equals cold and that sixteen at once equal one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from models import VOCAB
from oracle import Greedy, OracleRequest, greedy, load_model, random_requests
from prompts import PAGE, ROOT, Prompt
from server import Answer, Server

REQUESTS = 30
STEPS = 16
FIRST_LOGPROB_TOLERANCE = 0.02
WARM_COLD_TOLERANCE = 1e-3

_DEFAULT = [("mla", 0, False), ("mla", 1, True), ("mla", 2, False)]
_DEFAULT += [("llama", 0, True), ("llama", 1, False), ("llama", 2, True)]
_SLOW = [
    (model, link, root)
    for model in ("mla", "llama")
    for link in (0, 1, 2)
    for root in (False, True)
    if (model, link, root) not in _DEFAULT
]
CASES = [*_DEFAULT, *(pytest.param(case, marks=pytest.mark.slow) for case in _SLOW)]


class Bench:
    """One server, its requests, and what the oracle says to them."""

    def __init__(self, server: Server, requests: list[OracleRequest], want: list[Greedy]) -> None:
        self.server = server
        self.items: list[Prompt] = [
            (list(r.prompt), [list(span) for span in r.spans]) for r in requests
        ]
        self.want = want

    def check(self, answers: list[Answer]) -> None:
        """Same tokens, same first log-probability, for every request."""
        for number, (answer, want) in enumerate(zip(answers, self.want, strict=True)):
            where = (
                f"request {number}: {len(self.items[number][0])} tokens, {self.items[number][1]}"
            )
            assert answer.tokens == list(want.tokens), where
            first = want.first_logprobs[answer.tokens[0]].item()
            assert abs(answer.logprobs[0] - first) < FIRST_LOGPROB_TOLERANCE, where
            assert answer.cached <= answer.prompt - 1, where


def _case_id(case: tuple[str, int, bool]) -> str:
    return f"{case[0]}-link{case[1]}-{'root' if case[2] else 'bare'}"


@pytest.fixture(scope="module", params=CASES, ids=_case_id)
def bench(request: pytest.FixtureRequest, mla_model: Path, llama_model: Path) -> Iterator[Bench]:
    name, link_pages, with_root = request.param
    path = mla_model if name == "mla" else llama_model
    root = ROOT if with_root else []
    seed = 10 * link_pages + with_root
    requests = random_requests(seed, REQUESTS, vocab=VOCAB, page_size=PAGE)
    model = load_model(path)
    want = [
        greedy(model, r, page_size=PAGE, link_pages=link_pages, root=root, steps=STEPS)
        for r in requests
    ]
    config = {"link_pages": link_pages, "span_root": root or "none"}
    with Server(path, config=config) as server:
        yield Bench(server, requests, want)


def test_one_by_one_and_warm_equals_cold(bench: Bench) -> None:
    bench.server.flush()
    first = [bench.server.generate(*item, steps=STEPS) for item in bench.items]
    bench.check(first)
    warm = [bench.server.generate(*item, steps=STEPS) for item in bench.items]
    bench.check(warm)
    assert sum(a.cached for a in warm) > sum(a.cached for a in first)
    cold = []
    for item in bench.items:
        bench.server.flush()
        cold.append(bench.server.generate(*item, steps=STEPS))
    bench.check(cold)
    for one, other in zip(warm, cold, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=WARM_COLD_TOLERANCE)


def test_all_at_once(bench: Bench) -> None:
    bench.server.flush()
    bench.check(bench.server.generate_all(bench.items, workers=REQUESTS, steps=STEPS))
    bench.check(bench.server.generate_all(bench.items, workers=REQUESTS, steps=STEPS))
