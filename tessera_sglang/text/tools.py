"""Tool definitions as spans.

Most templates print a definition as JSON: then the span is the whole object, from brace to brace. Others
print it in a form of their own: then it runs from the tool's name to its last description.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from .marks import Marks

_CANDIDATES = 64  # opening braces before a tool's name that are tried as the start of its JSON


def mark(tools: Sequence[Any], marks: Marks, names: frozenset[str] | None) -> list[Any]:
    """Copies of the definitions, those called by ``names`` (None: all of them) with marks inside."""
    return [_marked(tool, marks, names) for tool in tools]


def locate(text: str, marks: Marks, tools: Sequence[Any]) -> list[tuple[int, int]]:
    """Where marked definitions stand as JSON in a rendered text."""
    known = [form for tool in tools for form in _forms(tool)]
    decoder = json.JSONDecoder()
    found: list[tuple[int, int]] = []
    at = text.find(marks.tool)
    while at >= 0:
        place = _object_around(text, at, decoder, known)
        if place is not None:
            found.append(place)
        at = text.find(marks.tool, at + 1 if place is None else place[1])
    return found


def function_of(tool: Any) -> Any:
    """The part of a definition that has the name, wrapped (OpenAI) or not."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else tool


def _marked(tool: Any, marks: Marks, names: frozenset[str] | None) -> Any:
    name = function_of(tool).get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str) or (names is not None and name not in names):
        return tool
    tool = copy.deepcopy(tool)
    function = function_of(tool)
    function["name"] = marks.tool + name
    holder = _last_description(function)
    if holder is not None:
        holder["description"] += marks.closing
    return tool


def _last_description(value: Any) -> dict[str, Any] | None:
    """The innermost object that holds the last description in the order of the definition."""
    last: dict[str, Any] | None = None
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "description" and isinstance(inner, str) and inner:
                last = value
            else:
                last = _last_description(inner) or last
    elif isinstance(value, list):
        for inner in value:
            last = _last_description(inner) or last
    return last


def _forms(tool: Any) -> list[Any]:
    function = function_of(tool)
    return [tool] if function is tool else [tool, function]


def _object_around(
    text: str, at: int, decoder: json.JSONDecoder, known: Sequence[Any]
) -> tuple[int, int] | None:
    """The outermost JSON object around ``at`` that is one of the definitions."""
    best: tuple[int, int] | None = None
    brace = at
    for _ in range(_CANDIDATES):
        brace = text.rfind("{", 0, brace)
        if brace < 0:
            break
        try:
            value, end = decoder.raw_decode(text, brace)
        except (ValueError, RecursionError):
            continue
        if end <= at:
            break  # an object before ours: nothing further out can be ours alone
        if value in known:
            best = brace, end
    return best
