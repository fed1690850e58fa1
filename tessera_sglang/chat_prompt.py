"""A chat prompt as the model sees it, and where its spans stand in it.

The template is rendered twice: with marks, to find the edges, and without, to be sure that the marks
changed nothing else. Should they have (a template may look at what a message begins with), the prompt
is served as it is, without spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .config import PAGE_TOKENS
from .text import tools as tool_marks
from .text.marks import Marks, Piece
from .text.messages import Weaving, mark_raw
from .text.pieces import encode

Rendering = Callable[[Sequence[Any], Sequence[Any] | None], str]  # messages, tools -> text


class TemplateError(ValueError):
    """The chat template does not let marks through."""


def cut(
    weaving: Weaving, messages: Sequence[Any], tools: Sequence[Any] | None, rendering: Rendering
) -> tuple[Piece, ...]:
    """The rendered prompt in pieces; ``messages`` have the marks of ``weaving``, ``tools`` none yet.

    Raises:
        TemplateError: the marks changed what the template makes of the messages.
    """
    marks = weaving.marks
    plain = rendering([unmarked(message, marks) for message in messages], tools)
    marked = tools
    if tools and (weaving.tool_names is None or weaving.tool_names):
        marked = tool_marks.mark(tools, marks, weaving.numbers)
    try:
        text = rendering(messages, marked)
    except Exception as error:  # whatever a template raises: without marks it did not
        raise TemplateError(f"the chat template fails on a marked text: {error}") from error
    if marks.remove(text) != plain:
        raise TemplateError("the chat template renders a text differently when it is marked")
    spans: list[tuple[int, int]] = []
    for region in marks.regions(text):
        place = region.start, region.end
        if region.number >= weaving.numbers and tools and marked:
            number = region.number - weaving.numbers
            if not weaving.declares(tools[number]):
                continue
            place = tool_marks.whole(text, region, marked[number])
        if not spans or place[0] >= spans[-1][1]:
            spans.append(place)
    return marks.cut(text, spans)


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    page_tokens: int = PAGE_TOKENS,
    every_message: bool = False,
) -> tuple[list[int], list[list[int]]]:
    """Token ids and spans of a chat in the OpenAI format, without a server.

    Text parts and tools with ``"cache_control": {"type": "ephemeral"}`` are spans; with
    ``every_message`` all texts and tools are.

    Raises:
        ValueError: a malformed ``cache_control``, which is named.
        TemplateError: the tokenizer's template does not let marks through.
    """
    weaving, marked = mark_raw(messages, tools, every_message=every_message)

    def rendering(messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
            )
        )

    pieces = cut(weaving, marked, tools, rendering)
    # the template has written the special tokens already
    found = encode(tokenizer, pieces, page_tokens=page_tokens, special_tokens=False)
    return found.input_ids, found.spans


def unmarked(value: Any, marks: Marks) -> Any:
    """A message without marks."""
    if isinstance(value, str):
        return marks.remove(value)
    if isinstance(value, dict):
        return {key: unmarked(inner, marks) for key, inner in value.items()}
    if isinstance(value, list):
        return [unmarked(inner, marks) for inner in value]
    return value
