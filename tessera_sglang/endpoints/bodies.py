"""What the caller wrote, which SGLang's parsed request has dropped, and where it is kept meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tessera_sglang import ignored
from tessera_sglang.compat import attention_backends
from tessera_sglang.config import BACKEND, load
from tessera_sglang.text.messages import Weaving

_BODY = "tessera_body"
_WEAVING = "tessera_weaving"
_WORD = b"cache_control"
_SCHEMAS = ("parameters", "input_schema")  # a property may be called what it likes


def selected() -> bool:
    """Whether this server runs Tessera."""
    return BACKEND in attention_backends()


def active() -> bool:
    """Whether it reads spans."""
    return selected() and load().index == "content"


async def marked_body(raw_request: Any, manager: Any) -> Any:
    """The JSON of an HTTP request, or None where nobody marked anything or it can not be read again."""
    if not active() or getattr(raw_request, "body", None) is None:
        return None  # gRPC: its messages have no such field
    body = await raw_request.body()
    if _WORD not in body:
        return None
    try:
        return json.loads(body)
    except RecursionError:
        ignored.count(manager, "body", "it is nested too deep")
        return None


def keep_body(raw_request: Any, body: Any) -> None:
    """For :func:`body_of`."""
    setattr(raw_request.state, _BODY, body)


def body_of(raw_request: Any) -> Any:
    """What was kept with an HTTP request; None without one."""
    return getattr(getattr(raw_request, "state", None), _BODY, None)


def keep_weaving(raw_request: Any, weaving: Weaving) -> None:
    """For :func:`weaving_of`."""
    setattr(raw_request.state, _WEAVING, weaving)


def weaving_of(raw_request: Any) -> Weaving | None:
    """The marks that are in an HTTP request's messages already; None without any."""
    found: Weaving | None = getattr(getattr(raw_request, "state", None), _WEAVING, None)
    return found


def has_mark(body: Any) -> bool:
    """Whether ``cache_control`` stands anywhere but in a text or a tool's schema."""
    return any(True for _ in _marks(body, 0))


def _marks(value: Any, depth: int) -> Iterator[Any]:
    if depth > 8:
        return
    if isinstance(value, dict):
        if value.get("cache_control") is not None:
            yield value
        for key, inner in value.items():
            if key not in _SCHEMAS:
                yield from _marks(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _marks(inner, depth + 1)
