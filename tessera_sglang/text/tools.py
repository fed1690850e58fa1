"""Tool definitions as spans.

Most templates print a definition as JSON: then the span is the whole object, from brace to brace. Others
print it in a form of their own: then it runs from the first to the last of its name and descriptions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from .marks import Marks, Region

# How far an object's first brace is searched for, in braces and in characters decoded on the way: a
# definition that buries its first description deeper is a span without its first few fields.
_MOST_BRACES = 256
_MOST_CHARACTERS = 1 << 20


def mark(tools: Sequence[Any], marks: Marks, first: int) -> list[Any]:
    """Copies of the definitions, numbered from ``first``: names and descriptions are marked."""
    copies = [copy.deepcopy(tool) for tool in tools]  # one by one: they may share parts
    for number, tool in enumerate(copies, start=first):
        for holder, key in _leaves(function_of(tool)):
            holder[key] = marks.around(holder[key], number)
    return copies


def whole(text: str, region: Region, tool: Any) -> tuple[int, int]:
    """A marked definition in a rendered text: the JSON object around its marks, or its marks."""
    known = _forms(tool)
    decoder = json.JSONDecoder()
    best: tuple[int, int] | None = None
    brace, decoded = region.start, 0
    for _ in range(_MOST_BRACES):
        brace = text.rfind("{", 0, brace)
        if brace < 0 or decoded > _MOST_CHARACTERS:
            break
        try:
            value, end = decoder.raw_decode(text, brace)
        except (ValueError, RecursionError):
            continue
        decoded += end - brace
        if end >= region.end and value in known:
            best = brace, end
        elif end >= region.end and best is not None:
            break  # something larger than the definition
    return best or (region.start, region.end)


def function_of(tool: Any) -> Any:
    """The part of a definition that has the name, wrapped (OpenAI) or not."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else tool


def _leaves(function: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The texts that templates print as they are: the name and all descriptions."""
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        yield function, "name"
    yield from _descriptions(function)


def _descriptions(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "description" and isinstance(inner, str):
                yield value, key
            else:
                yield from _descriptions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _descriptions(inner)


def _forms(tool: Any) -> list[Any]:
    function = function_of(tool)
    return [tool] if function is tool else [tool, function]
