"""Two ranks on the CPU: the same victims in the same order, and the answers of one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from load import make_items
from prompts import ROOT
from server import Answer, Server

BIND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def _run(model: Path, *arguments: str, environment: dict[str, str]) -> tuple[list[Answer], str]:
    items = make_items(3, 30, longest=1200)
    with Server(
        model,
        *arguments,
        config={"span_root": ROOT},
        pool_tokens=2048,
        environment=environment,
    ) as server:
        alone = [server.generate(i.prompt, i.spans, steps=i.steps) for i in items]
        together = server.generate_all([(i.prompt, i.spans) for i in items], steps=8, workers=12)
        server.flush()
        return [*alone, *together], server.log()


@pytest.mark.slow
def test_two_ranks_evict_alike_and_answer_like_one(mla_model: Path) -> None:
    one, _ = _run(mla_model, environment={})
    two, log = _run(mla_model, "--tp", "2", environment=BIND)
    assert [a.tokens for a in two] == [a.tokens for a in one]
    assert [a.cached for a in two[:30]] == [a.cached for a in one[:30]]
    orders = re.findall(r"TP(\d)\].* (\d+) evicted so far in the order (\w+)", log)
    last = {rank: (int(count), order) for rank, count, order in orders}
    assert set(last) == {"0", "1"}, log[-2000:]
    assert last["0"] == last["1"]
    assert last["0"][0] > 100, "the pool must be too small"
