"""A prompt in pieces becomes token ids: every span is encoded on its own.

So a span's ids depend on its text alone, whatever stands beside it. What lies between spans is
encoded in runs, and a span too short to share a page is left in the run around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from .marks import Piece

# Put before a text and taken off again, where a tokenizer would put a space there. Of several, since a
# vocabulary may merge one of them with what follows.
ANCHORS = ("\n", ".", "0", ")", "a")


class CutError(ValueError):
    """The tokenizer can not encode a text in pieces that spell the same text."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a prompt, and where its spans stand in them: half-open, ascending, disjoint."""

    input_ids: list[int]
    spans: list[list[int]]


@dataclass(frozen=True, slots=True)
class _Habits:
    """What a tokenizer does at the ends of a text."""

    before: tuple[int, ...]  # special tokens that it puts before a text, BOS as a rule
    after: tuple[int, ...]
    says_so: bool  # it takes, and needs, add_special_tokens=False to leave them out
    leads: bool  # it puts a space before a text (Metaspace), which it would not inside one


_known: WeakKeyDictionary[Any, _Habits] = WeakKeyDictionary()


def encode(
    tokenizer: Tokenizer, pieces: Sequence[Piece], *, page_tokens: int, special_tokens: bool
) -> Encoded:
    """Token ids of the pieces in order, and the spans among them of at least ``page_tokens`` tokens.

    With ``special_tokens`` the prompt as a whole gets those that the tokenizer adds to a text. The
    text that the ids spell is that of the pieces, one behind the other.

    Raises:
        CutError: the tokenizer can not begin inside a text.
    """
    habits = _habits_of(tokenizer)
    ids: list[int] = list(habits.before) if special_tokens else []
    spans: list[list[int]] = []
    run = ""
    for number, piece in enumerate(pieces):
        found = None
        if piece.span:
            found = _encode(tokenizer, piece.text, habits, inside=number > 0)
        if found is None or len(found) < page_tokens:
            run += piece.text
            continue
        if run:
            ids += _encode(tokenizer, run, habits, inside=bool(spans))
            run = ""
        spans.append([len(ids), len(ids) + len(found)])
        ids += found
    if run:
        ids += _encode(tokenizer, run, habits, inside=bool(spans))
    if special_tokens:
        ids += habits.after
    return Encoded(ids, spans)


def _encode(tokenizer: Tokenizer, text: str, habits: _Habits, *, inside: bool) -> list[int]:
    """Ids of a text without special tokens; ``inside`` a prompt also without a leading space."""
    options = {"add_special_tokens": False} if habits.says_so else {}
    if not (inside and habits.leads):
        return list(tokenizer.encode(text, **options))
    for anchor in ANCHORS:
        before = list(tokenizer.encode(anchor, **options))
        ids = list(tokenizer.encode(anchor + text, **options))
        if ids[: len(before)] == before:
            return ids[len(before) :]
    raise CutError(
        f"this tokenizer puts a space before a text, and {text[:20]!r} can not be encoded without"
    )


def _habits_of(tokenizer: Tokenizer) -> _Habits:
    found = _known.get(tokenizer)
    if found is None:
        found = _known[tokenizer] = _observe(tokenizer)
    return found


def _observe(tokenizer: Tokenizer) -> _Habits:
    says_so = len(tokenizer.encode("")) > 0
    options = {"add_special_tokens": False} if says_so else {}
    bare, whole = list(tokenizer.encode("a", **options)), list(tokenizer.encode("a"))
    start = next(
        (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare),
        0,
    )
    anchor = list(tokenizer.encode(ANCHORS[0], **options))
    joined = list(tokenizer.encode(ANCHORS[0] + "a", **options))
    return _Habits(
        before=tuple(whole[:start]),
        after=tuple(whole[start + len(bare) :]),
        says_so=says_so,
        leads=joined != anchor + bare,
    )
