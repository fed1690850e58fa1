"""Spans of a text, by code points."""

from __future__ import annotations

import pytest

from tessera_sglang.text.marks import Piece
from tessera_sglang.text.offsets import cut, text_spans

TEXT = "né👍 b c"


def test_a_text_is_cut_at_code_points():
    assert cut(TEXT, [[2, 3], [4, 5]]) == (
        Piece("né", span=False),
        Piece("👍", span=True),
        Piece(" ", span=False),
        Piece("b", span=True),
        Piece(" c", span=False),
    )
    assert cut(TEXT, [[0, len(TEXT)]]) == (Piece(TEXT, span=True),)
    assert cut(TEXT, []) == (Piece(TEXT, span=False),)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("0-3", "text_spans must be a list"),
        ([[0]], r"text_spans\[0\] must be a pair"),
        ([[0, True]], r"text_spans\[0\] must be a pair \[start, end\] of integers"),
        ([[0, 1.5]], r"text_spans\[0\] must be a pair"),
        ([[-1, 2]], r"start must be from 0 on"),
        ([[2, 2]], r"below end"),
        ([[0, 3], [2, 4]], r"text_spans\[1\] starts at 2, before the previous one ends at 3"),
        ([[0, 8]], r"ends past the text, which has 7 characters"),
        ([[0, 1]] * 257, r"text_spans\[256\]: 257 spans, but a request may declare at most 256"),
    ],
)
def test_what_is_wrong_is_named(raw, message):
    with pytest.raises(ValueError, match=message):
        cut(TEXT, raw)


def test_offsets_are_found_in_a_request():
    assert text_spans({"tessera": {"text_spans": [[0, 1]]}}) == [[0, 1]]
    assert text_spans({"tessera": {"spans": [[0, 1]]}}) is None
    assert text_spans({"tessera": 3}) is None
    assert text_spans(None) is None
