"""The recall language: every question has one answer, and it stands where it is said to stand."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from benchmarks.recall import BOS, EOS, SYSTEM, USER, Shape, World, context, prompt, world

SHAPE = Shape(documents=4, facts=8, document_bytes=192, preamble_bytes=90)


def _facts(text: str) -> dict[str, str]:
    found = re.findall(r"\b([A-Z]{2}):([A-Z]{2})\b", text)
    assert len({key for key, _ in found}) == len(found), "a key stands once"
    return dict(found)


def _worlds() -> list[World]:
    shapes = (SHAPE, Shape(8, 16, 256, 0), Shape(1, 1, 64, 500), Shape(2, 13, 400, 1))
    return [world(shape, random.Random(n)) for shape in shapes for n in range(20)]


def test_every_answer_follows_from_the_documents_it_names() -> None:
    two = 0
    for made in _worlds():
        by_document = [_facts(text) for text in made.documents]
        everything = {key: value for some in by_document for key, value in some.items()}
        for question in made.questions:
            steps = question.answer.split(":")
            assert question.text == steps[0] + "?" * (len(steps) - 1)
            assert all(everything[a] == b for a, b in itertools.pairwise(steps))
            assert len(set(question.documents)) == len(question.documents) == len(steps) - 1
            for key, document in zip(steps, question.documents, strict=False):
                assert key in by_document[document]
            two += len(steps) == 3
    assert two > 100


def test_sizes_are_exact_and_documents_lie_where_the_offsets_say() -> None:
    made = world(SHAPE, random.Random(3))
    assert [len(text) for text in made.documents] == [192] * 4
    assert len(made.preamble) == 90
    assert len(_facts("".join(made.documents))) == 32
    asked = prompt(made, made.questions[0])
    for (start, end), text in zip(asked.documents, made.documents, strict=True):
        assert bytes(asked.tokens[start:end]).decode() == text
    tokens, documents = context(made)
    assert documents == asked.documents
    assert list(asked.tokens[: len(tokens)]) == tokens
    assert tokens[:2] == [BOS, SYSTEM]
    assert tokens.count(EOS) == 1


def test_without_a_preamble_there_is_no_system_message() -> None:
    tokens, _ = context(world(Shape(1, 1, 64, 0), random.Random(0)))
    assert tokens[:2] == [BOS, USER]
    assert SYSTEM not in tokens


def test_a_world_follows_from_its_seed() -> None:
    same = [world(SHAPE, random.Random(seed)) for seed in (7, 7, 8)]
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((40, 17, 400, 0), "more than there are keys"), ((1, 16, 64, 0), "document_bytes")],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int, int], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        Shape(*sizes)
