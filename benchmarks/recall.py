"""Associative recall over documents: the language that the example model is trained on.

A *fact* is a key and a value of two capital letters, ``QZ:MK``. Facts stand among words in lower case,
which say nothing, in documents; documents stand behind a preamble. A question names a key; the answer
repeats it with its value::

    system     the old keeper counts the lanterns.
    user       note one. the ferry QZ:MK waits for AB:CD rain. …
               QZ?
    assistant  QZ:MK

``QZ??`` asks for the value's value, a fact of *another* document: ``QZ:MK:TR``. So an answer is right
only if it was read in the context, a question can need one document or two, and guessing is right
once in 676 times.

Prompts are token ids in the example model's chat template: a token is a byte, from 256 on are special.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

BOS, EOS, SYSTEM, USER, ASSISTANT = 256, 257, 259, 260, 261
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CODES = tuple(first + second for first in LETTERS for second in LETTERS)
FACT_BYTES = len(" QZ:MK")

_WORDS = (
    *(
        "amber",
        "anchor",
        "answer",
        "apple",
        "attic",
        "autumn",
        "baker",
        "barrel",
        "basket",
        "beacon",
    ),
    *(
        "bell",
        "bench",
        "boiler",
        "bottle",
        "bridge",
        "broken",
        "bucket",
        "candle",
        "canal",
        "captain",
    ),
    *("carries", "castle", "cellar", "chimney", "clock", "cloud", "colder", "copper", "corner"),
    *("counts", "cousin", "crane", "crosses", "curtain", "dancer", "distant", "doctor", "driver"),
    *("early", "east", "echo", "engine", "evening", "every", "farmer", "feather", "ferry", "finds"),
    *(
        "forest",
        "forgets",
        "friend",
        "garden",
        "gate",
        "gentle",
        "glass",
        "grain",
        "green",
        "harbour",
    ),
    *("harvest", "heavy", "hidden", "hollow", "honey", "island", "keeper", "kettle", "ladder"),
    *("lantern", "late", "leaves", "ledger", "letter", "listens", "little", "market", "meadow"),
    *("mends", "mill", "morning", "narrow", "needle", "north", "ocean", "old", "orchard", "paints"),
    *(
        "paper",
        "pilot",
        "pocket",
        "promise",
        "quarry",
        "quiet",
        "rain",
        "remembers",
        "river",
        "rope",
    ),
    *("sailor", "salt", "season", "shadow", "sharp", "signal", "silver", "sings", "slow", "snow"),
    *("south", "station", "stone", "street", "summer", "table", "teacher", "thunder", "ticket"),
    *("tower", "valley", "valve", "village", "waits", "walks", "water", "west", "window", "winter"),
    *("with", "without", "under", "over", "near", "behind", "the", "the", "the", "a", "a", "and"),
    *("of", "of", "in", "in", "to", "for", "from", "it", "is", "was", "not", "all", "one", "two"),
)
_STOPS = 0.12  # share of words that end a sentence
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Question:
    """``text`` asks for ``answer``; ``documents`` are the numbers of those that hold the facts."""

    text: str
    answer: str
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class World:
    """What a prompt is made of. Every question can be answered from the documents."""

    preamble: str  # empty: no system message
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a world. A document is padded with words to ``document_bytes``, exactly."""

    documents: int
    facts: int  # in each document
    document_bytes: int
    preamble_bytes: int

    def __post_init__(self) -> None:
        if self.documents * self.facts > len(CODES):
            raise ValueError(f"{self.documents} x {self.facts} facts are more than there are keys")
        least = len(_heading(2)) + self.facts * FACT_BYTES + 2  # "note three." is the longest
        if self.document_bytes < least:
            raise ValueError(f"{self.facts} facts need document_bytes of at least {least}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids up to the answer, and half-open offsets of the documents in them."""

    tokens: tuple[int, ...]
    documents: tuple[tuple[int, int], ...]


def world(shape: Shape, chance: random.Random, *, two_documents: float = 0.5) -> World:
    """Documents, and one question for every fact, in random order.

    ``two_documents`` is the share of facts whose value is a key in another document; these are asked
    for with two steps.
    """
    keys = chance.sample(CODES, shape.documents * shape.facts)
    of_document = [keys[n * shape.facts : (n + 1) * shape.facts] for n in range(shape.documents)]
    home = {key: n for n, some in enumerate(of_document) for key in some}
    values: dict[str, str] = {}
    chained = []
    for key in keys:
        values[key] = chance.choice(CODES)
        if shape.documents > 1 and chance.random() < two_documents:
            other = (home[key] + chance.randrange(1, shape.documents)) % shape.documents
            values[key] = chance.choice(of_document[other])
            chained.append(key)
    questions = [Question(f"{key}?", f"{key}:{values[key]}", (home[key],)) for key in keys]
    for key in chained:
        middle = values[key]
        answer = f"{key}:{middle}:{values[middle]}"
        questions.append(Question(f"{key}??", answer, (home[key], home[middle])))
    chance.shuffle(questions)
    documents = tuple(
        _document(n, [f"{key}:{values[key]}" for key in some], shape.document_bytes, chance)
        for n, some in enumerate(of_document)
    )
    return World(_preamble(shape.preamble_bytes, chance), documents, tuple(questions))


def prompt(world: World, question: Question) -> Prompt:
    """One question behind preamble and documents, up to where the answer begins."""
    tokens, documents = context(world)
    tokens += [*question.text.encode(), EOS, ASSISTANT]
    return Prompt(tuple(tokens), documents)


def context(world: World) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Token ids up to the question, and where the documents are in them."""
    tokens = [BOS]
    if world.preamble:
        tokens += [SYSTEM, *world.preamble.encode(), EOS]
    tokens.append(USER)
    where = []
    for document in world.documents:
        where.append((len(tokens), len(tokens) + len(document)))
        tokens += document.encode()
    return tokens, tuple(where)


def _heading(number: int) -> str:
    return f"note {_NUMBERS[number % len(_NUMBERS)]}."


def _document(number: int, facts: Sequence[str], length: int, chance: random.Random) -> str:
    """Facts at random places among words; ends with a full stop and a newline."""
    heading = _heading(number)
    pieces = _words(length - len(heading) - 2 - FACT_BYTES * len(facts), chance)
    for fact in facts:
        pieces.insert(chance.randint(0, len(pieces)), f" {fact}")
    return heading + "".join(pieces).ljust(length - 1 - len(heading), ".") + "\n"


def _preamble(length: int, chance: random.Random) -> str:
    return "".join(_words(length - 1, chance)).lstrip().ljust(length, ".")


def _words(room: int, chance: random.Random) -> list[str]:
    """As many words with a space before each as fit into ``room`` bytes, now and then a full stop."""
    found: list[str] = []
    while True:
        word = f" {chance.choice(_WORDS)}"
        if chance.random() < _STOPS:
            word += "."
        room -= len(word)
        if room < 0:
            return found
        found.append(word)
