"""Every span is encoded on its own, and the prompt still spells the same text."""

from __future__ import annotations

import pytest
from tokenizers_for_tests import TEXTS, byte_level, metaspace

from tessera_sglang.text.marks import Piece
from tessera_sglang.text.pieces import CutError, encode

SPAN = TEXTS[1]


@pytest.fixture(params=["bare", "bos", "metaspace", "merging"])
def tokenizer(request: pytest.FixtureRequest) -> object:
    if request.param in ("metaspace", "merging"):
        return metaspace(merges_newlines=request.param == "merging")
    return byte_level(bos=request.param == "bos")


def _plain(text: str) -> Piece:
    return Piece(text, span=False)


def _span(text: str) -> Piece:
    return Piece(text, span=True)


def test_a_span_has_the_same_ids_behind_any_neighbour(tokenizer):
    found = []
    for before in ("The keeper", "Who opens the gate? ", "x\n", "open"):
        encoded = encode(
            tokenizer,
            [_plain(before), _span(SPAN), _plain(" closes")],
            page_tokens=8,
            special_tokens=True,
        )
        ((start, end),) = encoded.spans
        found.append(encoded.input_ids[start:end])
    assert all(ids == found[0] for ids in found)
    assert len(found[0]) >= 8


def test_pieces_spell_the_text(tokenizer):
    pieces = [
        *(_plain("The gate"), _span(SPAN), _plain(" day"), _span(TEXTS[0])),
        *(_plain("\n\nAsk"), _span(SPAN), _plain("?")),
    ]
    encoded = encode(tokenizer, pieces, page_tokens=4, special_tokens=True)
    text = "".join(piece.text for piece in pieces)
    assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True).lstrip() == text
    assert len(encoded.spans) == 3
    for (start, end), wanted in zip(encoded.spans, (SPAN, TEXTS[0], SPAN), strict=True):
        assert tokenizer.decode(encoded.input_ids[start:end]).lstrip() == wanted


def test_special_tokens_are_those_of_the_whole_text(tokenizer):
    pieces = [_plain("The gate "), _span(SPAN)]
    whole = encode(tokenizer, pieces, page_tokens=8, special_tokens=True).input_ids
    bare = encode(tokenizer, pieces, page_tokens=8, special_tokens=False).input_ids
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    adds = tokenizer.encode("a")[0] == bos
    assert whole == ([bos, *bare] if adds else bare)
    assert bos not in bare


def test_a_span_may_open_the_prompt(tokenizer):
    encoded = encode(tokenizer, [_span(SPAN)], page_tokens=8, special_tokens=True)
    assert encoded.input_ids == tokenizer.encode(SPAN)
    ((start, end),) = encoded.spans
    assert end == len(encoded.input_ids)
    assert start == len(encoded.input_ids) - len(tokenizer.encode(SPAN, add_special_tokens=False))


def test_what_is_too_short_to_share_is_encoded_with_its_neighbours(tokenizer):
    text = "The keeper opens the gate at six"
    pieces = [_plain(text[:7]), _span(text[7:12]), _plain(text[12:])]
    encoded = encode(tokenizer, pieces, page_tokens=64, special_tokens=True)
    assert encoded.spans == []
    assert encoded.input_ids == tokenizer.encode(text)


def test_a_tokenizer_that_can_not_begin_inside_a_text_says_so():
    class Joined:
        """Gives one token a text, so that no text is the beginning of another."""

        def encode(self, text: str, **options: object) -> list[int]:
            return [len(text)] if text else []

    with pytest.raises(CutError, match="puts a space before a text"):
        encode(Joined(), [_plain("a"), _span("b" * 9)], page_tokens=1, special_tokens=False)
