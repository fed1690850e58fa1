"""Pools that are too small, retraction and aborts: nobody starves, nothing leaks, nothing is wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from load import Item, Load, make_items, settle
from prompts import PAGE, ROOT, Writer, around, compose
from server import Answer, RequestError, Server

CONFIG: dict[str, Any] = {"span_root": ROOT, "link_pages": 1}
LONGEST = 1200


Reference = tuple[list[Item], list[Answer]]


@pytest.fixture(scope="module")
def reference(mla_model: Path) -> Reference:
    """The requests of the load, and what a server with room for all answers to each alone."""
    items = make_items(7, 40, longest=LONGEST)
    with Server(mla_model, config=CONFIG, pool_tokens=65536) as server:
        return items, [server.generate(i.prompt, i.spans, steps=i.steps) for i in items]


def _soak(
    model: Path, reference: Reference, seconds: float, *, pool_tokens: int, retract: bool
) -> Load:
    items, answers = reference
    environment = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    if retract:
        environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
    arguments = ["--chunked-prefill-size", "256", *(["--enable-mixed-chunk"] if retract else [])]
    with Server(
        model, *arguments, config=CONFIG, pool_tokens=pool_tokens, environment=environment
    ) as server:
        load = Load(server, items, answers, seed=pool_tokens)
        load.run(seconds)
        assert not load.wrong, load.wrong[:3]
        assert not load.failed, load.failed[:3]
        assert load.stuck == 0
        assert server.alive()
        state = settle(server)
        pages = state["pages"]
        assert isinstance(pages, dict)
        assert state["held_tokens"] == pages["sealed"] * PAGE, "free + evictable is the whole pool"
        assert pages["evictable"] == pages["sealed"]
        log = server.log()
        assert "Traceback" not in log
        assert "leak" not in log.lower()
        assert not retract or "Testing retraction" in log
        counters = state["counters"]
        assert isinstance(counters, dict)
        assert counters["evicted_pages"] > 0, "the pool must be too small"
        server.flush()
        assert server.state()["held_tokens"] == 0
    return load


SMALL = pytest.mark.parametrize(("pool_tokens", "retract"), [(2048, False), (3072, True)])


@SMALL
def test_random_load_on_a_small_pool(
    mla_model: Path, reference: Reference, pool_tokens: int, retract: bool
) -> None:
    load = _soak(mla_model, reference, 20, pool_tokens=pool_tokens, retract=retract)
    assert load.finished > 50


@pytest.mark.slow
@pytest.mark.timeout(2400)
@SMALL
def test_ten_minutes_of_random_load(
    mla_model: Path, reference: Reference, pool_tokens: int, retract: bool
) -> None:
    load = _soak(mla_model, reference, 600, pool_tokens=pool_tokens, retract=retract)
    assert load.finished > 1000


def test_readers_that_do_not_fit_together_are_served_one_after_another(mla_model: Path) -> None:
    writer = Writer(30)
    pool = 1280  # 20 pages
    items = []
    for _ in range(6):  # each needs 2 x 6 pages of spans, the root and 3 pages of its own
        one, other = writer.text(6 * PAGE), writer.text(6 * PAGE)
        items.append(compose((writer.text(30), False), (one, True), (other, True),
                             (writer.text(20), False)))  # fmt: skip
    items.append(
        (writer.text(pool - 6 * PAGE), None)
    )  # a plain request that needs most of the pool
    with Server(mla_model, config=CONFIG, pool_tokens=pool) as server:
        began = time.monotonic()
        together = server.generate_all(items, steps=4, workers=len(items))
        assert time.monotonic() - began < 60
        alone = [server.generate(*item, steps=4) for item in items]
        assert [a.tokens for a in together] == [a.tokens for a in alone]
        settle(server)

        never = around(writer.text(30), writer.text(17 * PAGE), writer.text(100))
        with pytest.raises(RequestError) as raised:
            server.generate(*never, steps=4)
        assert raised.value.status == 400
        assert "pool" in raised.value.body
        shortened = around(writer.text(10), writer.text(12 * PAGE), writer.text(10))
        answer = server.generate(*shortened, steps=600)
        assert 0 < len(answer.tokens) < 600, "generation is cut to what the pool can hold"
        assert server.alive()
