"""The root: whole pages, tokens of the vocabulary, repeated text."""

from __future__ import annotations

import logging

import pytest

from tessera_sglang.config import AUTO_ROOT_TEXT, VARIABLE, ConfigError
from tessera_sglang.root import root_tokens

PAGE = 8
VOCAB = 300
BOS = 299


class Characters:
    """A tokenizer of one token per character, with or without a BOS in front."""

    def __init__(self, bos: bool = True) -> None:
        self.bos = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(character) for character in text]
        return [BOS, *ids] if self.bos and add_special_tokens else ids


def root(
    span_root: str | list[int],
    *,
    tokenizer: Characters | None = None,
    vocab: int = VOCAB,
    page: int = PAGE,
) -> list[int]:
    return list(root_tokens(span_root, tokenizer=tokenizer, vocab_size=vocab, page_size=page))


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize("page", [1, 8, 64, 1024])
def test_auto_is_one_page_of_bos_and_the_sentence(page: int) -> None:
    ids = root("auto", tokenizer=Characters(), page=page)
    repeated = [BOS, *codes(AUTO_ROOT_TEXT * (1 + page // len(AUTO_ROOT_TEXT)))]
    assert ids == repeated[:page]


def test_a_tokenizer_without_bos_adds_none() -> None:
    assert root("auto", tokenizer=Characters(bos=False)) == codes(AUTO_ROOT_TEXT)[:PAGE]


def test_none_is_no_root() -> None:
    assert root("none") == root("none", tokenizer=Characters()) == []


def test_a_short_text_is_repeated_until_its_page_is_full() -> None:
    assert root("abc", tokenizer=Characters()) == [BOS, *codes("abcabca")]


@pytest.mark.parametrize(("length", "pages"), [(7, 1), (8, 2), (15, 2), (16, 3)])
def test_a_text_has_as_many_pages_as_it_needs_with_bos(length: int, pages: int) -> None:
    text = "abcdefghijklmnopqrst"[:length]
    ids = root(text, tokenizer=Characters())
    assert len(ids) == pages * PAGE
    assert ids == [BOS, *codes(text * 3)][: pages * PAGE]


def test_bos_stands_once() -> None:
    assert root("ab", tokenizer=Characters()).count(BOS) == 1


@pytest.mark.parametrize("ids", [[], list(range(8)), list(range(16)), [0] * 7 + [VOCAB - 1]])
def test_a_list_is_taken_as_it_is(ids: list[int]) -> None:
    assert root(ids) == ids


@pytest.mark.parametrize("length", [1, 7, 9, 15])
def test_a_list_that_is_not_whole_pages_is_refused(length: int) -> None:
    expected = f"span_root has {length} token ids, but it must be whole pages of 8"
    with pytest.raises(ConfigError, match=expected):
        root([1] * length)


@pytest.mark.parametrize("outside", [VOCAB, -1, 2**40, 2**80])
def test_a_token_outside_the_vocabulary_is_named(outside: int) -> None:
    with pytest.raises(ConfigError, match=f"token id {outside}, outside the vocabulary of {VOCAB}"):
        root([1] * 7 + [outside])


def test_a_text_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside the vocabulary of 50"):
        root("text", tokenizer=Characters(), vocab=50)


def test_auto_without_a_tokenizer_is_no_root_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert root("auto") == []
    assert "no tokenizer (--skip-tokenizer-init)" in caplog.text
    assert "list of token ids" in caplog.text


def test_a_text_without_a_tokenizer_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"skip-tokenizer-init.*give a list of token ids") as got:
        root("a text")
    assert str(got.value).startswith(VARIABLE)


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="span_root '' has no tokens"):
        root("", tokenizer=Characters())
