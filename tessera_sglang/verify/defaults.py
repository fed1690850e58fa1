"""The prompts that come with the package: questions about five passages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tessera_sglang import spans
from tessera_sglang.text.marks import Marks, Piece

from .prompts import Encoder, Prompt


@dataclass(frozen=True, slots=True)
class Question:
    """A reader with a task, and the passages that stand between the two."""

    preamble: str
    passages: tuple[str, ...]
    question: str


def prompts(encoder: Encoder) -> list[Prompt]:
    """Every question with its passages as spans, each behind another preamble and in another order.

    In the model's chat template where it has one: a chat model may end a plain text at once.
    """
    tokenizer = encoder.tokenizer()
    chat = bool(getattr(tokenizer, "chat_template", None))
    found = []
    for number, question in enumerate(QUESTIONS, 1):
        pieces = _in_template(tokenizer, question) if chat else tuple(_plain(question))
        ids, raw = encoder.encode(pieces, special_tokens=not chat)
        declared = tuple((span.start, span.end) for span in spans.parse(raw, len(ids)))
        found.append(Prompt(f"default prompt {number}", tuple(ids), declared))
    return found


def _in_template(tokenizer: Any, question: Question) -> tuple[Piece, ...]:
    """As one message of the user, cut where marks came through the template."""
    marks = Marks.drawn()
    marked = [marks.around(passage(name), number) for number, name in enumerate(question.passages)]
    message = {
        "role": "user",
        "content": "\n\n".join([question.preamble, *marked, question.question]),
    }
    text = str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
    return marks.cut(text, [(region.start, region.end) for region in marks.regions(text)])


def _plain(question: Question) -> Iterator[Piece]:
    yield Piece(question.preamble, span=False)
    for text in map(passage, question.passages):
        yield Piece("\n\n", span=False)
        yield Piece(text, span=True)
    yield Piece(f"\n\nQuestion: {question.question}\nAnswer:", span=False)


def passage(name: str) -> str:
    """One of the passages that come with the package."""
    file = resources.files(__package__).joinpath(f"texts/{name}.txt")
    return file.read_text(encoding="utf-8").strip()


QUESTIONS = (
    Question(
        "Read the passages and answer from them alone.",
        ("lens", "lock", "bread"),
        "Who built the lens that was lit at Cordouan, and in which year?",
    ),
    Question(
        "You are a patient teacher. Use the passages below.",
        ("bread", "metre", "bees"),
        "Why does dough rise more slowly in a cold kitchen?",
    ),
    Question(
        "Notes for a quiz. Every answer can be proved from the text.",
        ("metre", "lens", "lock"),
        "Between which two towns was the arc measured?",
    ),
    Question(
        "The following was collected by a pupil for a talk on machines.",
        ("lock", "bees", "lens"),
        "Describe in order what a boat going up does in a lock.",
    ),
    Question(
        "Background for a visitor. Keep to the facts.",
        ("bees", "bread", "metre"),
        "How do bees keep warm in winter?",
    ),
    Question(
        "You check other people's work. Quote the sentence that answers the question.",
        ("lock", "metre", "bread"),
        "How is the metre defined today?",
    ),
    Question(
        "Five minutes to read, one to answer.",
        ("lens", "bees", "lock"),
        "What does a worker bee do in the last weeks of her life?",
    ),
    Question(
        "Summaries should be short and should not add anything.",
        ("bread", "lens", "bees"),
        "Summarize in two sentences what the passages say about light and about heat.",
    ),
)
