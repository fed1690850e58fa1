"""``span_policy`` "messages", and what SGLang programs meet on a server without Tessera's index."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import openai
import pytest
import sglang as sgl
from models import write_unlearned
from server import Server

from tessera_sglang import program, span, text_part

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = 64


def _server(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> Server:
    folder = tmp_path_factory.mktemp("unlearned") / "tiny-mla"
    model = write_unlearned(folder, EXAMPLES / "tiny-mla")  # it has an answer to everything
    arguments = ("--enable-cache-report",)
    return Server(model, *arguments, tokenizer=True, dtype=None, pool_tokens=65536, config=config)


def _ask(server: Server, *messages: tuple[str, Any]) -> int:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": role, "content": content} for role, content in messages],
        max_tokens=4,
        temperature=0,
    )
    details = answer.usage.prompt_tokens_details
    return details.cached_tokens if details else 0


def test_every_message_of_a_page_is_a_span(tmp_path_factory: pytest.TempPathFactory) -> None:
    rules, document = "Rule. " * 60, "Fact. " * 100
    with _server(tmp_path_factory, {"span_policy": "messages"}) as server:
        assert server.state()["spans"]["policy"] == "messages"
        assert _ask(server, ("system", rules), ("user", document)) == 0
        found = _ask(server, ("system", "Be brief."), ("user", "First: "), ("user", document),
                     ("user", rules))  # fmt: skip
        shared = [len(text.strip()) // PAGE - 1 for text in (document, rules)]
        assert found >= sum(shared) * PAGE


def test_a_server_with_the_stock_tree_takes_marks_as_text(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    @sgl.function
    def asked(s: Any, role: str) -> None:
        s += role + span("Fact. " * 100) + "Who?" + sgl.gen("answer", max_tokens=4, temperature=0)

    program._serves.clear()
    with _server(tmp_path_factory, {"index": "radix"}) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        with caplog.at_level(logging.WARNING):
            texts = [asked.run(role=role, backend=backend)["answer"] for role in ("A. ", "B. ")]
        assert all(texts)
        warned = [r for r in caplog.records if "spans are ordinary text" in r.getMessage()]
        assert len(warned) == 1
        assert _ask(server, ("user", [text_part("Fact. " * 100)])) == 0
        assert (
            _ask(server, ("user", [{"type": "text", "text": "X"}, text_part("Fact. " * 100)]))
            < PAGE
        )
        offsets = {"custom_params": {"tessera": {"text_spans": [[3, 200]]}}, "max_new_tokens": 2}
        answer = server.post("/generate", {"text": "Fact. " * 100, "sampling_params": offsets})
        assert answer.status_code == 200, answer.text
