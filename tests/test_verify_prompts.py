"""Prompts of ``tessera-sglang verify``: JSON lines, and those that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tessera_sglang.verify import defaults
from tessera_sglang.verify.prompts import Encoder, Prompt, PromptError, read

PAGE = 8
MODEL = Path(__file__).resolve().parents[1] / "examples" / "tiny-mla"  # a token is a byte


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return Encoder(lambda: tokenizer, PAGE)


def never() -> Any:
    raise AssertionError("no tokenizer is needed for token ids")


def lines(directory: Path, *entries: Any) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text(
        "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)
    )
    return path


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    path = lines(tmp_path, {"input_ids": list(range(30)), "spans": [[2, 12], [12, 30]]}, "")
    (found,) = read(path, Encoder(never, PAGE))
    assert found == Prompt(f"{path}:1", tuple(range(30)), ((2, 12), (12, 30)))


def test_texts_are_encoded_span_by_span(tmp_path: Path, encoder: Encoder) -> None:
    text = "Grüße. A text that is shared. Who?"
    start = text.index("A")
    end = text.index(" Who")
    path = lines(tmp_path, "", {"text": text, "text_spans": [[start, end]]})
    (found,) = read(path, encoder)
    assert found.where == f"{path}:2"
    assert bytes(found.tokens).decode() == text
    ((first, last),) = found.spans
    assert bytes(found.tokens[first:last]).decode() == text[start:end]


def test_messages_go_through_the_chat_template(tmp_path: Path, encoder: Encoder) -> None:
    shared = {
        "type": "text",
        "text": "A text that is shared.",
        "cache_control": {"type": "ephemeral"},
    }
    other = {"type": "text", "text": "Who?"}
    path = lines(tmp_path, {"messages": [{"role": "user", "content": [shared, other]}]})
    (found,) = read(path, encoder)
    ((start, end),) = found.spans
    assert bytes(found.tokens[start:end]).decode() == shared["text"]
    assert end < len(found.tokens)


GOOD = {"input_ids": list(range(30)), "spans": [[0, 20]]}
CONTROL = {"cache_control": {"type": "ephemeral"}}
BAD: list[tuple[Any, str]] = [
    ("{", "no JSON"),
    ("[1]", "must be a JSON object"),
    ({}, "must have one of text, input_ids, messages, has none"),
    ({"text": "a", "input_ids": [1]}, "has text and input_ids"),
    ({**GOOD, "text_spans": []}, "text_spans: unknown beside input_ids; remove it, or give spans"),
    ({"text": "abc", "spans": [[0, 2]]}, "spans: unknown beside text"),
    ({"text": 5}, "text must be a text"),
    ({"text": ""}, "text must be a text that is not empty"),
    ({"text": "abc"}, "text_spans: no span of a page or more; declare"),
    ({"text": "abc", "text_spans": [[0, 2]]}, "text_spans: no span of a page or more"),
    ({"text": "abc", "text_spans": [[0, 9]]}, "text_spans[0] = [0, 9] ends past the text"),
    ({"text": "abc", "text_spans": 3}, "text_spans must be a list"),
    ({"input_ids": "abc", "spans": []}, "input_ids must be a list of token ids"),
    ({"input_ids": [], "spans": []}, "input_ids must be"),
    ({"input_ids": [1, -2], "spans": []}, "input_ids must be"),
    ({"input_ids": [1, True], "spans": []}, "input_ids must be"),
    ({"input_ids": [1, 2]}, "spans: there is none; declare"),
    ({**GOOD, "spans": [[5, 40]]}, "spans[0] = [5, 40] ends past the prompt"),
    ({**GOOD, "spans": [[0, 9], [8, 12]]}, "spans[1] starts at 8, before"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "hello"}, "messages must be a list of objects"),
    ({"messages": [{"role": "user", "content": "hello"}]}, "messages: no text part or tool"),
    (
        {"messages": [{"role": "user", "content": "hello"}], "tools": 3},
        "tools must be a list of objects",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "x" * 40, "cache_control": "yes"}],
                }
            ]
        },
        "messages[0].content[0].cache_control must be",
    ),
]


@pytest.mark.parametrize(("entry", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_with_its_field(
    tmp_path: Path, encoder: Encoder, entry: Any, said: str
) -> None:
    path = lines(tmp_path, GOOD, entry)
    with pytest.raises(PromptError) as caught:
        read(path, encoder)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert said in str(caught.value)


def test_a_file_without_prompts_is_refused(tmp_path: Path, encoder: Encoder) -> None:
    with pytest.raises(PromptError, match="holds no prompt"):
        read(lines(tmp_path, "", "  "), encoder)
    with pytest.raises(PromptError, match="can not be read"):
        read(tmp_path / "nowhere.jsonl", encoder)


class Wordy:
    """The example's tokenizer under a template that reads contents as strings, as most are."""

    def __init__(self, template: str | None) -> None:
        self.own = AutoTokenizer.from_pretrained(MODEL)
        self.own.chat_template = self.chat_template = template

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


STRINGS = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"
    "{{ '<assistant>' }}"
)


def test_parts_are_joined_for_a_template_that_reads_strings(tmp_path: Path) -> None:
    shared = {
        "type": "text",
        "text": "A text that is shared.",
        "cache_control": {"type": "ephemeral"},
    }
    other = {"type": "text", "text": "Who?"}
    path = lines(tmp_path, {"messages": [{"role": "user", "content": [shared, other]}]})
    tokenizer = Wordy(STRINGS)
    (found,) = read(path, Encoder(lambda: tokenizer, PAGE))
    assert bytes(found.tokens).decode() == "<user>A text that is shared. Who?<assistant>"
    ((start, end),) = found.spans
    assert bytes(found.tokens[start:end]).decode() == shared["text"]


@pytest.mark.parametrize(
    ("template", "end"), [(None, "\nAnswer:"), (STRINGS, "<assistant>")], ids=["plain", "chat"]
)
def test_the_prompts_of_the_package(template: str | None, end: str) -> None:
    tokenizer = Wordy(template)
    found = defaults.prompts(Encoder(lambda: tokenizer, PAGE))
    assert len(found) == 8
    assert len({prompt.tokens[:25] for prompt in found}) == 8, "no two begin alike"
    texts = set()
    for prompt, question in zip(found, defaults.QUESTIONS, strict=True):
        assert len(prompt.spans) == 3
        for start, last in prompt.spans:
            texts.add(bytes(prompt.tokens[start:last]).decode())
        behind = bytes(prompt.tokens[prompt.spans[-1][1] :]).decode()
        assert behind.startswith("\n\n")
        assert behind.endswith(question.question + end)
    assert texts == {defaults.passage(name) for name in ("lens", "lock", "bread", "metre", "bees")}
    assert all(
        2000 < len(text) < 3500 for text in texts
    )  # 400 to 800 tokens of a trained tokenizer
