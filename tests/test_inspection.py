"""What a server says of itself: the line at its start, and its part of ``/server_info``."""

from __future__ import annotations

import json
import logging
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from engine import PAGE, PAGES, Engine

from tessera_sglang import inspection
from tessera_sglang.attention.kernels.base import Phase
from tessera_sglang.intake import SpanSettings


@pytest.fixture(autouse=True)
def selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESSERA_CONFIG", raising=False)
    monkeypatch.setattr(inspection, "attention_backends", lambda: ("tessera", "tessera"))


def scheduler(*, refusal: str | None = None, content: bool = True) -> Any:
    engine = Engine()
    made = SimpleNamespace(
        tree_cache=engine.cache if content else SimpleNamespace(page_size=PAGE),
        max_total_num_tokens=PAGES * PAGE,
        token_to_kv_pool_allocator=engine.allocator,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace()),
    )
    if content:
        made.tessera_intake = SimpleNamespace(
            settings=SpanSettings(2, array("q", range(3 * PAGE)), refusal)
        )
    return made


def state_of(found: Any) -> Any:
    result = SimpleNamespace(internal_state={})
    assert inspection.add_state(result, found) is result
    return result.internal_state.get("tessera")


def test_the_state_says_how_spans_are_served() -> None:
    state = state_of(scheduler())
    assert state["spans"] == {
        "refused": None,
        "link_pages": 2,
        "root_tokens": 3 * PAGE,
        "policy": "declared",
    }
    assert state["index"] == "content"
    assert state["rope_hash"] == "rope"
    assert state["publication"] == {"withheld": 0}
    assert state["counters"]["quarantined_pages"] == 0
    json.dumps(state)


def test_a_model_that_can_not_share_spans_says_why() -> None:
    assert state_of(scheduler(refusal="attention sinks"))["spans"]["refused"] == "attention sinks"


def test_sglangs_tree_shares_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", '{"index": "radix", "span_policy": "messages"}')
    state = state_of(scheduler(content=False))
    assert state["index"] == "radix"
    assert state["spans"] == {
        "refused": "index is radix",
        "link_pages": 1,
        "root_tokens": 0,
        "policy": "messages",
    }
    assert "counters" not in state


def test_a_hybrid_pool_says_so() -> None:
    found = scheduler(content=False)
    found.tessera_refusal = "the model's pool is hybrid"
    assert state_of(found)["spans"]["refused"] == "the model's pool is hybrid"


def test_a_server_with_another_backend_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "attention_backends", lambda: ("fa3", "fa3"))
    assert state_of(scheduler()) is None


def test_settings_are_those_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scheduler()
    before = state_of(found)["spans"]
    monkeypatch.setenv("TESSERA_CONFIG", "@/nowhere.json")
    assert state_of(found)["spans"] == before


def test_one_line_says_what_the_settings_came_to(caplog: pytest.LogCaptureFixture) -> None:
    found = scheduler()
    names = {Phase.PREFILL: "fa3", Phase.DECODE: "flashmla"}
    routes = {phase: SimpleNamespace(name=name) for phase, name in names.items()}
    found.tp_worker.model_runner.tessera_router = SimpleNamespace(routes=routes)
    with caplog.at_level(logging.INFO, logger=inspection.__name__):
        assert inspection.log_resolved("result", found) == "result"
    (record,) = [record for record in caplog.records if record.name == inspection.__name__]
    line = record.getMessage().removeprefix("tessera serves with ")
    assert dict(pair.split("=") for pair in line.split(" ")) == {
        "index": '"content"',
        "page_tokens": str(PAGE),
        "pool_tokens": str(PAGES * PAGE),
        "link_pages": "2",
        "root_tokens": str(3 * PAGE),
        "span_policy": '"declared"',
        "verify": '"tokens"',
        "spans_refused": "null",
        "kernel_prefill": '"fa3"',
        "kernel_decode": '"flashmla"',
    }
