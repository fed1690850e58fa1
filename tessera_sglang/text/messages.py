"""Which texts of a chat are spans, and marks around them.

``cache_control`` is read from the request as the caller wrote it, since the parsed one has dropped it;
marks are put into the parsed one, at the same place, and taken out again when the prompt is rendered.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .marks import Marks
from .tools import function_of


@dataclass(slots=True)
class Weaving:
    """Marks put into somebody's messages, and how to take them out again."""

    marks: Marks = field(default_factory=Marks.drawn)
    tool_names: frozenset[str] | None = frozenset()  # that are spans; None: all
    numbers: int = 0  # given out
    _undo: list[tuple[Any, str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything is marked."""
        return bool(self.numbers) or self.tool_names is None or bool(self.tool_names)

    def around(self, holder: Any, name: str) -> None:
        """Mark the text that ``holder`` has under ``name``, a key or an attribute, unless it is."""
        text = get(holder, name)
        if self.marks.nonce in text:
            return
        marked = self.marks.around(text, self.numbers)
        if marked != text:
            self.numbers += 1
            self._undo.append((holder, name, text))
            put(holder, name, marked)

    def declares(self, tool: Any) -> bool:
        """Whether a tool is a span."""
        return self.tool_names is None or get(function_of(tool), "name") in self.tool_names

    def undo(self) -> None:
        """Everything as it was."""
        while self._undo:
            put(*self._undo.pop())


def mark_chat(
    weaving: Weaving,
    messages: Sequence[Any],
    raw_messages: Sequence[Any],
    *,
    every_message: bool,
) -> None:
    """Mark messages in the OpenAI format: text parts with ``cache_control``, or all texts.

    The last message stays as it is when it is an assistant's: a server may go on from it, which
    templates do not see.

    Raises:
        ValueError: a malformed ``cache_control``.
    """
    for number, message in enumerate(messages):
        last = number == len(messages) - 1
        if last and get(message, "role") == "assistant":
            continue
        raw = raw_messages[number] if number < len(raw_messages) else None
        content = get(message, "content")
        if isinstance(content, str):
            if every_message:
                weaving.around(message, "content")
        elif isinstance(content, list):
            mark_parts(
                weaving,
                content,
                as_list(get(raw, "content")),
                f"messages[{number}].content",
                every_part=every_message,
            )


def mark_parts(
    weaving: Weaving,
    parts: Sequence[Any],
    raw: Sequence[Any],
    where: str,
    *,
    every_part: bool = False,
) -> None:
    """Mark text parts. A part that is not as the caller wrote it is left alone."""
    for number, part in enumerate(parts):
        written = raw[number] if number < len(raw) else None
        text = get(part, "text")
        if not isinstance(text, str) or get(part, "type") not in ("text", "input_text"):
            continue
        declared = is_declared(written, f"{where}[{number}]") and get(written, "text") == text
        if declared or every_part:
            weaving.around(part, "text")


def declared_tools(raw_tools: Any) -> frozenset[str]:
    """Names of the tools with ``cache_control``, on the definition or on its function.

    Raises:
        ValueError: a malformed ``cache_control``.
    """
    names = set()
    for number, tool in enumerate(as_list(raw_tools)):
        function = function_of(tool)
        where = f"tools[{number}]"
        marked = is_declared(tool, where) or is_declared(function, f"{where}.function")
        if marked and isinstance(get(function, "name"), str):
            names.add(function["name"])
    return frozenset(names)


def is_declared(part: Any, where: str) -> bool:
    """Whether a part or tool carries ``cache_control``.

    Raises:
        ValueError: it carries something else under that name.
    """
    control = get(part, "cache_control") if isinstance(part, dict) else None
    if control is None:
        return False
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise ValueError(f'{where}.cache_control must be {{"type": "ephemeral"}}, got {control!r}')
    return True


def mark_raw(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    *,
    every_message: bool,
) -> tuple[Weaving, list[dict[str, Any]]]:
    """Marked copies of messages that no server has parsed."""
    copies = copy.deepcopy(list(messages))
    weaving = Weaving(tool_names=None if every_message and tools else declared_tools(tools))
    mark_chat(weaving, copies, messages, every_message=every_message)
    for part in _parts(copies):
        part.pop("cache_control", None)
    return weaving, copies


def get(holder: Any, name: str) -> Any:
    """A key of a dict, an attribute of anything else; None where there is none."""
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def as_list(value: Any) -> list[Any]:
    """A list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def _parts(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield from (part for part in as_list(message.get("content")) if isinstance(part, dict))


def put(holder: Any, name: str, value: Any) -> None:
    """The opposite of :func:`get`."""
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
