"""A tiny DeepSeek-V4 behind SGLang's scheduler answers what transformers answers (cases 11 to 14).

One server with chunks of two pages, which retracts requests on purpose while others run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from load import settle
from models import V4_VOCAB, write_v4
from server import Answer, RequestError, Server
from transformers import DeepseekV4ForCausalLM
from v4_oracle import PAGE, TIE, Talk, load_v4
from v4_span_oracle import Body
from v4_span_oracle import answer as answer_of

POOL_PAGES = 40
MOST_TIES = 0.01  # of all tokens

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v4(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def model(directory: Path) -> DeepseekV4ForCausalLM:
    return load_v4(directory)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    environment = {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "7",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    started = Server(
        directory,
        *("--chunked-prefill-size", "256", "--max-running-requests", "8"),
        pool_tokens=POOL_PAGES * PAGE,
        environment=environment,
    )
    with started:
        yield started


@pytest.fixture(autouse=True)
def _healthy(server: Server) -> Iterator[None]:
    server.flush()
    yield
    state = settle(server)
    assert server.alive()
    assert state["held_tokens"] == state["pages"]["sealed"] * PAGE, "nothing leaks"
    arena = state["arena"]
    assert arena["in_use"] == 0, "nobody runs"
    assert arena["evictable"] <= state["pages"]["sealed"], "states go with their pages"
    assert "Traceback" not in server.log()


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(V4_VOCAB) for _ in range(tokens)]


def ties(model: DeepseekV4ForCausalLM, prompt: list[int], answer: Answer) -> int:
    talk = Talk(model)
    talk.hear(prompt)
    return talk.check(answer.tokens)


def test_single_requests(server: Server, model: DeepseekV4ForCausalLM) -> None:
    rng = random.Random(1)
    for tokens in (1, 5, PAGE - 1, PAGE, PAGE + 1, 300, 2 * PAGE, 700):
        prompt = text(rng, tokens)
        answer = server.generate(prompt, steps=12)
        assert answer.cached == 0
        assert ties(model, prompt, answer) == 0


def test_fifty_turns_of_conversations(server: Server, model: DeepseekV4ForCausalLM) -> None:
    rng = random.Random(2)
    before = server.state()["traffic"]["prefix_hit"]
    hits = asked = off = 0
    for _ in range(10):
        talk = Talk(model)
        prompt: list[int] = []
        for _ in range(5):
            said = text(rng, rng.randrange(20, 260))
            prompt += said
            answer = server.generate(prompt, steps=rng.randrange(1, 16))
            talk.hear(said)
            off += talk.check(answer.tokens)
            prompt += answer.tokens
            hits += answer.cached
            asked += len(answer.tokens)
            assert answer.cached % PAGE == 0
    assert hits > 5000
    assert off <= MOST_TIES * asked
    state = server.state()
    assert state["traffic"]["prefix_hit"] - before == hits
    assert state["counters"]["evicted_pages"] > 0, "the pool is too small for all of them"


def test_every_boundary_of_a_prompt_can_be_gone_on_from(
    server: Server, model: DeepseekV4ForCausalLM
) -> None:
    """Case 11 through the server: in other slots, behind other requests."""
    rng = random.Random(3)
    document = text(rng, 8 * PAGE)
    server.generate(document, steps=1)
    for pages in rng.sample(range(1, 9), 8):
        prompt = document[: pages * PAGE] + text(rng, 40)
        answer = server.generate(prompt, steps=6)
        assert answer.cached == pages * PAGE
        assert ties(model, prompt, answer) == 0


@dataclass
class Document:
    """A span, whose first ``linked`` pages are computed in place, behind whole pages of a root."""

    tokens: list[int]
    linked: int
    root: list[int]


Part = Document | list[int]


def ask(server: Server, sequence: list[Part], asked: dict[str, Any]) -> Answer:
    prompt: list[int] = []
    spans = []
    for one in sequence:
        if isinstance(one, Document):
            spans.append([len(prompt), len(prompt) + len(one.tokens)])
        prompt += one.tokens if isinstance(one, Document) else one
    params = {"custom_params": {"tessera": {"spans": spans, **asked}}}
    return server.generate(prompt, steps=8, sampling=params)


def off_from_oracle(model: DeepseekV4ForCausalLM, sequence: list[Part], answer: Answer) -> int:
    """Each token is the oracle's best one, or as good; returns how many were not the best."""
    told: list[torch.Tensor | Body] = []
    for one in sequence:
        if isinstance(one, Document):
            whole, linked = len(one.tokens) // PAGE * PAGE, one.linked * PAGE
            body = torch.tensor(one.root + one.tokens[:whole])
            told += [
                torch.tensor(one.tokens[:linked], dtype=torch.int64),
                Body(model, body, len(one.root) + linked),
                torch.tensor(one.tokens[whole:], dtype=torch.int64),
            ]
        else:
            told.append(torch.tensor(one, dtype=torch.int64))
    told.append(torch.tensor(answer.tokens[:-1]))
    rows = answer_of(model, told)[-len(answer.tokens) :]
    off = 0
    for number, (row, token) in enumerate(zip(rows, answer.tokens, strict=True)):
        short = float(row.max() - row[token])
        assert short <= TIE, f"answer {number}: {token} is short by {short}"
        off += int(row.argmax()) != token
    return off


@pytest.mark.parametrize(("linked", "root_pages"), [(0, 0), (1, 0), (0, 1), (1, 2)])
def test_documents_read_the_same_wherever_they_stand(
    server: Server, model: DeepseekV4ForCausalLM, linked: int, root_pages: int
) -> None:
    """Cold, warm and moved; two documents in either order, one of them twice, and nothing before."""
    rng = random.Random(5 + linked)
    root = text(rng, root_pages * PAGE)
    document = Document(text(rng, 3 * PAGE + 20), linked, root)
    other = Document(text(rng, 2 * PAGE), linked, root)
    shared = (3 - linked) * PAGE
    rest = text(rng, 90)
    sequences: list[list[Part]] = [[text(rng, n), document, rest] for n in (0, 77, 300)]
    sequences += [[text(rng, 50), document, text(rng, 3), other, rest]]
    sequences += [[other, document, other, rest]]
    asked = {"link_pages": linked, "root": root or "none"}
    off = total = 0
    for number, sequence in enumerate(sequences):
        first, again = (ask(server, sequence, asked) for _ in range(2))
        assert again.tokens == first.tokens, "warm equals cold"
        assert np.array_equal(again.logprobs, first.logprobs)
        if number:
            assert first.cached >= shared
        else:  # nothing before it: its linked page is the body's own first one, where there is no root
            assert first.cached == (PAGE if linked and not root else 0)
        before = len(sequence[0]) // PAGE * PAGE if isinstance(sequence[0], list) else 0
        assert again.cached >= shared + before
        off += off_from_oracle(model, sequence, first)
        total += len(first.tokens)
    assert off <= MOST_TIES * total
    assert server.state()["spans"]["refused"] is None


def test_readers_together_with_retraction(server: Server, model: DeepseekV4ForCausalLM) -> None:
    rng = random.Random(9)
    documents = [Document(text(rng, rng.randrange(1, 5) * PAGE + 9), 0, []) for _ in range(6)]
    sequences: list[list[Part]] = []
    for _ in range(24):
        first, second = rng.sample(documents, 2)
        sequences.append([text(rng, rng.randrange(200)), first, second, text(rng, 30)])
    asked = {"link_pages": 0, "root": "none"}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda sequence: ask(server, sequence, asked), sequences))
    off = sum(off_from_oracle(model, *pair) for pair in zip(sequences, answers, strict=True))
    assert off <= MOST_TIES * sum(len(answer.tokens) for answer in answers)
    assert sum(answer.cached for answer in answers) > 24 * PAGE


def test_together_with_retraction_aborts_and_eviction(
    server: Server, model: DeepseekV4ForCausalLM
) -> None:
    rng = random.Random(4)
    shared = text(rng, 300)
    prompts = [
        (shared if number % 2 else []) + text(rng, rng.randrange(10, 500)) for number in range(30)
    ]
    victims = [shared + text(rng, 400) for _ in range(10)]
    gone: list[str] = []

    def abort(number: int, prompt: list[int]) -> None:
        rid = f"victim-{number}"
        threading.Timer(0.2 + 0.3 * number, server.abort, [rid]).start()
        try:
            server.generate(prompt, steps=400, rid=rid)
        except RequestError as error:
            gone.append(str(error))

    threads = [
        threading.Thread(target=abort, args=(number, prompt))
        for number, prompt in enumerate(victims)
    ]
    for thread in threads:
        thread.start()
    answers = server.generate_all([(prompt, None) for prompt in prompts], steps=24, workers=12)
    for thread in threads:
        thread.join()
    assert gone, "somebody was aborted on the way"
    off = sum(ties(model, *pair) for pair in zip(prompts, answers, strict=True))
    assert off <= MOST_TIES * sum(len(answer.tokens) for answer in answers)
    assert "Testing retraction" in server.log()
    assert sum(answer.cached for answer in answers) > 0
    time.sleep(0.1)


def test_a_start_that_can_not_be_met_names_the_reason(directory: Path) -> None:
    with pytest.raises(RuntimeError, match=r"index .radix. with a DeepSeek-V4 model"):
        Server(directory, config={"index": "radix"}).start()
