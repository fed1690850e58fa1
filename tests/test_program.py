"""``span(text)``: a text that remembers what of it was declared."""

from __future__ import annotations

import json
import pickle

import pytest

from tessera_sglang import SpannedText, span, text_part


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
