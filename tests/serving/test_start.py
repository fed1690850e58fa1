"""What a server refuses to start with, and what it still does for a model without spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import write_windowed_config
from prompts import PAGE, Writer
from server import RequestError, Server

REFUSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"index": "tree"}, [], ["TESSERA_CONFIG", "index", "content"]),
    ({"swa_persistence": "full"}, [], ["swa_persistence", "not available", "remove"]),
    (
        {"disk_tier_path": "/proc/none", "disk_tier_bytes": 1 << 20},
        [],
        ["disk_tier_path", "/proc/none"],
    ),
    ({}, ["--disable-radix-cache"], ["--disable-radix-cache", "TESSERA_CONFIG", "drop"]),
    ({}, ["--page-size", "32"], ["--page-size 32", "--attention-backend tessera", "drop"]),
    ({"span_root": [20] * 63}, [], ["span_root", "63", "whole pages"]),
]


@pytest.mark.parametrize(("config", "arguments", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_configuration_does_not_start(
    mla_model: Path, config: dict[str, Any], arguments: list[str], words: list[str]
) -> None:
    server = Server(mla_model, *arguments, config=config)
    with pytest.raises(RuntimeError, match="did not start"):
        server.start()
    for word in words:
        assert word in server.log(), word


def test_a_windowed_model_keeps_prefix_reuse_and_refuses_spans(tmp_path: Path) -> None:  # case 29
    model = write_windowed_config(tmp_path / "windowed")
    prompt = Writer(1).text(5 * PAGE)
    with Server(model, "--load-format", "dummy") as server:
        first = server.generate(prompt, steps=4)
        again = server.generate(prompt, steps=4)
        assert again.cached > 0
        assert again.tokens == first.tokens
        with pytest.raises(RequestError) as raised:
            server.generate(prompt, [[0, 3 * PAGE]], steps=4)
        assert raised.value.status == 400
        assert "sliding-window" in raised.value.body
        assert server.alive()


def test_the_tree_takes_spans_as_ordinary_text(llama_model: Path) -> None:
    writer = Writer(2)
    prompt = writer.text(40) + (document := writer.text(4 * PAGE)) + writer.text(20)
    with Server(llama_model, config={"index": "radix"}) as server:
        plain = server.generate(prompt)
        spanned = server.generate(prompt, [[40, 40 + len(document)]])
        assert spanned.tokens == plain.tokens
        assert spanned.cached == (len(prompt) - 1) // PAGE * PAGE
