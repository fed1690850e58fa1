"""Retrieval: every prompt holds some documents of a corpus, in an order of its own.

    python -m benchmarks.workloads.rag --out rag.jsonl --documents 20 --draws 100
    python -m sglang.benchmark.serving --backend sglang-oai-chat --dataset-name openai \\
        --dataset-path rag.jsonl --num-prompts 100 --max-concurrency 4 --model MODEL --base-url URL

A draw has no document twice. With ``--popularity zipf`` the n-th document of the corpus is wanted
1/n**exponent as often as the first.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tessera_sglang.bench.agents import Encode, Request, document

from . import texts
from .jsonl import command
from .ranges import Range, check_counts, check_ranges

POPULARITIES = ("uniform", "zipf")
INSTRUCTION = "Answer from these notes alone.\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """A corpus and what is drawn from it. Ranges are drawn from uniformly."""

    documents: int = 20
    document_tokens: Range = (256, 2048)
    draws: int = 100
    documents_per_draw: Range = (14, 14)
    popularity: str = "uniform"
    zipf_exponent: float = 1.0
    output_tokens: int = 8

    def __post_init__(self) -> None:
        check_counts(self, "documents", "draws", "output_tokens")
        check_ranges(self, "document_tokens", "documents_per_draw")
        if self.popularity not in POPULARITIES:
            known = ", ".join(POPULARITIES)
            raise ValueError(f"popularity must be one of {known}, got {self.popularity}")
        if self.documents_per_draw[1] > self.documents:
            raise ValueError(
                f"documents_per_draw must be at most the {self.documents} documents, "
                f"got {self.documents_per_draw[1]}"
            )


def corpus(shape: Shape, encode: Encode, seed: int) -> list[list[int]]:
    """Its documents, as tokens."""
    chance = random.Random(f"rag corpus {seed}")
    return [
        document(number, chance.randint(*shape.document_tokens), encode, chance)
        for number in range(shape.documents)
    ]


def requests(shape: Shape, encode: Encode, seed: int) -> list[Request]:
    """One request a draw, in the order in which they are asked."""
    documents = corpus(shape, encode, seed)
    chance = random.Random(f"rag draws {seed}")
    return [_request(documents, shape, encode, chance) for _ in range(shape.draws)]


def _request(
    documents: Sequence[Sequence[int]], shape: Shape, encode: Encode, chance: random.Random
) -> Request:
    gap = encode("\n\n")
    pieces: list[tuple[Sequence[int], bool]] = [(encode(INSTRUCTION), False)]
    for number in draw(shape, chance.randint(*shape.documents_per_draw), chance):
        pieces += [(documents[number], True), (gap, False)]
    pieces.append((texts.question(encode, chance), False))
    tokens, spans = texts.joined(pieces)
    return Request(tuple(tokens), tuple(spans), shape.output_tokens)


def draw(shape: Shape, documents: int, chance: random.Random) -> list[int]:
    """Numbers of documents, none twice, in shuffled order."""
    if shape.popularity == "uniform":
        return chance.sample(range(shape.documents), documents)
    # the largest of these keys are a weighted sample without replacement (Efraimidis and Spirakis)
    keys = [
        (chance.random() ** ((number + 1) ** shape.zipf_exponent), number)
        for number in range(shape.documents)
    ]
    found = [number for _, number in sorted(keys, reverse=True)[:documents]]
    chance.shuffle(found)
    return found


if __name__ == "__main__":
    sys.exit(command(__doc__ or "", Shape, requests))
