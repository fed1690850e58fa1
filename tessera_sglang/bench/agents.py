"""The workload ``agents``: documents that every agent reads, in an order and behind a text of its own.

The documents are sentences of the handbook that ships with the demo, shuffled; what stands before them
is generated. Everything follows from the seed. A prompt is token ids, for each piece is tokenised by
itself: a document is the same tokens in every prompt, on either side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera_sglang.demo.agents import MLA, ROLES

WORKLOAD = "agents"
Encode = Callable[[str], Sequence[int]]

_PREAMBLE_SENTENCES = (2, 8)
_WORDS = (
    *("harbour", "boiler", "letter", "bridge", "winter", "signal", "ledger", "garden", "engine"),
    *("river", "answer", "market", "lantern", "valve", "window", "ticket", "morning", "station"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many read how much. ``document_tokens`` is exact; preambles differ in length."""

    agents: int = 16
    documents: int = 2
    document_tokens: int = 2048
    output_tokens: int = 32

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def __str__(self) -> str:
        documents = f"{self.documents} document{'s' if self.documents > 1 else ''}"
        return (
            f"{self.agents} agents, {documents} of {self.document_tokens:,} tokens, "
            f"{self.output_tokens} tokens out"
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt; ``spans`` are half-open offsets into ``input_ids``, ascending and disjoint."""

    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    output_tokens: int


def requests(shape: Shape, encode: Encode, seed: int) -> list[Request]:
    """One request for each agent. ``encode`` adds no special tokens."""
    chance = random.Random(f"{WORKLOAD} {seed}")
    documents = [
        document(number, shape.document_tokens, encode, chance) for number in range(shape.documents)
    ]
    return [
        _request(number, chance.sample(documents, len(documents)), shape, encode, chance)
        for number in range(shape.agents)
    ]


def document(number: int, tokens: int, encode: Encode, chance: random.Random) -> list[int]:
    """Exactly ``tokens`` tokens that no other document shares a beginning with."""
    found = list(encode(f"Document {chance.getrandbits(32):08x}, number {number + 1}.\n\n"))
    sentences = MLA.document.replace("\n", " ").split(". ")
    while len(found) < tokens:
        chance.shuffle(sentences)
        found += encode(". ".join(sentences) + ".\n\n")
    return found[:tokens]


def _request(
    number: int,
    documents: Sequence[Sequence[int]],
    shape: Shape,
    encode: Encode,
    chance: random.Random,
) -> Request:
    tokens = list(encode(_preamble(number, chance)))
    gap = encode("\n\n")
    spans = []
    for document in documents:
        spans.append((len(tokens), len(tokens) + len(document)))
        tokens += [*document, *gap]
    question = MLA.questions[number % len(MLA.questions)]
    tokens += encode(f"{question} Answer in one sentence.\n")
    return Request(tuple(tokens), tuple(spans), shape.output_tokens)


def _preamble(number: int, chance: random.Random) -> str:
    """No two begin alike, so that nothing before the documents is shared."""
    lines = [f"{chance.getrandbits(32):08x} is agent {number + 1}. {ROLES[number % len(ROLES)]}"]
    for _ in range(chance.randint(*_PREAMBLE_SENTENCES)):
        lines.append(reminder(chance))
    return " ".join(lines) + "\n\n"


def reminder(chance: random.Random) -> str:
    """One sentence."""
    return f"Remember the {' and the '.join(chance.sample(_WORDS, 4))}."
