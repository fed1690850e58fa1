"""Marks that carry the edges of spans through a chat template.

A chat template turns messages into one string, so an edge has to be *in* the text on the way through
it. A mark is a word that nobody could have written: it holds 128 random bits drawn for this request,
after the request's text was fixed. What a caller writes can therefore neither forge a mark nor close
somebody else's. Only letters and digits, so that JSON and HTML escaping leave it alone.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a prompt's text; ``span`` says whether it was declared as one."""

    text: str
    span: bool


@dataclass(frozen=True, slots=True)
class Marks:
    """The three words of one request: a span opens, a span closes, a tool's name follows."""

    opening: str
    closing: str
    tool: str

    @classmethod
    def drawn(cls) -> Marks:
        """Fresh marks."""
        nonce = secrets.token_hex(16)
        return cls(f"tsr{nonce}o", f"tsr{nonce}c", f"tsr{nonce}t")

    def around(self, text: str) -> str:
        """``text`` as a span. Outer whitespace stays outside, where a template may strip it."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return f"{text[:start]}{self.opening}{core}{self.closing}{text[start + len(core) :]}"

    def remove(self, text: str) -> str:
        """``text`` as it was before it was marked."""
        return self._words().sub("", text)

    def pairs(self, text: str) -> Iterator[tuple[int, int]]:
        """Where spans stand in a marked text, marks included; a mark without a partner is none."""
        opened: int | None = None
        for found in self._words().finditer(text):
            if found.group() != self.closing:
                opened = found.start()
            elif opened is not None:
                yield opened, found.end()
                opened = None

    def cut(self, text: str, spans: list[tuple[int, int]]) -> tuple[Piece, ...]:
        """The marked text in pieces without marks; ``spans`` ascend and are disjoint."""
        pieces: list[Piece] = []
        at = 0
        for start, end in spans:
            pieces.append(Piece(self.remove(text[at:start]), span=False))
            pieces.append(Piece(self.remove(text[start:end]), span=True))
            at = end
        pieces.append(Piece(self.remove(text[at:]), span=False))
        return tuple(piece for piece in pieces if piece.text)

    def _words(self) -> re.Pattern[str]:
        return re.compile(f"{self.opening}|{self.closing}|{self.tool}")
