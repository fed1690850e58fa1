"""Texts of a given number of tokens, generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tessera_sglang.bench.agents import Encode, reminder
from tessera_sglang.demo.agents import MLA, ROLES

Tokens = list[int]


def filled(begin: str, more: Callable[[], str], tokens: int, encode: Encode) -> Tokens:
    """Exactly ``tokens`` tokens: ``begin`` and as many sentences of ``more`` as it takes."""
    text = begin
    found = list(encode(text))
    while len(found) < tokens:
        text += " " + more()
        found = list(encode(text))
    return found[:tokens]


def preamble(tokens: int, encode: Encode, chance: random.Random) -> Tokens:
    """What makes an agent: a role, and things to remember. No two begin alike."""
    begin = f"{chance.getrandbits(32):08x}. {chance.choice(ROLES)}"
    gap = list(encode("\n\n"))
    return filled(begin, lambda: reminder(chance), tokens - len(gap), encode) + gap


def question(encode: Encode, chance: random.Random) -> Tokens:
    """One of the handbook's."""
    return list(encode(f"\n\n{chance.choice(MLA.questions)} Answer in one sentence.\n"))


def joined(pieces: Sequence[tuple[Sequence[int], bool]]) -> tuple[Tokens, list[tuple[int, int]]]:
    """Tokens one behind the other, and where those stand that are spans."""
    tokens: Tokens = []
    spans = []
    for piece, is_span in pieces:
        if is_span:
            spans.append((len(tokens), len(tokens) + len(piece)))
        tokens += piece
    return tokens, spans
