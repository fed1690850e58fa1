"""Prompts with spans, from a user's JSON lines.

A line is one of ::

    {"text": "…", "text_spans": [[start, end], …]}       code points of the text
    {"input_ids": [1, 2, …], "spans": [[start, end], …]}  offsets into input_ids
    {"messages": […], "tools": […]}                       with cache_control, as chat endpoints take it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera_sglang import chat_prompt, spans
from tessera_sglang.text import offsets
from tessera_sglang.text.marks import Piece
from tessera_sglang.text.pieces import encode

from .chat import ServedTemplate

Spans = tuple[tuple[int, int], ...]

_KINDS = {  # what makes a line one of these, and what may stand beside it
    "text": ("text_spans",),
    "input_ids": ("spans",),
    "messages": ("tools",),
}


class PromptError(ValueError):
    """A line can not be used: says which, which field, and what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the server is sent it. ``spans`` are half-open offsets into ``tokens``."""

    where: str  # file and line
    tokens: tuple[int, ...]
    spans: Spans


@dataclass(frozen=True, slots=True)
class Encoder:
    """What lines of text need. ``tokenizer`` is asked for once, and only if there are such lines."""

    tokenizer: Callable[[], Any]
    page_tokens: int

    def encode(
        self, pieces: Sequence[Piece], *, special_tokens: bool = True
    ) -> tuple[list[int], list[list[int]]]:
        """Ids and spans, as the server makes them of ``text`` and ``text_spans``."""
        found = encode(
            self.tokenizer(),
            pieces,
            page_tokens=self.page_tokens,
            special_tokens=special_tokens,
        )
        return found.input_ids, found.spans


def read(path: Path, encoder: Encoder) -> list[Prompt]:
    """The prompts of a file of JSON lines.

    Raises:
        PromptError: the file can not be read, holds no prompt, or a line is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} can not be read: {error}") from error
    found = [
        _prompt(f"{path}:{number}", line, encoder)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise PromptError(f"{path} holds no prompt; give one JSON object a line")
    return found


def _prompt(where: str, line: str, encoder: Encoder) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: no JSON: {error}") from error
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: must be a JSON object, got {_shown(entry)}")
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        raise PromptError(
            f"{where}: must have one of {', '.join(_KINDS)}, has {' and '.join(kinds) or 'none'}"
        )
    kind = kinds[0]
    for key in entry:
        if key != kind and key not in _KINDS[kind]:
            raise PromptError(
                f"{where}: {key}: unknown beside {kind}; remove it, or give "
                + " and ".join(_KINDS[kind])
            )
    try:
        ids, raw = _READERS[kind](entry, encoder)
        parsed = spans.parse(raw, len(ids))
    except ValueError as error:
        raise PromptError(f"{where}: {_plain(error)}") from error
    if not parsed:
        raise PromptError(f"{where}: {_NOTHING[kind]}")
    return Prompt(where, tuple(ids), tuple((span.start, span.end) for span in parsed))


def _from_text(entry: dict[str, Any], encoder: Encoder) -> tuple[list[int], Any]:
    text = entry["text"]
    if not isinstance(text, str) or not text:
        raise PromptError(f"text must be a text that is not empty, got {_shown(text)}")
    return encoder.encode(offsets.cut(text, entry.get("text_spans", [])))


def _from_ids(entry: dict[str, Any], encoder: Encoder) -> tuple[list[int], Any]:
    ids = entry["input_ids"]
    good = isinstance(ids, list) and ids
    if not good or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise PromptError(f"input_ids must be a list of token ids, got {_shown(ids)}")
    return ids, entry.get("spans", [])


def _from_messages(entry: dict[str, Any], encoder: Encoder) -> tuple[list[int], Any]:
    messages, tools = entry["messages"], entry.get("tools")
    for name, value in (("messages", messages), ("tools", tools or [])):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise PromptError(f"{name} must be a list of objects, got {_shown(value)}")
    if not messages:
        raise PromptError("messages is empty; give at least one message")
    template = ServedTemplate(encoder.tokenizer())
    try:
        return chat_prompt.render(template, messages, tools, page_tokens=encoder.page_tokens)
    except ValueError:
        raise
    except Exception as error:  # a chat template raises what it likes
        raise PromptError(f"messages: the model's chat template refuses them: {error}") from error


_READERS: dict[str, Callable[[dict[str, Any], Encoder], tuple[list[int], Any]]] = {
    "text": _from_text,
    "input_ids": _from_ids,
    "messages": _from_messages,
}
_NOTHING = {
    "text": "text_spans: no span of a page or more; declare the texts that are to be shared",
    "input_ids": "spans: there is none; declare the tokens that are to be shared",
    "messages": "messages: no text part or tool of a page or more has "
    '"cache_control": {"type": "ephemeral"}; add it to what is to be shared',
}


def _plain(error: ValueError) -> str:
    """The error in terms of the line's fields, which stand one level higher in a request."""
    return str(error).replace(f"{spans.OBJECT}.", "")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
