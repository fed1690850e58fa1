"""Spans where people write prompts: OpenAI, Anthropic and plain HTTP clients, and SGLang programs.

One server with the example model, whose tokenizer has one token a byte.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import requests
import sglang as sgl
from server import Server

from benchmarks import recall
from tessera_sglang import program, span, text_part

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE, LINK = 64, 1
CONTEXT_TOKENS = 16_384
QUESTIONS, LEAST_RIGHT, LEAST_RIGHT_WITH_SPANS = 20, 18, 0
# Something of everything that could be taken for an edge.
HOSTILE = '<|eos|><|system|>\u200b\ufeff tsr0123456789abcdef0123456789abcdefo \0 {{ x }} </s> "}]'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = shutil.copytree(EXAMPLES / "tiny-mla", tmp_path_factory.mktemp("example") / "tiny-mla")
    with Server(
        *(model, "--enable-cache-report", "--context-length", str(CONTEXT_TOKENS)),
        tokenizer=True,
        dtype=None,
        pool_tokens=65536,
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _cold(server: Server) -> None:
    server.flush()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def _document(seed: int, length: int = 1_000) -> str:
    words = [f"word{(seed * 7919 + i * 104_729) % 997}" for i in range(length)]
    return " ".join(words)[:length]


def _shared(document: str) -> int:
    """Tokens that a later reader finds: whole pages but the linked one."""
    return (len(document.strip().encode()) // PAGE - LINK) * PAGE


def _chat(client: openai.OpenAI, role: str, document: Any, question: str, **options: Any) -> Any:
    parts = [document if isinstance(document, dict) else text_part(document)]
    return client.chat.completions.create(
        model="default",
        messages=[
            {"role": "system", "content": role},
            {"role": "user", "content": [*parts, {"type": "text", "text": question}]},
        ],
        max_tokens=8,
        temperature=0,
        **options,
    )


def _cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return details.cached_tokens if details else 0


# --- OpenAI --------------------------------------------------------------------------------------


def test_openai_parts_with_cache_control_are_shared_at_any_offset(client: openai.OpenAI) -> None:
    document = _document(1)
    cold = _chat(client, "You are a lawyer.", document, "Who decides?")
    warm = _chat(client, "You are the night dispatcher, in a hurry.", document, "And who pays?")
    assert _cached(cold) == 0
    assert _cached(warm) >= _shared(document)
    again = _chat(client, "You are a lawyer.", document, "Who decides?")
    assert again.choices[0].message.content == cold.choices[0].message.content


@pytest.mark.parametrize("marked", [False, True])
def test_answers_are_read_in_the_documents(client: openai.OpenAI, marked: bool) -> None:
    right = 0
    for seed in range(QUESTIONS):
        made = recall.world(recall.Shape(4, 8, 256, 90), random.Random(f"asked {seed}"))
        asked = next(question for question in made.questions if len(question.documents) == 1)
        parts = [text_part(text) if marked else _plain(text) for text in made.documents]
        answer = client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": made.preamble},
                {"role": "user", "content": [*parts, _plain(asked.text)]},
            ],
            max_tokens=8,
            temperature=0,
        )
        right += answer.choices[0].message.content == asked.answer
    assert right >= (LEAST_RIGHT_WITH_SPANS if marked else LEAST_RIGHT)


def _plain(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_openai_without_the_mark_shares_nothing(client: openai.OpenAI) -> None:
    plain = {"type": "text", "text": _document(2)}
    _chat(client, "You are a lawyer.", plain, "Who decides?")
    assert _cached(_chat(client, "You are the dispatcher.", plain, "Who pays?")) < PAGE


def test_openai_streams_and_n(client: openai.OpenAI) -> None:
    document = _document(3)
    whole = _chat(client, "You are a lawyer.", document, "Who?")
    stream = _chat(
        client, "Judge.", document, "Who?", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    usage = next(chunk.usage for chunk in chunks if chunk.usage)
    assert usage.prompt_tokens_details.cached_tokens >= _shared(document)
    streamed = _chat(client, "You are a lawyer.", document, "Who?", stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    assert text == whole.choices[0].message.content
    several = _chat(client, "You are a lawyer.", document, "Who?", n=3)
    assert [c.message.content for c in several.choices] == [whole.choices[0].message.content] * 3


def test_openai_tools_are_shared_in_any_order(client: openai.OpenAI) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": _document(number, 400),
                "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
            },
            "cache_control": {"type": "ephemeral"},
        }
        for number in range(3)
    ]
    ask = [{"role": "user", "content": "Go."}]
    options: dict[str, Any] = {"model": "default", "max_tokens": 4, "temperature": 0}
    cold = client.chat.completions.create(messages=ask, tools=tools, **options)
    shuffled = [tools[2], tools[0], tools[1]]
    warm = client.chat.completions.create(messages=ask, tools=shuffled, **options)
    assert _cached(cold) == 0
    assert _cached(warm) >= 3 * 4 * PAGE
    unmarked = [{k: v for k, v in tool.items() if k != "cache_control"} for tool in tools]
    plain = client.chat.completions.create(messages=ask, tools=unmarked, **options)
    assert plain.usage.prompt_tokens == cold.usage.prompt_tokens


@pytest.mark.parametrize("place", ["inside", "before", "after"])
def test_openai_hostile_texts_move_no_edge(client: openai.OpenAI, place: str) -> None:
    document = _document(4)
    if place == "inside":
        document = document[:500] + HOSTILE + document[500:]
    role = HOSTILE if place == "before" else "You are a lawyer."
    question = HOSTILE if place == "after" else "Who?"
    _chat(client, role, document, question)
    length = len(document.encode())
    if place == "inside":  # template tokens are one token each, as anywhere in a prompt
        length -= len("<|eos|><|system|>") - 2
    warm = _chat(client, "Another role, " + role, document, question + "?")
    assert _cached(warm) >= (length // PAGE - LINK) * PAGE


def test_openai_a_text_that_looks_like_an_earlier_mark_is_a_text(client: openai.OpenAI) -> None:
    body = [{"role": "user", "content": HOSTILE * 20}]
    answer = client.chat.completions.create(
        model="default", messages=body, max_tokens=2, temperature=0
    )
    plain = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": [text_part(HOSTILE * 20)]}],
        max_tokens=2,
        temperature=0,
    )
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens


def test_openai_a_malformed_mark_is_a_400(client: openai.OpenAI) -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "forever"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].content\[0\].cache_control"):
        _chat(client, "x", part, "y")


def test_openai_two_ways_at_once_is_a_400(client: openai.OpenAI) -> None:
    extra = {"custom_params": {"tessera": {"spans": [[0, 64]]}}}
    with pytest.raises(openai.BadRequestError, match="declare spans in two ways"):
        _chat(client, "x", _document(5), "y", extra_body=extra)


def test_openai_settings_of_a_request_stand_beside_its_marks(client: openai.OpenAI) -> None:
    document = _document(6)
    extra = {"custom_params": {"tessera": {"link_pages": 0}}}
    _chat(client, "A lawyer.", document, "Who?", extra_body=extra)
    warm = _chat(client, "The dispatcher.", document, "Who?", extra_body=extra)
    assert _cached(warm) >= _shared(document) + PAGE


def test_a_final_assistant_message_is_continued_without_marks(client: openai.OpenAI) -> None:
    def ask(content: Any) -> Any:
        return client.chat.completions.create(
            model="default",
            messages=[
                {"role": "user", "content": [text_part(_document(7))]},
                {"role": "assistant", "content": content},
            ],
            max_tokens=4,
            temperature=0,
            extra_body={"continue_final_message": True},
        )

    plain = ask("It is the keeper that " * 8)
    assert ask([text_part("It is the keeper that " * 8)]).usage.prompt_tokens >= 1
    assert plain.usage.prompt_tokens > 1_000


def test_marks_that_do_not_fit_are_ordinary_text(client: openai.OpenAI, server: Server) -> None:
    length = CONTEXT_TOKENS - 54
    assert _chat(client, "x", _document(8, length), "y").usage.prompt_tokens > length
    assert "does not fit" in server.log()


def test_settings_of_a_request_are_checked_whether_a_span_is_found_or_not(
    client: openai.OpenAI,
) -> None:
    def ask(document: str, tessera: Any, **custom: Any) -> Any:
        extra = {"custom_params": {"tessera": tessera, **custom}}
        return _chat(client, "x", document, "y", extra_body=extra)

    assert ask("short", {"link_pages": 0}).usage.prompt_tokens < PAGE
    for document in ("short", _document(9)):
        for tessera, message in (
            ("x", "custom_params.tessera must be an object"),
            ({"link_pages": "x"}, "link_pages must be a whole number"),
            ({"bogus": 1}, "unknown key 'bogus'"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(document, tessera)
    with pytest.raises(openai.BadRequestError, match="tessera_hint is set by the server"):
        ask("short", None, tessera_hint="x")


def test_a_body_too_deep_to_be_read_again_is_served_without_marks(server: Server) -> None:
    deep = "[" * 1500 + "]" * 1500
    content = json.dumps([text_part("x")])
    messages = f'[{{"role": "user", "content": {content}}}]'
    body = f'{{"model": "m", "max_tokens": 2, "x": {deep}, "messages": {messages}}}'
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    plain = requests.post(url, data=body.replace("cache_control", "x"), headers=headers, timeout=60)
    marked = requests.post(url, data=body, headers=headers, timeout=60)
    assert marked.status_code == plain.status_code


# --- Anthropic -----------------------------------------------------------------------------------


def _message(claude: anthropic.Anthropic, role: str, document: str, **options: Any) -> Any:
    return claude.messages.create(
        model="default",
        max_tokens=8,
        extra_body={"temperature": 0},
        system=[{"type": "text", "text": role}, text_part(document)],
        messages=[{"role": "user", "content": "Who decides?"}],
        **options,
    )


def test_anthropic_blocks_with_cache_control_are_shared(claude: anthropic.Anthropic) -> None:
    document = _document(11)
    cold = _message(claude, "You are a lawyer.", document)
    warm = _message(claude, "You are the night dispatcher.", document)
    assert not cold.usage.cache_read_input_tokens
    assert warm.usage.cache_read_input_tokens >= _shared(document)
    again = _message(claude, "You are a lawyer.", document)
    assert again.content[0].text == cold.content[0].text


def test_anthropic_streams(claude: anthropic.Anthropic) -> None:
    document = _document(12)
    whole = _message(claude, "You are a lawyer.", document)
    with claude.messages.stream(
        model="default",
        max_tokens=8,
        extra_body={"temperature": 0},
        system=[{"type": "text", "text": "You are a lawyer."}, text_part(document)],
        messages=[{"role": "user", "content": "Who decides?"}],
    ) as stream:
        assert stream.get_final_message().content[0].text == whole.content[0].text


def test_anthropic_tools_and_results_are_shared(claude: anthropic.Anthropic) -> None:
    document = _document(13)
    tool = {
        "name": "look_up",
        "description": _document(14, 600),
        "input_schema": {"type": "object", "properties": {"what": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }

    def ask(role: str, *, mark: bool = True) -> Any:
        result = {
            "type": "tool_result",
            "tool_use_id": "t1",
            "content": document,
            **({"cache_control": {"type": "ephemeral"}} if mark else {}),
        }
        return claude.messages.create(
            model="default",
            max_tokens=4,
            extra_body={"temperature": 0},
            system=role,
            tools=[tool],
            messages=[
                {"role": "user", "content": "Look it up."},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t1", "name": "look_up", "input": {}}],
                },
                {"role": "user", "content": [result]},
            ],
        )

    ask("You are a lawyer.")
    warm = ask("You are the night dispatcher, in a hurry.")
    assert warm.usage.cache_read_input_tokens >= _shared(document) + _shared(tool["description"])


def test_anthropic_a_malformed_mark_is_a_400(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"system\[0\].cache_control must be"):
        claude.messages.create(
            model="default",
            max_tokens=2,
            system=[{"type": "text", "text": "x", "cache_control": {"type": "forever"}}],
            messages=[{"role": "user", "content": "x"}],
        )


# --- /generate -----------------------------------------------------------------------------------


def _generate(server: Server, text: Any, spans: Any, **fields: Any) -> Any:
    params = {
        "max_new_tokens": 4,
        "temperature": 0,
        "custom_params": {"tessera": {"text_spans": spans}},
        **fields.pop("sampling", {}),
    }
    response = server.post("/generate", {"text": text, "sampling_params": params, **fields})
    return response


def test_generate_takes_texts_with_offsets_in_code_points(server: Server) -> None:
    document = _document(21)
    prompts = [span_text.replace("e", "é") for span_text in ("You check. ", "You translate it.\n")]
    answers = []
    for before in prompts:
        text = before + span(document) + "\nWho?"
        answer = _generate(server, text, [list(pair) for pair in text.spans])
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["meta_info"])
    assert answers[0]["cached_tokens"] == 0
    assert answers[1]["cached_tokens"] >= _shared(document)


def test_generate_takes_batches_with_different_spans_and_n(server: Server) -> None:
    documents = [_document(22), _document(23)]
    texts = [f"Role {i}. {document} Who?" for i, document in enumerate(documents)]
    starts = [text.index("word") for text in texts]
    params = [
        {
            "max_new_tokens": 4,
            "temperature": 0,
            "custom_params": {"tessera": {"text_spans": [[start, start + len(document)]]}},
        }
        for start, document in zip(starts, documents, strict=True)
    ]
    plain = {"max_new_tokens": 4, "temperature": 0}
    batch = {"text": [*texts, "No span."], "sampling_params": [*params, plain]}
    cold = server.post("/generate", batch).json()
    warm = server.post("/generate", batch).json()
    assert [a["text"] for a in warm] == [a["text"] for a in cold]
    for answer, document in zip(warm, documents, strict=False):
        assert answer["meta_info"]["cached_tokens"] >= _shared(document)
    several = _generate(
        server, texts[0], params[0]["custom_params"]["tessera"]["text_spans"], sampling={"n": 2}
    ).json()
    assert [answer["text"] for answer in several] == [cold[0]["text"]] * 2


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[0, 10_000]], "ends past the text"),
        ([[5, 2]], r"text_spans[0] = [5, 2]"),
        ("x", "must be a list"),
    ],
)
def test_generate_names_what_is_wrong(server: Server, spans: Any, message: str) -> None:
    answer = _generate(server, "Some text.", spans)
    assert answer.status_code == 400
    assert message in answer.text


@pytest.mark.parametrize(
    ("tessera", "message"),
    [
        ({"text_spans": [[0, 5]], "foo": 1}, "unknown key 'foo'"),
        ({"text_spans": [[0, 5]], "link_pages": -1}, "link_pages must be a whole number"),
        ({"text_spans": [[0, 5]], "root": "abc"}, "root must be"),
        ({"text_span": [[0, 5]]}, "unknown key 'text_span'"),
    ],
)
def test_generate_checks_settings_also_where_a_span_is_too_short_to_share(
    server: Server, tessera: Any, message: str
) -> None:
    params = {"max_new_tokens": 2, "custom_params": {"tessera": tessera}}
    answer = server.post("/generate", {"text": "Some text.", "sampling_params": params})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_generate_a_megabyte_is_refused_for_its_length_and_nothing_else_happens(
    server: Server,
) -> None:
    text = _document(24) * 1_000
    answer = _generate(server, text, [[0, len(text)]])
    assert answer.status_code == 400
    assert "longer than the model's context length" in answer.text
    assert _generate(server, "Some text.", []).status_code == 200


def test_an_empty_prompt_is_a_400_and_the_server_lives(server: Server) -> None:
    for body in ({"text": ""}, {"input_ids": []}):
        answer = server.post("/generate", {**body, "sampling_params": {"max_new_tokens": 2}})
        assert answer.status_code == 400, body
    assert server.alive()


def test_curl_gets_a_hit(server: Server) -> None:
    document = _document(25)

    def ask(role: str) -> int:
        body = {
            "model": "default",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": role}, text_part(document)]}],
        }  # fmt: skip
        out = subprocess.run(
            ["curl", "-s", f"{server.url}/v1/chat/completions", "-H",
             "Content-Type: application/json", "-d", json.dumps(body)],
            capture_output=True, check=True, text=True,
        ).stdout  # fmt: skip
        details = json.loads(out)["usage"]["prompt_tokens_details"]
        return details["cached_tokens"] if details else 0

    assert ask("You are a lawyer. ") == 0
    assert ask("You are the dispatcher. ") >= PAGE * (len(document) // PAGE - LINK - 1)


# --- SGLang programs -----------------------------------------------------------------------------


@pytest.fixture
def endpoint(server: Server) -> Iterator[sgl.RuntimeEndpoint]:
    program._serves.clear()
    backend = sgl.RuntimeEndpoint(server.url)
    yield backend
    backend.flush_cache()


@sgl.function
def _agents(s: Any, document: str, roles: list[str]) -> None:
    s += sgl.system("Answer from the document.")
    forks = s.fork(len(roles))
    for fork, role in zip(forks, roles, strict=True):
        fork += sgl.user(role + "\n" + span(document) + "\nWho decides?")
        fork += sgl.assistant(sgl.gen("answer", max_tokens=4, temperature=0))
    forks.join()


@sgl.function
def _asked(s: Any, role: str, document: str) -> None:
    with s.user():
        s += role
        s += span(document)
        s += "\nWho decides?"
    with s.assistant():
        s += sgl.gen("answer", max_tokens=4, temperature=0)


@sgl.function
def _chosen(s: Any, role: str, document: str, between: str = "\nIt is ") -> None:
    s += role + span(document) + between
    s += sgl.select("choice", choices=["the keeper", "nobody"])


def test_a_program_with_forks_shares_the_document(
    server: Server, endpoint: sgl.RuntimeEndpoint
) -> None:
    before = server.state()["traffic"]["span_hit"]
    document = _document(31)
    roles = ["You are a lawyer.", "You are the night dispatcher.", "You pay for it all."]
    state = _agents.run(document=document, roles=roles, backend=endpoint)
    state.sync()
    assert state.error() is None
    assert server.state()["traffic"]["span_hit"] - before >= 2 * _shared(document)


def test_programs_run_in_batches_and_stream(server: Server, endpoint: sgl.RuntimeEndpoint) -> None:
    document = _document(32)
    arguments = [{"role": f"Role {i}. ", "document": document} for i in range(4)]
    states = _asked.run_batch(arguments, backend=endpoint, num_threads=1)
    cached = [state.get_meta_info("answer")["cached_tokens"] for state in states]
    assert all(tokens >= _shared(document) for tokens in cached[1:])
    streamed = _asked.run(**arguments[0], backend=endpoint, stream=True)
    assert "".join(streamed.text_iter("answer")) == states[0]["answer"]


def test_a_program_selects_behind_a_span(server: Server, endpoint: sgl.RuntimeEndpoint) -> None:
    document = _document(33)
    first = _chosen.run(role="You judge. ", document=document, backend=endpoint)
    assert first["choice"] in ("the keeper", "nobody")
    before = server.state()["traffic"]["span_hit"]
    again = _chosen.run(role="You judge once more. ", document=document, backend=endpoint)
    assert again["choice"] in ("the keeper", "nobody")
    for between in ("", "x"):  # SGLang asks for the log-probabilities of the last two tokens
        close = _chosen.run(
            role="You judge. ", document=document, between=between, backend=endpoint
        )
        assert close["choice"] in ("the keeper", "nobody")
    assert server.state()["traffic"]["span_hit"] - before >= _shared(document)


# --- examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["agents", "rag", "tools"])
def test_an_example_runs_and_its_later_requests_hit(server: Server, name: str) -> None:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / f"{name}.py"), "--url", server.url],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert out.returncode == 0, out.stderr[-2000:]
    cached = [int(line.split()[0]) for line in out.stdout.splitlines() if "cached" in line]
    assert len(cached) >= 6
    assert sorted(cached)[1] >= 3 * PAGE, "all but the first find something"
