"""Whether a token costs the same in a large index as in a small one.

Every side is filled with sequences of their own, level by level. At each level the same number of
sequences is looked up, drawn anew from everything indexed for every repetition: once with the
processor's caches flushed, since a small index would otherwise be served from them and a large one
from memory, and once more right away, when they hold what is compared.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sides import NEXT, Side, in_turn, request
from .workloads import numbered_sequence

SEQUENCE_TOKENS = 4_096
SAMPLE = 24  # sequences: all there are at the lowest level
FLUSHED_BYTES = 32 << 20  # read in between: several times what a core's own caches hold


@dataclass(frozen=True, slots=True)
class Level:
    """Cost of a token on one side with so many tokens in its index."""

    tokens: int
    match_ns: float  # flushed caches
    match_again_ns: float
    insert_ns: float  # the last sequences before the level


def measure_growth(
    sides: Sequence[Side], levels: Sequence[int], repetitions: int
) -> dict[str, list[Level]]:
    """Cost at each level, medians over the repetitions, for each side."""
    rng = np.random.default_rng(3)
    found: dict[str, list[Level]] = {side.name: [] for side in sides}
    for side in sides:
        side.reset()
    count = 0
    for level in levels:
        wanted = level // SEQUENCE_TOKENS
        inserted = _fill(sides, count, wanted)
        count = wanted
        gc.collect()
        first, again = _look_up(sides, rng, count, repetitions)
        for side in sides:
            found[side.name].append(
                Level(
                    count * SEQUENCE_TOKENS,
                    first[side.name],
                    again[side.name],
                    float(np.median(inserted[side.name][-SAMPLE:])) / SEQUENCE_TOKENS,
                )
            )
    return found


def ratio(levels: Sequence[Level], cost: str) -> float:
    """Cost of a token at the highest level by that at the lowest."""
    return float(getattr(levels[-1], cost)) / float(getattr(levels[0], cost))


def _fill(sides: Sequence[Side], first: int, end: int) -> dict[str, list[int]]:
    took: dict[str, list[int]] = defaultdict(list)
    for number in range(first, end):
        tokens = numbered_sequence(number, SEQUENCE_TOKENS)
        for side in in_turn(sides, number):
            took[side.name].append(side.insert(tokens)[1])
    return took


def _look_up(
    sides: Sequence[Side], rng: np.random.Generator, count: int, repetitions: int
) -> tuple[dict[str, float], dict[str, float]]:
    flush = np.zeros(FLUSHED_BYTES // 8)
    first: dict[str, list[float]] = defaultdict(list)
    again: dict[str, list[float]] = defaultdict(list)
    for repetition in range(repetitions):
        drawn = rng.choice(count, SAMPLE, replace=False)
        requests = [request(numbered_sequence(int(n), SEQUENCE_TOKENS) + NEXT) for n in drawn]
        for side in in_turn(sides, repetition):
            flush += 1
            for kept in (first, again):
                found = [side.look_up(req) for req in requests]
                tokens = sum(f.page_tokens for f in found)
                assert tokens == SAMPLE * SEQUENCE_TOKENS, "an indexed sequence was not found"
                kept[side.name].append(sum(f.match_ns for f in found) / tokens)
    return (
        {name: float(np.median(costs)) for name, costs in first.items()},
        {name: float(np.median(costs)) for name, costs in again.items()},
    )
