"""Requests without spans: the content index is as good as the tree it replaces, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prompts import PAGE, Writer
from server import Server

CONVERSATIONS = 40
TURNS = 5


def _talk(model: Path, config: dict[str, Any]) -> list[tuple[list[int], int]]:
    """200 seeded turns; a turn repeats all that was said and adds to it."""
    writer = Writer(5)
    shared = writer.text(150)
    told: list[tuple[list[int], int]] = []
    with Server(model, config=config, pool_tokens=65536) as server:
        talks = [writer.text(writer.random.randrange(5, 300)) for _ in range(CONVERSATIONS)]
        talks = [(shared if i % 3 == 0 else []) + talk for i, talk in enumerate(talks)]
        for _ in range(TURNS):
            for number in range(CONVERSATIONS):
                steps = writer.random.randrange(1, 40)
                answer = server.generate(talks[number], steps=steps)
                told.append((answer.tokens, answer.cached))
                talks[number] += answer.tokens + writer.text(writer.random.randrange(1, 80))
    return told


def test_content_index_equals_the_tree(mla_model: Path) -> None:
    content = _talk(mla_model, {"index": "content"})
    tree = _talk(mla_model, {"index": "radix"})
    assert len(content) == CONVERSATIONS * TURNS
    assert sum(cached for _, cached in content) > 10_000, "the traffic must hit the cache"
    assert [(tokens, cached // PAGE * PAGE) for tokens, cached in content] == tree
    forked = sum(cached % PAGE for _, cached in content)
    assert forked > 100, "pages that are partly equal are forked"
