"""What the store has, as far as it said so lately.

A scheduler asks about the same waiting requests in every step. An answer is kept for some steps: an old
yes costs a read that misses, an old no delays a hit that another server's write made possible.
"""

from __future__ import annotations

from ..lower import PageName, Store, TierKey

KEPT_POLLS = 64
KEPT_ANSWERS = 1 << 16


class Presence:
    """Answers of a store, by key: a key that two pages share is found out by the read."""

    __slots__ = ("_answers", "_polls", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answers: dict[TierKey, bool] = {}
        self._polls = 0

    def leading(self, names: list[PageName]) -> int:
        """How many of the first pages the store has. Asks only about those it was not asked about."""
        answers = self._answers
        unknown = [name for name in names if name.key not in answers]
        if unknown:
            if len(answers) + len(unknown) > KEPT_ANSWERS:
                answers.clear()
                unknown = names
            there = self._store.contains(unknown)
            answers.update((name.key, has) for name, has in zip(unknown, there, strict=True))
        for number, name in enumerate(names):
            if not answers[name.key]:
                return number
        return len(names)

    def note(self, key: TierKey, has: bool) -> None:
        """A read or a write found out."""
        self._answers[key] = has

    def tick(self) -> None:
        """A step went by."""
        self._polls += 1
        if self._polls >= KEPT_POLLS:
            self._polls = 0
            self._answers.clear()
