"""``span(text)``: a text that remembers what of it was declared."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tessera_sglang import SpannedText, program, span, text_part


def test_spans_survive_concatenation_on_both_sides():
    text = "You check. " + span("The document.") + "\nWho? " + span("Another.") + "!"
    assert text == "You check. The document.\nWho? Another.!"
    assert [text[start:end] for start, end in text.spans] == ["The document.", "Another."]


def test_plus_equals_keeps_them_as_sglang_builds_its_text():
    text = ""
    for part in ("a", span("bc"), "d", span("ef")):
        text += part
    assert text == "abcdef"
    assert text.spans == ((1, 3), (4, 6))
    assert str(text).spans == text.spans  # how a fork copies it


def test_a_slice_keeps_whole_spans_only():
    text = "ab" + span("cdef") + "gh"
    assert text[1:].spans == ((1, 5),)
    assert text[:6].spans == ((2, 6),)
    assert text[3:].spans == ()
    assert text[::2].__class__ is str
    assert text[-2:] == "gh"
    assert text[2] == "c"


def test_it_is_an_ordinary_text_otherwise():
    text = "a" + span("b")
    assert json.dumps(text) == '"ab"'
    assert hash(text) == hash("ab")
    assert f"{text}" == "ab"
    assert pickle.loads(pickle.dumps(text)).spans == text.spans
    assert span("").spans == ()
    assert span(span("ab")).spans == ((0, 2),)


def test_only_texts_are_spans():
    with pytest.raises(TypeError, match=r"span\(\) takes a text, got bytes"):
        span(b"ab")
    with pytest.raises(TypeError):
        span("a") + 1  # type: ignore[operator]


def test_content_parts_for_the_chat_apis():
    assert text_part("ab") == {
        "type": "text",
        "text": "ab",
        "cache_control": {"type": "ephemeral"},
    }
    assert isinstance(span("a"), SpannedText)


# --- which servers are sent spans ----------------------------------------------------------------


class _Info(BaseHTTPRequestHandler):
    """Answers ``/server_info`` with what the test wants to be answered."""

    def do_GET(self) -> None:
        self.server.asked += 1
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def info() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Info)
    server.asked = 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    program._serves.clear()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _sent(info: HTTPServer) -> object:
    """What a program's request becomes."""
    url = f"http://127.0.0.1:{info.server_port}/generate"
    request = {"text": "a" + span("bc"), "sampling_params": {"max_new_tokens": 1}}
    return program._declared(url, request, {})["sampling_params"].get("custom_params")


SPANS = {"tessera": {"text_spans": [[1, 3]]}}


def _state(spans: object) -> str:
    return json.dumps({"internal_states": [{"tessera": {"spans": spans}}]})


def test_a_server_with_tessera_gets_spans_and_is_asked_once(info):
    info.answer = 200, _state({"refused": None})
    assert [_sent(info), _sent(info)] == [SPANS, SPANS]
    assert info.asked == 1


@pytest.mark.parametrize("body", [_state({"refused": "the model"}), '{"internal_states": [{}]}'])
def test_a_server_without_spans_gets_plain_text_and_one_warning(info, body, caplog):
    info.answer = 200, body
    with caplog.at_level(logging.WARNING):
        assert [_sent(info), _sent(info)] == [None, None]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "answer", [(404, "<html>"), (503, "{}"), (401, "{}"), (200, "[1]"), (200, "<html>")]
)
def test_a_server_that_does_not_say_gets_them_and_is_asked_again(info, answer):
    info.answer = answer
    assert _sent(info) == SPANS
    info.answer = 200, _state({"refused": "the model"})
    assert _sent(info) is None
