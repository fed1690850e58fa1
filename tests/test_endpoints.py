"""What of a request's body is read a second time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tessera_sglang.endpoints.bodies import has_mark, marked_body

MARK = {"cache_control": {"type": "ephemeral"}}


class _Request:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def body(self) -> bytes:
        return self._body


def _read(request: Any) -> Any:
    return asyncio.run(marked_body(request))


def test_only_a_body_with_the_word_is_read_again():
    assert _read(_Request(b'{"messages": []}')) is None
    assert _read(_Request(json.dumps(MARK).encode())) == MARK
    assert _read(object()) is None, "a gRPC message has no body"


def test_a_body_nested_too_deep_says_so():
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(ValueError, match="nested too deep"):
        _read(_Request(f'{{"x": {deep}, "cache_control": 1}}'.encode()))


def test_marks_are_told_from_texts_and_schemas():
    text = {"type": "text", "text": "cache_control"}
    tool = {"function": {"parameters": {"properties": {"cache_control": {"type": "string"}}}}}
    assert not has_mark({"messages": [{"content": [text]}], "tools": [tool]})
    assert has_mark({"messages": [{"content": [{**text, **MARK}]}]})
    assert has_mark({"messages": [{"content": "x", **MARK}]})
    assert has_mark({"tools": [{**tool, **MARK}]})
