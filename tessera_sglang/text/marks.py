"""Marks that carry the edges of spans through a chat template.

A chat template turns messages into one string, so an edge has to be *in* the text on the way through
it. A mark is a word that nobody could have written: it holds 128 random bits drawn for this request,
after the request's text was fixed. What a caller writes can therefore neither forge a mark nor close
somebody else's. Marks are numbered, so that two halves of different texts never pair. Only letters and
digits, so that JSON and HTML escaping leave them alone.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a prompt's text; ``span`` says whether it was declared as one."""

    text: str
    span: bool


@dataclass(frozen=True, slots=True)
class Region:
    """Where one marked text, or tool, stands in a rendered one; its marks included."""

    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Marks:
    """The words of one request."""

    nonce: str

    @classmethod
    def drawn(cls) -> Marks:
        """Fresh marks."""
        return cls(f"tsr{secrets.token_hex(16)}")

    def around(self, text: str, number: int) -> str:
        """``text`` between marks. Outer whitespace stays outside, where a template may strip it."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        opening, closing = f"{self.nonce}o{number}z", f"{self.nonce}c{number}z"
        return f"{text[:start]}{opening}{core}{closing}{text[start + len(core) :]}"

    def remove(self, text: str) -> str:
        """``text`` as it was before it was marked."""
        return self._words().sub("", text) if self.nonce in text else text

    def regions(self, text: str) -> Iterator[Region]:
        """The marked texts in a rendered one, in order.

        A region is a run of marks with one number, and no other mark among them, that begins with one
        that opens and ends with one that closes. A text that the template printed in part is none.
        """
        for number, run in groupby(self._words().finditer(text), key=lambda found: found["number"]):
            words = list(run)
            if words[0]["kind"] == "o" and words[-1]["kind"] == "c":
                yield Region(int(number), words[0].start(), words[-1].end())

    def cut(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
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
        return re.compile(f"{self.nonce}(?P<kind>[oc])(?P<number>[0-9]+)z")
