"""A server whose page keys have eight bits: collisions cost hits, never answers (case 21)."""

from __future__ import annotations

from pathlib import Path

from load import Load, make_items, settle
from prompts import ROOT
from server import Server

WEAK = {"PYTHONPATH": str(Path(__file__).parents[1] / "weak_hash")}


def test_collisions_are_misses(mla_model: Path) -> None:
    items = make_items(21, 30, longest=1200)
    config = {"span_root": ROOT}
    with Server(mla_model, config=config, pool_tokens=65536) as server:
        reference = [server.generate(i.prompt, i.spans, steps=i.steps) for i in items]
    with Server(mla_model, config=config, pool_tokens=16384, environment=WEAK) as server:
        load = Load(server, items, reference, seed=21)
        load.run(15)
        assert not load.wrong, load.wrong[:3]
        refused = [failure for failure in load.failed if "could not be kept" not in failure]
        assert not refused, refused[:3]
        assert load.stuck == 0
        assert load.finished > 20
        counters = settle(server)["counters"]
        assert isinstance(counters, dict)
        assert counters["collisions"] > 100
        assert "Traceback" not in server.log()
