"""The simulated ways of the quality benchmark: KV that is moved is worth what computed KV is."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from models import write_llama, write_mla
from oracle import OracleRequest, greedy, load_model

from benchmarks.quality.cases import Context, Donor, Question
from benchmarks.quality.comparison import moved, span_parts
from benchmarks.quality.simulated import Moved, Simulator

PAGE = 64
STEPS = 4
CLOSE = 1e-4  # nats


def _tokens(count: int, chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(10, 500) for _ in range(count))


def _context(chance: random.Random) -> Context:
    """Two documents with a gap, and a donor that has them in another order behind other things."""
    one, two = _tokens(200, chance), _tokens(150, chance)
    before, gap, other = _tokens(30, chance), _tokens(7, chance), _tokens(90, chance)
    return Context(
        seed=0,
        tokens=before + one + gap + two,
        documents=((30, 230), (237, 387)),
        document_bytes=0,
        questions=(Question("any", _tokens(9, chance), ()),),
        donor=Donor(other + two + one, ((240, 440), (90, 240))),
    )


@pytest.fixture(scope="module", params=[write_mla, write_llama], ids=["mla", "gqa"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Simulator]:
    write: Callable[[Path], Path] = request.param
    path = write(tmp_path_factory.mktemp(write.__name__))
    return path, Simulator.load(path)


@pytest.mark.parametrize(("link_pages", "root_pages"), [(0, 0), (1, 1)])
def test_simulated_spans_are_those_of_the_oracle(
    model: tuple[Path, Simulator], link_pages: int, root_pages: int
) -> None:
    path, simulator = model
    chance = random.Random(link_pages)
    context, root = _context(chance), _tokens(root_pages * PAGE, chance)
    question = context.questions[0].tokens
    wanted = greedy(
        load_model(path),
        OracleRequest([*context.tokens, *question], list(context.documents)),
        page_size=PAGE,
        link_pages=link_pages,
        root=root,
        steps=STEPS,
    )
    parts = span_parts(simulator, context, root, link_pages, PAGE)
    cache = simulator.assembled(context.tokens, parts)
    for _ in range(2):  # scoring leaves the cache as it was
        scored = simulator.score(cache, question, wanted.tokens, of=wanted.tokens)
        assert scored.chosen == pytest.approx(wanted.chosen_logprobs, abs=CLOSE)
        assert [max(top, key=top.__getitem__) for top in scored.top] == wanted.tokens
        assert [of[t] for of, t in zip(scored.of, wanted.tokens, strict=True)] == list(
            scored.chosen
        )


def test_reused_is_full_attention_where_nothing_else_stood_before(
    model: tuple[Path, Simulator],
) -> None:
    """And only there: another preamble is seen through the reused KV."""
    _, simulator = model
    chance = random.Random(5)
    context = _context(chance)
    question, answer = context.questions[0].tokens, _tokens(STEPS, chance)

    def logprobs(parts: list[Moved]) -> tuple[float, ...]:
        cache = simulator.assembled(context.tokens, parts)
        assert cache.get_seq_length() == len(context.tokens)
        return simulator.score(cache, question, answer, of=answer).chosen

    full = logprobs([])
    itself = simulator.computed(context.tokens)
    same = logprobs([Moved(itself, start, end, to=start) for start, end in context.documents])
    assert same == pytest.approx(full, abs=CLOSE)
    donor = simulator.computed(context.donor.tokens)
    for share in (0.0, 0.15):
        assert logprobs(list(moved(context, donor, share))) != pytest.approx(full, abs=100 * CLOSE)
    assert logprobs(list(moved(context, donor, 1.0))) == pytest.approx(full, abs=CLOSE)


def test_the_first_tokens_of_every_document_are_recomputed() -> None:
    context = _context(random.Random(6))
    none, some = ([*moved(context, None, share)] for share in (0.0, 0.15))
    assert [(part.to, part.end - part.start) for part in none] == [(30, 200), (237, 150)]
    assert [(part.to, part.end - part.start) for part in some] == [(60, 170), (260, 127)]
    for part in (*none, *some):
        size = part.end - part.start
        taken = context.donor.tokens[part.start : part.end]
        assert taken == context.tokens[part.to : part.to + size]
