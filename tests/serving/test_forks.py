"""A match that ends inside a page copies its equal rows instead of computing them again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompts import PAGE, ROOT, Writer, around
from server import Answer, Server

TOLERANCE = 1e-4  # of a log-probability
SMALLEST = PAGE // 8


@pytest.fixture(scope="module", params=["mla", "llama"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    model: Path = request.getfixturevalue(f"{request.param}_model")
    config = {"link_pages": 1, "span_root": ROOT, "verify": "latents"}
    flags = ["--chunked-prefill-size", "256", "--radix-eviction-policy", "slru"]
    with Server(model, *flags, config=config) as running:
        yield running


@pytest.fixture(autouse=True)
def _cold(server: Server) -> None:
    server.flush()


def _same(warm: Answer, cold: Answer) -> None:
    assert warm.tokens == cold.tokens
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=TOLERANCE)


def _equal_tokens(count: int) -> int:
    """What is cached of a prompt whose first ``count`` tokens are known and sealed."""
    return count if count % PAGE >= SMALLEST else count // PAGE * PAGE


def test_rows_of_a_partly_equal_page_are_cached_tokens(server: Server) -> None:
    writer = Writer(31)
    known = writer.text(6 * PAGE + 5)
    counts = [3, SMALLEST, 63, 64, 65, 100, 200, 5 * PAGE + 1, 5 * PAGE + 40, 6 * PAGE - 1]
    prompts = [known[:count] + writer.text(150 + count) for count in counts]
    cold = []
    for prompt in prompts:
        server.flush()
        cold.append(server.generate(prompt))
    server.flush()
    server.generate(known, steps=1)
    warm = [server.generate(prompt) for prompt in prompts]
    for count, one, other in zip(counts, warm, cold, strict=True):
        assert one.cached >= _equal_tokens(count), count  # an earlier prompt may share one more
        assert one.cached <= count + 1, count
        details = one.meta.get("cached_tokens_details") or {}
        assert details.get("host", 0) == 0, "copied on the device"
        _same(one, other)
    together = server.generate_all([(prompt, None) for prompt in prompts])
    for one, other in zip(together, cold, strict=True):
        assert one.cached >= (one.prompt - 1) // PAGE * PAGE
        _same(one, other)


def test_the_page_of_the_source_is_not_written(server: Server) -> None:
    writer = Writer(32)
    known, own = writer.text(3 * PAGE), writer.text(300)
    first = server.generate(known, steps=8)
    assert server.generate(known[: PAGE + 30] + own).cached == PAGE + 30
    again = server.generate(known, steps=8)
    assert again.cached == 3 * PAGE - 1
    _same(again, first)


def test_remaining_tokens_of_a_reader_fork_too(server: Server) -> None:
    writer = Writer(33)
    preamble, document = writer.text(100), writer.text(4 * PAGE)
    prompts = [around(preamble, document, writer.text(90)) for _ in range(3)]
    cold = []
    for prompt, spans in prompts:
        server.flush()
        cold.append(server.generate(prompt, spans))
    server.flush()
    warm = [server.generate(prompt, spans) for prompt, spans in prompts]
    shared = 3 * PAGE
    equal = 100 + PAGE  # preamble and linked page
    assert [answer.cached for answer in warm] == [0, shared + equal, shared + equal]
    for one, other in zip(warm, cold, strict=True):
        _same(one, other)


def test_nothing_is_forked_over_a_span_that_others_do_not_see(server: Server) -> None:
    """Case 26 inside a page: rows from where a span became visible belong to its readers."""
    writer = Writer(34)
    head, tail = writer.text(PAGE + 20), writer.text(120)
    one, two = writer.text(4 * PAGE), writer.text(4 * PAGE)
    linked = one[:PAGE]
    reader, spans = around(head, one, tail)
    server.generate(reader, spans)
    assert server.generate(head + tail).cached == PAGE + 20
    server.flush()
    server.generate(reader, spans)
    other, other_spans = around(head, linked + two[PAGE:], tail)
    answer = server.generate(other, other_spans)
    server.flush()
    _same(answer, server.generate(other, other_spans))
    assert answer.cached <= PAGE + 20 + PAGE, "up to where the other document became visible"


def test_comparing_latents_changes_no_answer(server: Server) -> None:
    """Pages that differ are made in tests/test_cache.py; whether requests meet is the scheduler's."""
    writer = Writer(35)
    prompt = writer.text(5 * PAGE + 9)
    cold = server.generate(prompt)
    server.flush()
    for answer in server.generate_all([(prompt, None)] * 6):
        _same(answer, cold)
    state = server.state()
    assert state["counters"]["collisions"] == 0
    assert state["pages"]["sealed"] == state["pages"]["evictable"] >= 5
    assert state["paged_tier"]["in_use"] == 0


def test_a_page_costs_what_the_ledger_says(server: Server) -> None:
    assert "B a page, as the ledger has it" in server.log()
    assert f"{server.state()['page_bytes']} B a page" in server.log()
