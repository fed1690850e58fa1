"""The workloads: what every seed must give, whatever it draws."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workloads import jsonl, multi_agent, rag, tools
from benchmarks.workloads.schemas import schema
from tessera_sglang.bench.agents import Request

SMALL: dict[str, tuple[Any, Callable[..., list[Request]]]] = {
    "multi_agent": (
        multi_agent.Shape(agents=3, document_tokens=700, turns=2),
        multi_agent.requests,
    ),
    "rag": (
        rag.Shape(documents=6, document_tokens=(90, 200), draws=9, documents_per_draw=(2, 4)),
        rag.requests,
    ),
    "tools": (tools.Shape(agents=3, tools=8, tools_per_agent=(2, 8)), tools.requests),
}


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: Any) -> str:
    return bytes(ids).decode()


def texts(request: Request) -> list[tuple[int, ...]]:
    return [request.input_ids[start:end] for start, end in request.spans]


@pytest.mark.parametrize("name", SMALL)
def test_everything_follows_from_the_seed(name: str) -> None:
    shape, make = SMALL[name]
    assert make(shape, encode, 1) == make(shape, encode, 1) != make(shape, encode, 2)


@pytest.mark.parametrize("name", SMALL)
def test_spans_ascend_and_lie_inside_the_prompt(name: str) -> None:
    shape, make = SMALL[name]
    for request in make(shape, encode, 1):
        edges = [edge for span in request.spans for edge in span]
        assert edges == sorted(edges)
        assert edges[0] >= 0
        assert edges[-1] < len(request.input_ids)


@pytest.mark.parametrize("name", SMALL)
def test_a_line_has_the_same_text_and_marks_the_spans(name: str) -> None:
    shape, make = SMALL[name]
    for request in make(shape, encode, 1):
        line = json.loads(json.dumps(jsonl.line(request, decode)))
        parts = line["messages"][0]["content"]
        assert encode("".join(part["text"] for part in parts)) == list(request.input_ids)
        marked = [part["text"] for part in parts if "cache_control" in part]
        assert [tuple(encode(text)) for text in marked] == texts(request)


def test_agents_share_the_document_and_nothing_before_it() -> None:
    shape = multi_agent.Shape(agents=8, document_tokens=700)
    made = multi_agent.requests(shape, encode, 1)
    assert len({texts(request)[0] for request in made}) == 1
    assert len(texts(made[0])[0]) == shape.document_tokens
    assert len({request.input_ids[:8] for request in made}) == shape.agents
    assert {100 <= request.spans[0][0] <= 300 for request in made} == {True}


def test_a_turn_goes_on_where_the_last_one_ended() -> None:
    shape = multi_agent.Shape(agents=3, document_tokens=700, turns=3)
    made = multi_agent.requests(shape, encode, 1)
    turns = [made[first : first + 3] for first in range(0, 9, 3)]
    for earlier, later in itertools.pairwise(turns):
        for one, next_one in zip(earlier, later, strict=True):
            assert next_one.input_ids[: len(one.input_ids)] == one.input_ids
            assert len(next_one.input_ids) > len(one.input_ids)


def test_a_draw_has_no_document_twice() -> None:
    shape = SMALL["rag"][0]
    for request in rag.requests(shape, encode, 1):
        assert len(set(texts(request))) == len(texts(request))
        assert 2 <= len(request.spans) <= 4


def test_a_draw_is_in_no_order_of_the_corpus() -> None:
    shape = rag.Shape(documents=4, documents_per_draw=(4, 4))
    chance = random.Random(1)
    assert len({tuple(rag.draw(shape, 4, chance)) for _ in range(400)}) == 24


def test_zipf_wants_the_first_document_as_often_as_its_law_says() -> None:
    shape = rag.Shape(documents=8, documents_per_draw=(1, 1), popularity="zipf")
    chance = random.Random(1)
    wanted = Counter(rag.draw(shape, 1, chance)[0] for _ in range(20_000))
    harmonic = sum(1 / number for number in range(1, 9))
    for number in range(8):
        assert wanted[number] / 20_000 == pytest.approx(1 / (number + 1) / harmonic, abs=0.015)


def test_definitions_are_json_unlike_each_other_and_no_longer_than_asked() -> None:
    chance = random.Random(1)
    made = [schema(number, 400, encode, chance) for number in range(400)]
    names = {json.loads(bytes(one))["function"]["name"] for one in made}
    assert len(names) == 400
    assert max(map(len, made)) <= 400


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        (multi_agent.Shape, {"agents": 0}),
        (multi_agent.Shape, {"preamble_tokens": (300, 100)}),
        (rag.Shape, {"popularity": "fame"}),
        (rag.Shape, {"documents": 5}),
        (tools.Shape, {"tools": 10}),
    ],
)
def test_what_can_not_be_drawn_is_refused(shape: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        shape(**wrong)


def test_the_command_writes_what_sglang_reads(tmp_path: Path) -> None:
    out = tmp_path / "agents.jsonl"
    arguments = ["--out", str(out), "--agents", "2", "--document-tokens", "300"]
    arguments += ["--preamble-tokens", "100", "120"]
    assert jsonl.command("", multi_agent.Shape, multi_agent.requests, arguments) == 0

    from sglang.benchmark.datasets.openai_dataset import sample_openai_requests
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(jsonl.ROOT / "examples/tiny-mla")
    rows = sample_openai_requests(str(out), 2, tokenizer)
    assert len(rows) == 2
    shape = multi_agent.Shape(agents=2, document_tokens=300, preamble_tokens=(100, 120))
    made = multi_agent.requests(shape, encode, 1)
    # the chat template adds BOS, a role on either side and EOS
    assert [row.prompt_len for row in rows] == [len(one.input_ids) + 4 for one in made]
    assert [row.output_len for row in rows] == [8, 8]
