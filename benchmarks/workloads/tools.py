"""Agents with tools: each has some definitions of a common set, in an order of its own.

    python -m benchmarks.workloads.tools --out tools.jsonl --agents 16
    python -m sglang.benchmark.serving --backend sglang-oai-chat --dataset-name openai \\
        --dataset-path tools.jsonl --num-prompts 16 --model MODEL --base-url URL

The prompt begins with a line that all agents have and the definitions, each a span, as chat templates
put them; then comes what makes the agent, and a question.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tessera_sglang.bench.agents import Encode, Request

from . import texts
from .jsonl import command
from .ranges import Range, check_counts, check_ranges
from .schemas import schema

BEGINNING = "You may call these tools.\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranges are drawn from uniformly; ``schema_tokens`` is what a definition may have at most."""

    agents: int = 16
    tools: int = 40  # of the common set
    tools_per_agent: Range = (5, 40)
    schema_tokens: Range = (80, 400)
    preamble_tokens: Range = (100, 300)
    output_tokens: int = 8

    def __post_init__(self) -> None:
        check_counts(self, "agents", "tools", "output_tokens")
        check_ranges(self, "tools_per_agent", "schema_tokens", "preamble_tokens")
        if self.tools_per_agent[1] > self.tools:
            raise ValueError(
                f"tools_per_agent must be at most the {self.tools} tools, "
                f"got {self.tools_per_agent[1]}"
            )


def requests(shape: Shape, encode: Encode, seed: int) -> list[Request]:
    """One request for each agent."""
    chance = random.Random(f"tools {seed}")
    definitions = [
        schema(number, chance.randint(*shape.schema_tokens), encode, chance)
        for number in range(shape.tools)
    ]
    return [_request(definitions, shape, encode, chance) for _ in range(shape.agents)]


def _request(
    definitions: Sequence[Sequence[int]], shape: Shape, encode: Encode, chance: random.Random
) -> Request:
    gap = encode("\n")
    pieces: list[tuple[Sequence[int], bool]] = [(encode(BEGINNING), False)]
    for definition in chance.sample(definitions, chance.randint(*shape.tools_per_agent)):
        pieces += [(definition, True), (gap, False)]
    own = texts.preamble(chance.randint(*shape.preamble_tokens), encode, chance)
    pieces += [(own, False), (texts.question(encode, chance), False)]
    tokens, spans = texts.joined(pieces)
    return Request(tuple(tokens), tuple(spans), shape.output_tokens)


if __name__ == "__main__":
    sys.exit(command(__doc__ or "", Shape, requests))
