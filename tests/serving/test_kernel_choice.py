"""Which kernel a real server runs: said in its log, its state and its metrics, or refused at start."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from prompts import PAGE, Writer
from server import Server

PHASES = ("prefill", "decode", "verify")


def metric(server: Server, name: str, **labels: str) -> float | None:
    """The value on ``/metrics`` of the one series that has these labels, None if there is none."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    found = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if re.match(rf"{name}[{{ ]", line)
        and all(f'{key}="{value}"' in line for key, value in labels.items())
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


@pytest.fixture(scope="module")
def server(mla_model: Path) -> Iterator[Server]:
    with Server(mla_model) as started:
        yield started


@pytest.mark.parametrize("phase", PHASES)
def test_the_log_says_in_one_line_which_kernel_runs_a_phase(server: Server, phase: str) -> None:
    lines = [line for line in server.log().splitlines() if f"attention kernel for {phase}" in line]
    assert len(lines) == 1
    assert f"attention kernel for {phase} on cpu: torch (first choice); MLA " in lines[0]


def test_the_state_and_the_metrics_prove_what_ran(server: Server) -> None:
    before = server.state()
    assert before["kernels"] == {
        phase: {"kernel": "torch", "reason": "first choice"} for phase in PHASES
    }
    assert before["fallbacks"] == []
    writer = Writer(1)
    document = writer.text(3 * PAGE)
    prompt = writer.text(20) + document + writer.text(10)
    for _ in range(2):
        server.generate(prompt, [[20, 20 + len(document)]], steps=8)
    after = server.state()
    ran = {phase: after["dispatches"]["torch"][phase] for phase in PHASES}
    grown = {phase: ran[phase] - before["dispatches"]["torch"][phase] for phase in PHASES}
    assert grown["prefill"] >= 3, "the span, and both readers"
    assert grown["decode"] >= 2 * 7 * 2, "two readers, seven steps, their own part and the span's"
    assert grown["verify"] == 0
    assert list(after["dispatches"]) == ["torch"]

    deadline = time.monotonic() + 10  # they are copied when the server has been idle for a moment
    while time.monotonic() < deadline:
        shown = metric(server, "tessera_kernel_dispatch_total", kernel="torch", phase="decode")
        if shown == ran["decode"]:
            break
        time.sleep(0.2)
    for phase in PHASES:
        shown = metric(server, "tessera_kernel_dispatch_total", kernel="torch", phase=phase)
        assert shown == ran[phase], phase
    assert metric(server, "tessera_kernel_fallback_total") is None
    traffic, pages = after["traffic"], after["paged_tier"]
    assert metric(server, "tessera_lookup_tokens_total") == traffic["lookup"]
    assert metric(server, "tessera_hit_tokens_total", kind="span") == traffic["span_hit"] > 0
    assert metric(server, "tessera_pages", state="evictable") == pages["evictable"] > 0
    assert metric(server, "tessera_dedup_collisions_total") == 0


def test_a_kernel_for_gpus_does_not_start_without_one(mla_model: Path) -> None:
    server = Server(mla_model, config={"kernel": "flashmla"})
    with pytest.raises(RuntimeError, match="did not start"):
        server.start()
    log = server.log()
    for word in ("TESSERA_CONFIG", 'kernel "flashmla"', "on cpu", 'use "auto" or "torch"'):
        assert word in log, word
    assert "Load weight begin" not in log, "it is known before the model is loaded"
