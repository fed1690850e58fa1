"""Pages that left the device come back: from host memory, and from a disk, to another server too."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from load import Load, make_items, settle
from models import write_llama
from prompts import PAGE, ROOT, Writer
from server import Answer, Server

CONFIG: dict[str, Any] = {"span_root": ROOT, "link_pages": 1}
POOL_TOKENS = 40 * PAGE
HOST_BYTES = 64 << 20
DISK_BYTES = 1 << 30

pytestmark = pytest.mark.server


def same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)


def details(answer: Answer) -> dict[str, int]:
    found: dict[str, int] = answer.meta["cached_tokens_details"] or {}
    return found


def fill(server: Server, seed: int) -> None:
    """Other texts, until nothing of what was there before is left on the device."""
    writer = Writer(seed)
    for _ in range(3):
        server.generate(writer.text(POOL_TOKENS // 2), steps=1)


@pytest.fixture(scope="module")
def server(mla_model: Path) -> Iterator[Server]:
    config = {**CONFIG, "host_tier_bytes": HOST_BYTES}
    environment = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with Server(
        mla_model, config=config, pool_tokens=POOL_TOKENS, environment=environment
    ) as started:
        yield started
        state = settle(started)
        assert state["held_tokens"] == state["pages"]["sealed"] * PAGE, "nothing leaks"
        assert "Traceback" not in started.log()


def test_a_prefix_comes_back_from_host_memory(server: Server) -> None:
    prompt = Writer(1).text(20 * PAGE + 10)
    cold = server.generate(prompt, steps=8)
    fill(server, 2)
    before = server.state()["lower_tiers"]["loaded_tokens"]["host"]
    warm = server.generate(prompt, steps=8)
    same(warm, cold)
    assert warm.cached == 20 * PAGE
    assert details(warm)["host"] >= 19 * PAGE
    assert server.state()["lower_tiers"]["loaded_tokens"]["host"] - before == details(warm)["host"]
    again = server.generate(prompt, steps=8)
    same(again, cold)
    assert details(again) == {"device": 20 * PAGE, "host": 0}


def test_a_span_comes_back_at_another_offset(server: Server) -> None:
    writer = Writer(3)
    document, question = writer.text(10 * PAGE + 7), writer.text(30)
    prompts = [[*writer.text(n), *document, *question] for n in (5, 200)]
    spans = [[[n, n + len(document)]] for n in (5, 200)]
    cold = [server.generate(p, s, steps=8) for p, s in zip(prompts, spans, strict=True)]
    prefills = server.state()["traffic"]["span_prefills"]
    fill(server, 4)
    warm = [server.generate(p, s, steps=8) for p, s in zip(prompts, spans, strict=True)]
    for one, other in zip(warm, cold, strict=True):
        same(one, other)
    assert warm[0].cached >= 9 * PAGE - 1, "the span's prefill computes its last token"
    assert server.state()["traffic"]["span_prefills"] == prefills + 1


def test_many_at_once_under_eviction(server: Server) -> None:
    writer, rng = Writer(5), random.Random(5)
    texts = [writer.text(6 * PAGE + 3) for _ in range(12)]
    items = []
    for _ in range(40):
        text, preamble = rng.choice(texts), writer.text(rng.randrange(90))
        span = [[len(preamble), len(preamble) + len(text)]] if rng.random() < 0.5 else None
        items.append(([*preamble, *text, *writer.text(10)], span))
    alone = [server.generate(prompt, span, steps=4) for prompt, span in items]
    together = server.generate_all(items, steps=4, workers=8)
    for one, other in zip(together, alone, strict=True):
        same(one, other)
    state = server.state()["lower_tiers"]
    assert state["loaded_tokens"]["host"] > 20 * PAGE
    assert state["counters"]["worker_faults"] == state["host"]["damaged"] == 0


def test_a_flush_empties_host_memory(server: Server) -> None:
    prompt = Writer(6).text(5 * PAGE)
    server.generate(prompt, steps=1)
    fill(server, 7)
    server.flush()
    assert server.state()["lower_tiers"]["sizes"]["host_pages"] == 0
    assert server.generate(prompt, steps=1).cached == 0


def test_load_on_small_tiers_with_retraction_and_aborts(mla_model: Path) -> None:
    """Pages come and go between a pool and a host tier that are both too small."""
    items = make_items(11, 30, longest=1200)
    with Server(mla_model, config=CONFIG, pool_tokens=65536) as roomy:
        answers = [roomy.generate(i.prompt, i.spans, steps=i.steps) for i in items]
    environment = {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "5",
    }
    with Server(
        mla_model,
        *("--chunked-prefill-size", "256"),
        config={**CONFIG, "host_tier_bytes": 1 << 20},
        pool_tokens=POOL_TOKENS,
        environment=environment,
    ) as server:
        load = Load(server, items, answers, seed=12)
        load.run(25)
        assert not load.wrong, load.wrong[:3]
        assert not load.failed, load.failed[:3]
        assert load.stuck == 0
        state = settle(server)
        assert state["held_tokens"] == state["pages"]["sealed"] * PAGE
        tiers = state["lower_tiers"]
        assert tiers["loaded_tokens"]["host"] > 0
        assert tiers["host"]["evicted"] > 0, "the host tier must be too small"
        assert tiers["counters"]["worker_faults"] == tiers["host"]["damaged"] == 0
        log = server.log()
        assert "Testing retraction" in log
        assert "Traceback" not in log


def wait_for(server: Server, seconds: float = 30) -> dict[str, Any]:
    """Until nothing waits to be written down."""
    deadline = time.monotonic() + seconds
    while True:
        state: dict[str, Any] = server.state()["lower_tiers"]
        sizes = state["sizes"]
        busy = sizes["dirty_pages"] + sizes["filling_pages"] + sizes["writing_pages"]
        if not busy + state["unwritten"]:
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


def test_another_server_goes_on_from_the_disk(mla_model: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "disk_tier_path": str(tmp_path / "kv"), "disk_tier_bytes": DISK_BYTES}
    writer = Writer(8)
    document = writer.text(16 * PAGE + 5)
    plain = [*document, *writer.text(20)]
    read = [*writer.text(100), *document, *writer.text(20)]
    span = [[100, 100 + len(document)]]
    with Server(mla_model, config=config, environment={"PYTHONHASHSEED": "1"}) as first:
        cold = first.generate(plain, steps=8), first.generate(read, span, steps=8)
        assert wait_for(first)["counters"]["written"] >= 32
    with Server(mla_model, config=config, environment={"PYTHONHASHSEED": "2"}) as second:
        warm = second.generate(plain, steps=8), second.generate(read, span, steps=8)
        for one, other in zip(warm, cold, strict=True):
            same(one, other)
        assert details(warm[0])["storage"] == 16 * PAGE
        assert warm[1].cached >= 15 * PAGE - 1
        state = second.state()["lower_tiers"]
        assert state["loaded_tokens"]["store"] >= 32 * PAGE - 1
        second.flush()
        assert second.generate(plain, steps=8, cache_salt="another").cached == 0
        assert second.generate(plain, steps=8).cached == 16 * PAGE


def test_the_same_place_with_other_weights_hits_nothing(llama_model: Path, tmp_path: Path) -> None:
    """Case 23 through the server, on grouped heads; and unchanged weights hit."""
    config = {**CONFIG, "disk_tier_path": str(tmp_path / "kv"), "disk_tier_bytes": DISK_BYTES}
    served = tmp_path / "model"
    shutil.copytree(llama_model, served)
    prompt = Writer(9).text(8 * PAGE + 3)
    found = []
    for weights in (None, None, 17):
        if weights is not None:
            write_llama(served, seed=weights)
        with Server(served, config=config) as server:
            answer = server.generate(prompt, steps=4)
            found.append((answer.cached, answer.tokens))
            wait_for(server)
    assert [cached for cached, _ in found] == [0, 8 * PAGE, 0]
    assert found[0][1] == found[1][1] != found[2][1]
