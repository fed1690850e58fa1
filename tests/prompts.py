"""Seeded token sequences and prompts with spans, for the server tests."""

from __future__ import annotations

import random

PAGE = 64
ROOT = [(7 * i) % 400 + 20 for i in range(PAGE)]  # one page of token ids

Prompt = tuple[list[int], list[list[int]]]


class Writer:
    """Draws random text; the same seed gives the same text."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, tokens: int) -> list[int]:
        """Random ids, away from the special ones."""
        return [self.random.randrange(10, 500) for _ in range(tokens)]


def compose(*pieces: tuple[list[int], bool]) -> Prompt:
    """A prompt from (text, is a span) pieces, with its spans."""
    prompt: list[int] = []
    spans: list[list[int]] = []
    for text, is_span in pieces:
        if is_span:
            spans.append([len(prompt), len(prompt) + len(text)])
        prompt += text
    return prompt, spans


def around(before: list[int], document: list[int], after: list[int]) -> Prompt:
    """``document`` as the one span between two texts."""
    return compose((before, False), (document, True), (after, False))
