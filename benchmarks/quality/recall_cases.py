"""Recall: worlds of facts for the example model (`benchmarks/recall.py`).

Each world is read behind two preambles. Questions that need one document and questions that need two
are taken in equal numbers. Beside them full attention sits an exam: more worlds, a few questions each,
as they come (every third needs two documents), so that its recall is known well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks import recall

from .cases import Context, Donor, Group, Question

ONE, TWO = "one document", "two documents"
READERS = 2  # of a world, behind preambles of one length: what they compute can be compared
PREAMBLE_BYTES = (16, 500)  # shorter ones could be the same
LEFT_OUT_BYTES = 40  # a world that is only there for its preamble


@dataclass(frozen=True, slots=True)
class Exam:
    """A size of world at which the example model is known to answer, with full attention."""

    documents: int
    facts: int
    recall: float  # at least

    @property
    def name(self) -> str:
        """For checks."""
        return f"{self.documents} documents x {self.facts} facts"


EXAMS = (Exam(4, 8, 0.95), Exam(8, 16, 0.90))


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is asked."""

    seeds: int
    document_bytes: tuple[int, ...]
    exams: tuple[Exam, ...]
    questions: int  # of each kind in each context
    exam_worlds: int  # for each exam
    exam_questions: int  # in each world


def groups(amount: Amount) -> list[Group]:
    """One group a world; those of the first seed are counted."""
    found = [
        Group(tuple(_contexts(exam, size, seed, amount)), counted=seed == 0)
        for seed in range(amount.seeds)
        for exam in amount.exams
        for size in amount.document_bytes
    ]
    for exam in amount.exams:
        papers = (_paper(exam, number, amount) for number in range(amount.exam_worlds))
        found += [Group((paper,), counted=False) for paper in papers]
    return found


def _paper(exam: Exam, number: int, amount: Amount) -> Context:
    """A world and its first questions, for full attention alone."""
    chance = random.Random(f"exam of quality {number} {exam.documents}")
    size = amount.document_bytes[0]
    shape = recall.Shape(exam.documents, exam.facts, size, chance.randint(0, 500))
    world = recall.world(shape, chance)
    tokens, documents = recall.context(world)
    asked = world.questions[: amount.exam_questions]
    questions = (replace(_question(question), full_only=True) for question in asked)
    donor = Donor(tuple(tokens), documents)  # nobody reuses anything here
    return Context(number, tuple(tokens), documents, size, tuple(questions), donor)


def _contexts(exam: Exam, size: int, seed: int, amount: Amount) -> Iterator[Context]:
    chance = random.Random(f"quality {seed} {exam.documents} {size}")
    shape = recall.Shape(exam.documents, exam.facts, size, 0)
    world, other = recall.world(shape, chance), recall.world(shape, chance)
    donor = _donor(world, other, chance)
    asked: set[str] = set()
    preamble_bytes = chance.randint(*PREAMBLE_BYTES)
    for _ in range(READERS):
        reader = replace(world, preamble=_preamble(preamble_bytes, chance))
        tokens, documents = recall.context(reader)
        questions = tuple(_questions(world, asked, amount))
        yield Context(seed, tuple(tokens), documents, size, questions, donor)


def _donor(world: recall.World, other: recall.World, chance: random.Random) -> Donor:
    """Another preamble, a document of another world, and the world's documents from last to first."""
    earlier = replace(
        world,
        preamble=_preamble(chance.randint(0, 500), chance),
        documents=(other.documents[0], *reversed(world.documents)),
    )
    tokens, documents = recall.context(earlier)
    return Donor(tuple(tokens), tuple(reversed(documents[1:])))


def _questions(world: recall.World, asked: set[str], amount: Amount) -> Iterator[Question]:
    """Questions that were not asked yet: they go into ``asked``."""
    for documents in (1, 2):
        fresh = [
            question
            for question in world.questions
            if len(question.documents) == documents and question.text not in asked
        ]
        for question in fresh[: amount.questions]:
            asked.add(question.text)
            yield _question(question)


def _question(question: recall.Question) -> Question:
    return Question(
        kind=ONE if len(question.documents) == 1 else TWO,
        tokens=(*question.text.encode(), recall.EOS, recall.ASSISTANT),
        answer=tuple(question.answer.encode()),
    )


def _preamble(length: int, chance: random.Random) -> str:
    shape = recall.Shape(1, 1, LEFT_OUT_BYTES, length)
    return recall.world(shape, chance).preamble
