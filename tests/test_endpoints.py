"""What of a request's body is read a second time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tessera_sglang import ignored
from tessera_sglang.endpoints import bodies
from tessera_sglang.endpoints.bodies import has_mark, marked_body

MARK = {"cache_control": {"type": "ephemeral"}}


class _Request:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def body(self) -> bytes:
        return self._body


@pytest.fixture(autouse=True)
def _active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "active", lambda: True)


def _read(request: Any) -> Any:
    return asyncio.run(marked_body(request, manager=None))


def test_only_a_body_with_the_word_is_read_again():
    assert _read(_Request(b'{"messages": []}')) is None
    assert _read(_Request(json.dumps(MARK).encode())) == MARK
    assert _read(object()) is None, "a gRPC message has no body"


def test_a_body_nested_too_deep_is_counted_and_taken_as_unmarked():
    deep = "[" * 100_000 + "]" * 100_000
    before = ignored.counts["body"]
    assert _read(_Request(f'{{"x": {deep}, "cache_control": 1}}'.encode())) is None
    assert ignored.counts["body"] == before + 1


def test_marks_are_told_from_texts_and_schemas():
    text = {"type": "text", "text": "cache_control"}
    tool = {"function": {"parameters": {"properties": {"cache_control": {"type": "string"}}}}}
    assert not has_mark({"messages": [{"content": [text]}], "tools": [tool]})
    assert has_mark({"messages": [{"content": [{**text, **MARK}]}]})
    assert has_mark({"messages": [{"content": "x", **MARK}]})
    assert has_mark({"tools": [{**tool, **MARK}]})
