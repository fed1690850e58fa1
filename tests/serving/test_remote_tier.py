"""Two servers share what they computed through a storage engine of SGLang's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompts import PAGE, ROOT, Writer
from server import Answer, Server

HOST_BYTES = 64 << 20
DOCUMENT_PAGES = 16

pytestmark = pytest.mark.server


def config(directory: Path, **settings: Any) -> dict[str, Any]:
    return {
        "span_root": ROOT,
        "link_pages": 1,
        "host_tier_bytes": HOST_BYTES,
        "remote_tier": "file",
        # A lookup that gives up is a miss; two servers on a busy machine may take their time.
        "remote_tier_extra_config": {"directory": str(directory), "lookup_timeout_s": 5},
        **settings,
    }


def same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)


def from_storage(answer: Answer) -> int:
    return int((answer.meta["cached_tokens_details"] or {}).get("storage", 0))


def wait_for(server: Server, there: Callable[[dict[str, Any]], bool], seconds: float = 60) -> None:
    """Until the lower tiers say so."""
    deadline = time.monotonic() + seconds
    while True:
        state: dict[str, Any] = server.state()["lower_tiers"]
        if there(state):
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


def written(state: dict[str, Any]) -> bool:
    sizes = state["sizes"]
    busy = sizes["dirty_pages"] + sizes["filling_pages"] + sizes["writing_pages"]
    return not busy + state["unwritten"]


class Requests:
    """A document as the beginning of a prompt, and as a span behind a preamble."""

    def __init__(self) -> None:
        writer = Writer(21)
        document, question = writer.text(DOCUMENT_PAGES * PAGE + 5), writer.text(20)
        preamble = writer.text(100)
        self.plain = [*document, *question]
        self.read = [*preamble, *document, *question]
        self.spans = [[len(preamble), len(preamble) + len(document)]]

    def ask(self, server: Server) -> tuple[Answer, Answer]:
        return (
            server.generate(self.plain, steps=8),
            server.generate(self.read, self.spans, steps=8),
        )


def test_one_server_computes_and_the_other_hits(mla_model: Path, tmp_path: Path) -> None:
    requests, shared = Requests(), tmp_path / "shared"
    with (
        Server(mla_model, config=config(shared), environment={"PYTHONHASHSEED": "1"}) as first,
        Server(mla_model, config=config(shared), environment={"PYTHONHASHSEED": "2"}) as second,
    ):
        cold = requests.ask(first)
        assert cold[0].cached == 0
        wait_for(first, written)
        warm = requests.ask(second)
        for one, other in zip(warm, cold, strict=True):
            same(one, other)
        assert from_storage(warm[0]) == DOCUMENT_PAGES * PAGE
        # The document's linked pages are computed in place; a span's prefill computes its last token.
        assert warm[1].cached >= (DOCUMENT_PAGES - 1) * PAGE - 1
        loaded = second.state()["lower_tiers"]["loaded_tokens"]["store"]
        assert loaded >= 2 * DOCUMENT_PAGES * PAGE - 1
        salted = second.generate(requests.plain, steps=8, cache_salt="another")
        assert salted.cached == 0
        same(salted, cold[0])
        for server in (first, second):
            assert "Traceback" not in server.log()


def test_damage_in_the_engine_costs_a_hit_and_no_answer(mla_model: Path, tmp_path: Path) -> None:
    requests, shared = Requests(), tmp_path / "shared"
    with Server(mla_model, config=config(shared)) as first:
        cold = requests.ask(first)
        wait_for(first, written)
    values = sorted(shared.glob("*.bin"))
    assert len(values) >= 2 * DOCUMENT_PAGES
    for file in values:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    with Server(mla_model, config=config(shared)) as second:
        warm = requests.ask(second)
        for one, other in zip(warm, cold, strict=True):
            same(one, other)
        assert from_storage(warm[0]) == 0
        assert second.alive()
        assert "Traceback" not in second.log()


def test_other_weights_find_nothing(mla_model: Path, tmp_path: Path) -> None:
    from models import write_mla

    requests, shared = Requests(), tmp_path / "shared"
    with Server(mla_model, config=config(shared)) as first:
        requests.ask(first)
        wait_for(first, written)
    other = write_mla(tmp_path / "other", seed=1)
    with Server(other, config=config(shared)) as second:
        assert requests.ask(second)[0].cached == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"remote_tier": "no-such-engine"}, "remote_tier 'no-such-engine'"),
        ({"remote_tier_extra_config": {}}, 'remote_tier "file" needs a directory'),
    ],
)
def test_an_engine_that_can_not_be_had_refuses_the_start(
    settings: dict[str, Any], said: str, mla_model: Path, tmp_path: Path
) -> None:
    server = Server(mla_model, config=config(tmp_path, **settings))
    with pytest.raises(RuntimeError, match="did not start"):
        server.start()
    assert said in server.log()
