"""``custom_params.tessera``: every malformed form is refused, naming the entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tessera_sglang.attention.layout import Span
from tessera_sglang.config import MAX_SPANS
from tessera_sglang.spans import (
    FIELD,
    Overrides,
    SpanError,
    check_request,
    declared,
    overrides,
    parse,
)

PROMPT = 100
PAGE = 4
VOCAB = 50


def refusal(raw: Any, prompt_tokens: int = PROMPT) -> str:
    with pytest.raises(SpanError) as caught:
        parse(raw, prompt_tokens)
    return str(caught.value)


# --- what a request declares ---------------------------------------------------------------------


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"tessera": None}, "text", 5])
def test_a_request_that_declares_nothing_declares_nothing(params: Any) -> None:
    assert declared(params) is None
    assert parse(declared(params), PROMPT) == ()


def test_a_declaration_is_handed_on_as_it_is() -> None:
    raw = [[0, 5], "odd"]
    assert declared({"tessera": {"spans": raw}, "other": 1}) is raw
    assert declared({"tessera": {"spans": None}}) is None


def test_an_object_without_spans_is_a_forgotten_key() -> None:
    with pytest.raises(SpanError, match="has no 'spans'"):
        declared({"tessera": {}})


@pytest.mark.parametrize("tessera", [[[0, 5]], "spans", 1, True, 0, [], "", False])
def test_tessera_must_be_an_object(tessera: Any) -> None:
    with pytest.raises(SpanError, match=r"custom_params\.tessera must be an object") as caught:
        declared({"tessera": tessera})
    assert repr(tessera) in str(caught.value)


@pytest.mark.parametrize("key", ["span", "Spans", 5])
def test_an_unknown_key_is_named(key: Any) -> None:
    with pytest.raises(SpanError, match=f"unknown key '{key}'; remove it") as caught:
        declared({"tessera": {key: 1, "spans": []}})
    for known in ("spans", "text_spans", "link_pages", "root"):
        assert f"'{known}'" in str(caught.value)


def test_text_spans_that_arrive_here_had_no_text() -> None:
    with pytest.raises(SpanError, match=r"tessera\.text_spans needs the prompt as `text`"):
        declared({"tessera": {"text_spans": [[0, 5]], "root": "none"}})
    with pytest.raises(SpanError, match="has 'text_spans' and 'spans'; give one of them"):
        declared({"tessera": {"text_spans": [[0, 5]], "spans": [[0, 5]]}})


# --- well-formed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        [],
        [[0, 1]],
        [[0, 100]],
        [[99, 100]],
        [[0, 5], [5, 9]],
        [[0, 5], [7, 9], [50, 100]],
    ],
)
def test_ascending_disjoint_pairs_inside_the_prompt_are_spans(raw: list[list[int]]) -> None:
    spans = tuple(Span(*entry) for entry in raw)
    assert parse(raw, PROMPT) == spans
    assert parse(tuple(map(tuple, raw)), PROMPT) == spans


def test_as_many_spans_as_allowed_are_allowed() -> None:
    raw = [[2 * n, 2 * n + 1] for n in range(MAX_SPANS)]
    assert len(parse(raw, 2 * MAX_SPANS)) == MAX_SPANS


# --- malformed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [{}, {"0": [0, 5]}, "[[0, 5]]", "", 0, 5, 1.5, True, False])
def test_spans_must_be_a_list(raw: Any) -> None:
    message = refusal(raw)
    assert message == f"{FIELD} must be a list of [start, end] pairs, got {raw!r}"


@pytest.mark.parametrize("entry", [[], [1], [1, 2, 3], 5, "ab", None, {"start": 0, "end": 5}, True])
def test_an_entry_must_be_a_pair(entry: Any) -> None:
    message = refusal([[0, 5], entry])
    assert message == f"{FIELD}[1] must be a pair [start, end], got {entry!r}"


@pytest.mark.parametrize(
    "value", [1.0, 1.5, float("nan"), float("inf"), True, False, "7", "", None, [7], {}]
)
@pytest.mark.parametrize("side", ["start", "end"])
def test_an_offset_must_be_an_integer(side: str, value: Any) -> None:
    entry = [value, 9] if side == "start" else [6, value]
    message = refusal([[0, 5], entry])
    assert message == f"{FIELD}[1]: {side} must be an integer, got {value!r}"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ([-1, 5], "start must not be negative"),
        ([-9, -5], "start must not be negative"),
        ([5, -5], "end must be greater than start"),
        ([7, 7], "end must be greater than start"),
        ([9, 7], "end must be greater than start"),
        ([7, 101], "ends past the prompt, which has 100 tokens"),
        ([100, 101], "ends past the prompt, which has 100 tokens"),
        ([0, 2**70], "ends past the prompt, which has 100 tokens"),
    ],
)
def test_an_interval_must_lie_inside_the_prompt(entry: list[int], problem: str) -> None:
    message = refusal([entry])
    assert message.startswith(f"{FIELD}[0] = {entry}")
    assert problem in message


@pytest.mark.parametrize(
    ("raw", "number", "start"),
    [
        ([[0, 10], [9, 20]], 1, 9),
        ([[0, 10], [0, 10]], 1, 0),
        ([[20, 30], [0, 10]], 1, 0),
        ([[0, 10], [2, 3]], 1, 2),
        ([[0, 10], [10, 20], [19, 30]], 2, 19),
    ],
)
def test_spans_must_ascend_and_not_overlap(raw: list[list[int]], number: int, start: int) -> None:
    message = refusal(raw)
    assert message.startswith(f"{FIELD}[{number}] starts at {start}, before ")
    assert f"{FIELD}[{number - 1}] = {raw[number - 1]} ends" in message
    assert "ascending and must not overlap" in message


@pytest.mark.parametrize("entry", [[0, 1], "nonsense"])
def test_ten_thousand_spans_are_refused_for_their_number(entry: Any) -> None:
    message = refusal([entry] * 10_000)
    assert message.startswith(f"{FIELD}[{MAX_SPANS}]: 10000 spans")
    assert f"at most {MAX_SPANS}" in message


def test_one_span_too_many_is_too_many() -> None:
    raw = [[2 * n, 2 * n + 1] for n in range(MAX_SPANS + 1)]
    assert f"{MAX_SPANS + 1} spans" in refusal(raw, 10**6)


def test_nothing_is_a_span_of_an_empty_prompt() -> None:
    assert "which has 0 tokens" in refusal([[0, 1]], 0)


def test_a_long_value_is_not_repeated_in_full() -> None:
    message = refusal([["x" * 10_000, 5]])
    assert len(message) < 200
    assert message.startswith(f"{FIELD}[0]: start must be an integer, got 'xxx")


# --- overrides -----------------------------------------------------------------------------------


def overridden(**fields: Any) -> Overrides:
    params = {"tessera": {"spans": [[0, 5]], **fields}}
    assert declared(params) == [[0, 5]], "the declaration is read beside them"
    return overrides(params, page_size=PAGE, vocab_size=VOCAB)


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"tessera": None}, "text"])
def test_nothing_is_overridden_by_nothing(params: Any) -> None:
    assert overrides(params, page_size=PAGE, vocab_size=VOCAB) == Overrides(None, None)


@pytest.mark.parametrize("link_pages", [None, 0, 1, 2**40])
def test_link_pages_from_nought_on(link_pages: int | None) -> None:
    assert overridden(link_pages=link_pages) == Overrides(link_pages, None)


@pytest.mark.parametrize("link_pages", [-1, 1.0, True, False, "1", [], {}])
def test_other_link_pages_are_refused(link_pages: Any) -> None:
    with pytest.raises(SpanError, match=r"tessera\.link_pages must be a whole number") as caught:
        overridden(link_pages=link_pages)
    assert repr(link_pages) in str(caught.value)


@pytest.mark.parametrize("root", [None, "auto", "none", [1, 2, 3, 4], list(range(2 * PAGE))])
def test_a_root_by_name_or_in_whole_pages(root: Any) -> None:
    wanted = tuple(root) if isinstance(root, list) else root
    assert overridden(root=root) == Overrides(None, wanted)


@pytest.mark.parametrize(
    ("root", "problem"),
    [
        ("Auto", 'must be "auto", "none" or a list of token ids, got \'Auto\''),
        ("", "must be"),
        (0, "must be"),
        (False, "must be"),
        ({"ids": []}, "must be"),
        ([], "has 0 token ids"),
        ([1, 2, 3], "has 3 token ids, but it must be whole pages of 4; add or remove ids"),
        ([1, 2, 3, 50], "root[3] must be a token id below 50, got 50"),
        ([1, -2, 3, 4], "root[1] must be a token id below 50, got -2"),
        ([1, 2, True, 4], "root[2] must be a token id below 50, got True"),
        ([1, 2, 3.0, 4], "root[2] must be a token id below 50, got 3.0"),
    ],
)
def test_other_roots_are_refused(root: Any, problem: str) -> None:
    with pytest.raises(SpanError) as caught:
        overridden(root=root)
    assert str(caught.value).startswith("custom_params.tessera.root")
    assert problem in str(caught.value)


# --- input log-probabilities ---------------------------------------------------------------------

SPANS = parse([[0, 10], [20, 60]], PROMPT)


def request(**fields: Any) -> Any:
    return SimpleNamespace(**{"sampling_params": {}, "return_logprob": True, **fields})


@pytest.mark.parametrize("start", [None, -1, 60, 61, PROMPT])
def test_input_logprobs_may_start_behind_the_last_span(start: int | None) -> None:
    check_request(request(logprob_start_len=start), SPANS, None)
    with pytest.raises(SpanError, match="this server serves no spans: because"):
        check_request(request(logprob_start_len=start), SPANS, "because")


@pytest.mark.parametrize("start", [-2, 0, 15, 59])
def test_input_logprobs_may_not_start_before_it(start: int) -> None:
    with pytest.raises(SpanError) as caught:
        check_request(request(logprob_start_len=start), SPANS, None)
    assert f"logprob_start_len = {start} is before the end of the last of {FIELD}, 60" in str(
        caught.value
    )
    check_request(request(logprob_start_len=start, return_logprob=False), SPANS, None)
