"""``custom_params.tessera.text_spans``: spans of a prompt that is still text."""

from __future__ import annotations

from typing import Any

from tessera_sglang.config import MAX_SPANS

from .marks import Piece

FIELD = "custom_params.tessera.text_spans"


def text_spans(custom_params: Any) -> Any:
    """The raw ``text_spans`` of a request, or None."""
    tessera = custom_params.get("tessera") if isinstance(custom_params, dict) else None
    return tessera.get("text_spans") if isinstance(tessera, dict) else None


def cut(text: str, raw: Any) -> tuple[Piece, ...]:
    """A text in pieces, by offsets in Unicode code points: half-open, ascending, disjoint.

    Raises:
        ValueError: naming the offending entry.
    """
    if not isinstance(raw, list | tuple):
        raise ValueError(f"{FIELD} must be a list of [start, end] pairs, got {raw!r:.60}")
    if len(raw) > MAX_SPANS:
        raise ValueError(
            f"{FIELD}[{MAX_SPANS}]: {len(raw)} spans, but a request may declare at most {MAX_SPANS}"
        )
    pieces: list[Piece] = []
    at = 0
    for number, entry in enumerate(raw):
        start, end = _pair(f"{FIELD}[{number}]", entry, at, len(text))
        pieces += [Piece(text[at:start], span=False), Piece(text[start:end], span=True)]
        at = end
    pieces.append(Piece(text[at:], span=False))
    return tuple(piece for piece in pieces if piece.text)


def _pair(where: str, entry: Any, at: int, length: int) -> tuple[int, int]:
    pair = isinstance(entry, list | tuple) and len(entry) == 2
    # bool is an int in Python, and a JSON true is not an offset
    if not pair or any(isinstance(value, bool) or not isinstance(value, int) for value in entry):
        raise ValueError(f"{where} must be a pair [start, end] of integers, got {entry!r:.60}")
    start, end = entry
    if not 0 <= start < end:
        raise ValueError(f"{where} = [{start}, {end}]: start must be from 0 on and below end")
    if start < at:
        raise ValueError(
            f"{where} starts at {start}, before the previous one ends at {at}; spans must be ascending "
            "and must not overlap"
        )
    if end > length:
        raise ValueError(
            f"{where} = [{start}, {end}] ends past the text, which has {length} characters "
            "(Unicode code points)"
        )
    return start, end
