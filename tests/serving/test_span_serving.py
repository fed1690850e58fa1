"""What a server does with spans: one copy, honest counts, isolation, refusals. One server for all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from prompts import PAGE, ROOT, Writer, around, compose
from server import Answer, RequestError, Server

LINK = 1
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def server(mla_model: Path) -> Iterator[Server]:
    config = {"link_pages": LINK, "span_root": ROOT}
    with Server(mla_model, "--chunked-prefill-size", "512", config=config) as running:
        yield running


@pytest.fixture(autouse=True)
def _cold(server: Server) -> None:
    server.flush()


def _same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


def _shared(tokens: int) -> int:
    """Shared tokens of a span that does not end the prompt."""
    return (tokens // PAGE - LINK) * PAGE


# --- one copy, computed once ---------------------------------------------------------------------


def test_sixteen_cold_readers_cause_one_prefill(server: Server) -> None:
    writer = Writer(1)
    document = writer.text(20 * PAGE + 7)
    items = [around(writer.text(50 + i), document, writer.text(10)) for i in range(16)]
    answers = server.generate_all(items, steps=4)
    shared = _shared(len(document))
    assert sorted(a.cached for a in answers) == [0] + [shared] * 15
    one_by_one = [server.generate(*item, steps=4) for item in items]
    for together, alone in zip(answers, one_by_one, strict=True):
        _same(together, alone)
    pages = server.state()["pages"]
    root_and_body = len(ROOT) // PAGE + len(document) // PAGE
    own = sum((len(prompt) - shared + 3) // PAGE for prompt, _ in items)
    assert pages["sealed"] <= root_and_body + own, "the document must be there once"


def test_the_reader_that_caused_a_prefill_reports_it_as_computed(server: Server) -> None:
    writer = Writer(2)
    old, new = writer.text(5 * PAGE), writer.text(7 * PAGE)
    assert server.generate(*around(writer.text(9), old, writer.text(5))).cached == 0
    both = compose((writer.text(30), False), (old, True), (new, True), (writer.text(5), False))
    assert server.generate(*both).cached == _shared(len(old))
    again = compose((writer.text(31), False), (new, True), (old, True), (writer.text(5), False))
    assert server.generate(*again).cached == _shared(len(old)) + _shared(len(new))


def test_the_same_document_twice_in_one_prompt(server: Server) -> None:
    writer = Writer(3)
    document = writer.text(4 * PAGE + 10)
    prompt = compose((writer.text(20), False), (document, True), (writer.text(9), False),
                     (document, True), (writer.text(9), False))  # fmt: skip
    cold = server.generate(*prompt)
    assert cold.cached == _shared(len(document)), "the second use is a hit on the first"
    warm = server.generate(*prompt)
    assert warm.cached >= 2 * _shared(len(document))
    _same(cold, warm)


def test_a_conversation_keeps_its_spans_and_adds_new_ones(server: Server) -> None:
    writer = Writer(4)
    first, second = writer.text(4 * PAGE + 3), writer.text(5 * PAGE + 60)
    prompt, spans = around(writer.text(40), first, writer.text(90))
    answer = server.generate(prompt, spans, steps=70)
    hits = []
    for extra in ([], second, []):
        prompt = prompt + answer.tokens
        if extra:
            spans = [*spans, [len(prompt), len(prompt) + len(extra)]]
            prompt = prompt + extra
        before = len(prompt)
        prompt = prompt + writer.text(80)
        answer = server.generate(prompt, spans, steps=70)
        hits.append((answer.cached, before))
        server.flush()
        _same(answer, server.generate(prompt, spans, steps=70))
    (plain_turn, length), (with_second, _), (last_turn, last_length) = hits
    assert plain_turn >= length - PAGE, "all that was said before is a hit"
    assert with_second >= _shared(len(first))
    assert last_turn >= last_length - PAGE


# --- lengths and limits --------------------------------------------------------------------------


def test_generated_tokens_are_prefix_too(server: Server) -> None:  # case 7, in pages of 64
    writer = Writer(5)
    prompt = writer.text(100)
    answer = server.generate(prompt, steps=100)
    longer = prompt + answer.tokens + writer.text(50)
    assert server.generate(longer, steps=1).cached == 3 * PAGE  # 199 forwarded tokens


@pytest.mark.parametrize("tokens", [3 * PAGE, 3 * PAGE + 1, 3 * PAGE + 2, 4 * PAGE, 4 * PAGE + 1])
def test_the_last_token_is_always_computed(server: Server, tokens: int) -> None:  # case 8
    prompt = Writer(6).text(tokens)
    server.generate(prompt, steps=1)
    whole = {3 * PAGE + 2: 3 * PAGE}.get(tokens, tokens - 1)  # one row is not worth a fork
    assert server.generate(prompt, steps=1).cached == whole
    server.generate(prompt, [[0, tokens]], steps=1)
    again = server.generate(prompt, [[0, tokens]], steps=1)
    assert again.cached <= again.prompt - 1
    assert again.cached >= (tokens - 1) // PAGE * PAGE - PAGE


def test_stored_spans_are_hits_in_another_order(server: Server) -> None:  # case 8, spans
    writer = Writer(7)
    one, other = writer.text(3 * PAGE), writer.text(3 * PAGE)
    server.generate(*compose((one, True), (other, True), (writer.text(5), False)))
    swapped = server.generate(*compose((other, True), (one, True), (writer.text(5), False)))
    assert swapped.cached == 2 * _shared(3 * PAGE)


def test_prefill_only_requests_are_cached(server: Server) -> None:
    writer = Writer(8)
    prompt, spans = around(writer.text(100), writer.text(5 * PAGE), writer.text(150))
    server.generate(prompt, spans, steps=0)
    warm = server.generate(prompt, spans, steps=8)
    assert warm.cached == (len(prompt) - 1) // PAGE * PAGE
    server.flush()
    _same(warm, server.generate(prompt, spans, steps=8))


def test_spans_shorter_than_the_linked_pages_are_ordinary_text(server: Server) -> None:
    prompt = Writer(9).text(300)
    plain = server.generate(prompt)
    _same(plain, server.generate(prompt, [[10, 20], [20, 20 + PAGE], [100, 190]]))


# --- what comes after a span stays with it -------------------------------------------------------


def test_nothing_computed_after_a_span_is_served_without_it(server: Server) -> None:  # case 26
    writer = Writer(10)
    before, document, other = writer.text(2 * PAGE), writer.text(4 * PAGE), writer.text(4 * PAGE)
    after = writer.text(3 * PAGE)
    server.generate(*around(before, document, after))
    whole = before + document + after
    plain = server.generate(whole)
    assert plain.cached == len(before) + LINK * PAGE, (
        "what stands before the span's run is plain text"
    )
    moved = server.generate(*around(before[:PAGE], document, after))
    assert moved.cached == _shared(len(document)) + PAGE
    swapped = server.generate(*around(before, other, after))
    assert swapped.cached == len(before)
    server.flush()
    _same(plain, server.generate(whole))


def test_only_equal_ids_are_hits(server: Server) -> None:  # case 27
    writer = Writer(11)
    document = writer.text(5 * PAGE)
    server.generate(*around(writer.text(7), document, writer.text(5)))
    changed = [*document]
    changed[3 * PAGE - 1] += 1
    answer = server.generate(*around(writer.text(7), changed, writer.text(5)))
    equal = 2 * PAGE + PAGE - 1 - PAGE  # the first page is linked: computed in place
    assert answer.cached == equal, "no further than the equal tokens of the third page"


def test_a_plain_prompt_and_a_span_are_different_things(server: Server) -> None:
    document = Writer(12).text(4 * PAGE)
    plain = server.generate(document + [77])
    spanned = server.generate(document + [77], [[0, len(document)]])
    assert spanned.cached == PAGE, (
        "the linked page is the plain prompt's first page; bodies have a root"
    )
    server.flush()
    _same(plain, server.generate(document + [77]))


NAMESPACES: list[dict[str, Any]] = [
    {},
    {"cache_salt": "t1"},
    {"cache_salt": "t2"},
    {"extra_key": "t1"},
    {"extra_key": "ab", "cache_salt": "c"},
    {"extra_key": "a", "cache_salt": "bc"},
]


def test_namespaces_never_share(server: Server) -> None:  # case 22
    writer = Writer(13)
    prompt, spans = around(writer.text(PAGE), writer.text(4 * PAGE), writer.text(PAGE))
    for fields in NAMESPACES:
        assert server.generate(prompt, spans, **fields).cached == 0, fields
        assert server.generate(prompt, **fields).cached <= 2 * PAGE, fields  # own plain prefix only
    for fields in NAMESPACES:
        assert server.generate(prompt, spans, **fields).cached > 4 * PAGE, fields


# --- aborts --------------------------------------------------------------------------------------


def test_an_aborted_reader_harms_nobody_who_waits(server: Server) -> None:
    writer = Writer(14)
    document = writer.text(60 * PAGE)
    items = [around(writer.text(20 + i), document, writer.text(8)) for i in range(6)]
    with ThreadPoolExecutor(8) as pool:
        victim = pool.submit(server.generate, *items[0], steps=4, rid="victim")
        time.sleep(0.05)
        others = [pool.submit(server.generate, *item, steps=4) for item in items[1:]]
        time.sleep(0.1)
        server.abort("victim")
        answers = [other.result() for other in others]
        with contextlib.suppress(RequestError):  # it may have been done before the abort arrived
            victim.result()
    for item, answer in zip(items[1:], answers, strict=True):
        _same(answer, server.generate(*item, steps=4))
    assert server.generate(*items[0], steps=4).cached >= _shared(len(document)), "the span stays"


def test_an_abort_in_the_middle_of_a_prefill_leaves_clean_pages(server: Server) -> None:  # case 3
    writer = Writer(15)
    prompt = writer.text(40 * PAGE)
    timer = threading.Timer(0.15, server.abort, ["half"])
    timer.start()
    with contextlib.suppress(RequestError):
        server.generate(prompt, steps=1, rid="half")
    timer.join()
    server.generate_all([(writer.text(30 * PAGE), None) for _ in range(8)], steps=1)  # scribble
    part = prompt[: 12 * PAGE]
    answer = server.generate(part)
    server.flush()
    _same(answer, server.generate(part))


def test_ids_that_clients_choose_select_nothing(server: Server) -> None:
    writer = Writer(21)
    prompt, spans = around(writer.text(33), writer.text(5 * PAGE), writer.text(20))
    plain = writer.text(200)
    want_reader, want_plain = server.generate(prompt, spans), server.generate(plain)
    server.flush()
    for number in range(1, 60):  # one of them is what the server calls its own request
        rid = f"tessera-span-{number}"
        _same(want_reader, server.generate(prompt, spans, rid=rid))
        if number % 6 == 0:
            _same(want_plain, server.generate(plain, rid=rid))
            server.flush()


def test_aborting_everything_again_and_again(server: Server) -> None:
    writer = Writer(22)
    items = [
        compose(*((writer.text(3 * PAGE), True) for _ in range(3)), (writer.text(9), False))
        for _ in range(6)
    ]
    with ThreadPoolExecutor(8) as pool:
        for round_number in range(8):
            asked = [pool.submit(server.generate, *item, steps=30) for item in items]
            time.sleep(0.05 * round_number)
            server.post("/abort_request", {"abort_all": True})
            for one in asked:
                with contextlib.suppress(RequestError):
                    one.result()
    assert server.alive()
    assert len(server.generate(*items[0]).tokens) == 16


def test_a_row_is_repointed_before_its_duplicate_is_freed(server: Server) -> None:  # case 2
    writer = Writer(23)
    prompt = writer.text(6 * PAGE + 20)
    with ThreadPoolExecutor(24) as pool:
        twins = [pool.submit(server.generate, prompt, steps=80) for _ in range(2)]
        scribbles = [
            pool.submit(server.generate, writer.text(5 * PAGE), steps=4) for _ in range(16)
        ]
        answers = [twin.result() for twin in twins]
        for scribble in scribbles:
            scribble.result()
    server.flush()
    alone = server.generate(prompt, steps=80)
    for answer in answers:
        _same(answer, alone)


def test_what_must_not_be_published_is_not(server: Server) -> None:  # case 4
    writer = Writer(24)
    unpublished = {
        "bootstrap_host": "2.2.2.2"
    }  # how SGLang marks a request that must leave no trace
    prompt = writer.text(24 * PAGE)  # three chunks
    first = server.generate(prompt, steps=3, **unpublished)
    assert server.state()["pages"]["sealed"] == 0
    assert server.state()["held_tokens"] == 0
    again = server.generate(prompt, steps=3, **unpublished)
    assert again.cached == 0
    _same(first, again)
    spanned = around(writer.text(30), writer.text(4 * PAGE), writer.text(200))
    server.generate(*spanned, steps=3, **unpublished)
    assert server.generate(*spanned, steps=3).cached == _shared(4 * PAGE), "only the span stays"


# --- reporting -----------------------------------------------------------------------------------


def test_counters_only_grow_and_divide(server: Server) -> None:  # case 30
    writer = Writer(16)
    prompt, spans = around(writer.text(70), writer.text(4 * PAGE), writer.text(20))
    before = server.state()["traffic"]
    cold, warm = (server.generate(prompt, spans) for _ in range(2))
    after = server.state()["traffic"]
    grown = {name: after[name] - before[name] for name in after}
    assert grown["lookup"] == cold.prompt + warm.prompt
    assert grown["span_hit"] + grown["prefix_hit"] == cold.cached + warm.cached
    assert grown["span_hit"] == _shared(4 * PAGE)


def test_flush_succeeds_right_after_an_answer(server: Server) -> None:  # case 30
    writer = Writer(17)
    for number in range(5):
        server.generate(*around(writer.text(9), writer.text(3 * PAGE), writer.text(5)), steps=2)
        response = server.post("/flush_cache?timeout=10", {})
        assert response.status_code == 200, (number, response.text)
        assert server.state()["held_tokens"] == 0


def test_everything_adds_up(server: Server) -> None:  # case 1
    writer = Writer(18)
    first = writer.text(100)
    server.generate(first, steps=1)
    server.generate(first[:64] + writer.text(36), steps=1)
    state = server.state()
    assert state["pages"] == {"sealed": 1, "locked": 0, "held": 0, "evictable": 1}
    server.generate(writer.text(20), steps=1)
    after = server.state()
    assert after["held_tokens"] == state["held_tokens"] == PAGE, "a partial page is given back"


# --- refusals ------------------------------------------------------------------------------------

MALFORMED: list[tuple[Any, str]] = [
    ([[0, 70], [60, 130]], "spans[1]"),
    ([[70, 10]], "spans[0]"),
    ([[-1, 10]], "spans[0]"),
    ([[0, 50], [60, 1000]], "spans[1]"),
    ([[0.5, 10]], "spans[0]"),
    ([[0, True]], "spans[0]"),
    ([["0", "10"]], "spans[0]"),
    ([[0, 10, 20]], "spans[0]"),
    ([7], "spans[0]"),
    ("0-10", "spans"),
    ({"start": 0, "end": 10}, "spans"),
    ([[i, i + 1] for i in range(10_000)], "spans[256]"),
]


@pytest.mark.parametrize(("spans", "entry"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_spans_are_a_400_that_names_the_entry(
    server: Server, spans: Any, entry: str
) -> None:
    with pytest.raises(RequestError) as raised:
        server.generate(Writer(19).text(200), spans)
    assert raised.value.status == 400
    assert entry in raised.value.body
    assert server.alive()


@pytest.mark.parametrize("fields", [{"logprob_start_len": 0}, {"session_params": {"id": "s"}}])
def test_wishes_that_spans_can_not_meet_are_a_400(server: Server, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        server.generate(Writer(20).text(300), [[0, 200]], **fields)
    assert raised.value.status == 400
    assert next(iter(fields)) in raised.value.body


def test_an_id_outside_the_vocabulary_is_a_400(server: Server) -> None:
    with pytest.raises(RequestError) as raised:
        server.generate([20, 30, 512])
    assert raised.value.status == 400
    assert "input_ids[2]" in raised.value.body
    assert server.alive()


def test_metrics_are_served(server: Server) -> None:
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    assert "sglang:" in text
