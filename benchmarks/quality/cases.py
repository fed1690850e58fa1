"""What is asked: contexts of documents, and questions behind them. Token ids throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Offsets = tuple[tuple[int, int], ...]  # half-open, ascending, disjoint


@dataclass(frozen=True, slots=True)
class Question:
    """What stands between the documents and the answer."""

    kind: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]  # empty: nobody knows it, full attention's stands in
    full_only: bool = False  # asked of full attention alone, to know its recall better

    @property
    def answer_tokens(self) -> int | None:
        """How many tokens of an answer are looked at; None: as many as is usual."""
        return len(self.answer) or None


@dataclass(frozen=True, slots=True)
class Donor:
    """An earlier request with the same documents, behind other things."""

    tokens: tuple[int, ...]
    documents: Offsets  # in the order in which the context has them


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt up to the question. Its documents are its spans."""

    seed: int
    tokens: tuple[int, ...]
    documents: Offsets
    document_bytes: int  # 0: they differ
    questions: tuple[Question, ...]
    donor: Donor

    def document(self, number: int) -> tuple[int, ...]:
        """Its token ids."""
        start, end = self.documents[number]
        return self.tokens[start:end]


@dataclass(frozen=True, slots=True)
class Group:
    """Contexts that are read one after the other: later ones share documents with earlier ones.

    A *counted* group has every setting's cache for itself, so that the tokens that its readers compute
    are those of a first and of a later reader.
    """

    contexts: tuple[Context, ...]
    counted: bool

    def temperatures(self) -> list[bool | None]:
        """Of each context: True if all its documents were read before, False if none was."""
        known: set[tuple[int, ...]] = set()
        found: list[bool | None] = []
        for context in self.contexts:
            documents = {context.document(n) for n in range(len(context.documents))}
            old = len(documents & known)
            found.append(True if old == len(documents) else None if old else False)
            known |= documents
        return found


def place(
    before: Sequence[int], documents: Sequence[Sequence[int]], between: Sequence[int] = ()
) -> tuple[tuple[int, ...], Offsets]:
    """Documents one behind the other after ``before``, and where they lie."""
    tokens = list(before)
    where: list[tuple[int, int]] = []
    for document in documents:
        if where:
            tokens += between
        where.append((len(tokens), len(tokens) + len(document)))
        tokens += document
    return tuple(tokens), tuple(where)
