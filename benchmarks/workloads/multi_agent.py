"""Agents that read one document behind preambles of their own, for one turn or several.

    python -m benchmarks.workloads.multi_agent --out agents.jsonl --agents 16 --document-tokens 8192
    python -m sglang.benchmark.serving --backend sglang-oai-chat --dataset-name openai \\
        --dataset-path agents.jsonl --num-prompts 16 --model MODEL --base-url URL

Every further turn repeats the dialogue so far and adds an answer and the next question. The answers are
generated with the rest, so a prompt does not depend on who served the one before it; with several turns
give the client ``--max-concurrency`` of the number of agents, so that turns come one after the other.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

from tessera_sglang.bench.agents import Encode, Request, document, reminder

from . import texts
from .jsonl import command
from .ranges import Range, check_counts, check_ranges

ANSWER_TOKENS = 48  # of an earlier turn


@dataclass(frozen=True, slots=True)
class Shape:
    """How many read how much. Ranges are drawn from uniformly."""

    agents: int = 16
    document_tokens: int = 8192
    preamble_tokens: Range = (100, 300)
    turns: int = 1
    output_tokens: int = 8

    def __post_init__(self) -> None:
        check_counts(self, "agents", "document_tokens", "turns", "output_tokens")
        check_ranges(self, "preamble_tokens")


def requests(shape: Shape, encode: Encode, seed: int) -> list[Request]:
    """Turn by turn: first every agent's first one."""
    chance = random.Random(f"multi_agent {seed}")
    shared = document(0, shape.document_tokens, encode, chance)
    first = [
        texts.preamble(chance.randint(*shape.preamble_tokens), encode, chance)
        for _ in range(shape.agents)
    ]
    dialogues: list[list[int]] = [[] for _ in range(shape.agents)]
    made = []
    for turn in range(shape.turns):
        for preamble, dialogue in zip(first, dialogues, strict=True):
            if turn:
                dialogue += texts.filled(
                    reminder(chance), lambda: reminder(chance), ANSWER_TOKENS, encode
                )
            dialogue += texts.question(encode, chance)
            pieces = ((preamble, False), (shared, True), (dialogue, False))
            tokens, spans = texts.joined(pieces)
            made.append(Request(tuple(tokens), tuple(spans), shape.output_tokens))
    return made


if __name__ == "__main__":
    sys.exit(command(__doc__ or "", Shape, requests))
