"""Quotes: passages for a real language model, through its chat template.

Three passages stand behind a system preamble, in changing order. The answer is begun with some words of
one of them, and what follows there is the right answer: from the passage's title on (*opening*), or
from the beginning of a sentence further on (*middle*). All passages are this project's own texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera_sglang.demo.agents import ROLES
from tessera_sglang.verify import defaults
from tessera_sglang.verify.prompts import Prompt

from .cases import Context, Donor, Group, Question, place

OPENING, MIDDLE, OWN = "opening", "middle", "own prompt"
OWN_TEXTS = Path(__file__).resolve().parents[1] / "texts"
SHARED_TEXTS = (
    "lens",
    "lock",
    "bread",
    "bees",
    "metre",
)  # of `tessera-sglang verify`, the beginnings
LEAST_WORDS = 160  # of such a beginning: whole paragraphs
DOCUMENTS = 3
KINDS = (OPENING, MIDDLE, MIDDLE)  # a question for each passage
ANSWER_TOKENS = 24
GIVEN_TOKENS = 8  # of the sentence that is to be continued
MIDDLE_FROM_TOKENS = 72  # behind the first page
PLACE = "\x00"  # where the passages go, in a rendered prompt
ASKED = {
    OPENING: 'Quote the passage "{title}" word for word, from its title on.',
    MIDDLE: 'Quote from the passage "{title}" word for word, and go on after this beginning.',
}


@dataclass(frozen=True, slots=True)
class Passage:
    """``tokens`` begin with the title; the text begins at ``text_at``."""

    title: str
    tokens: tuple[int, ...]
    text_at: int
    sentences: tuple[int, ...]  # where sentences begin that can be asked for


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template around the passages."""

    tokenizer: Any

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece of a prompt."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def around(self, preamble: str, question: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before the passages, and what behind them up to the answer."""
        messages = [
            {"role": "system", "content": preamble},
            {"role": "user", "content": f"{PLACE}\n\n{question}"},
        ]
        rendered = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before, after = str(rendered).split(PLACE)
        return self.encode(before), self.encode(after)


def groups(tokenizer: Any, seeds: int, contexts: int) -> list[Group]:
    """One group a seed: three passages behind several preambles. The first group is counted."""
    template = Template(tokenizer)
    corpus = [_passage(template, text) for text in texts()]
    if seeds * DOCUMENTS > len(corpus):
        raise ValueError(f"{seeds} seeds need {seeds * DOCUMENTS} passages, not {len(corpus)}")
    random.Random("passages").shuffle(corpus)
    found = []
    for seed in range(seeds):
        some, foreign = corpus[:DOCUMENTS], corpus[DOCUMENTS % len(corpus)]
        made = _contexts(template, seed, some, foreign, contexts)
        found.append(Group(tuple(made), counted=seed == 0))
        corpus = corpus[DOCUMENTS:] + some
    return found


def texts() -> Iterator[str]:
    """Title, empty line, paragraphs."""
    for path in sorted(OWN_TEXTS.glob("*.txt")):
        yield path.read_text("utf-8").strip()
    for name in SHARED_TEXTS:
        title, *paragraphs = defaults.passage(name).split("\n\n")
        kept: list[str] = []
        while len(" ".join(kept).split()) < LEAST_WORDS:
            kept.append(paragraphs[len(kept)])
        yield "\n\n".join((title, *kept))


def _passage(template: Template, text: str) -> Passage:
    title = text.split("\n")[0]
    tokens = template.encode(text)
    heading = f"{title}\n\n"
    decode = template.tokenizer.decode
    text_at = next(at for at in range(len(tokens)) if decode(tokens[:at]) == heading)
    last = len(tokens) - GIVEN_TOKENS - ANSWER_TOKENS
    pieces = [decode([token]) for token in tokens]
    sentences = tuple(
        at
        for at in range(MIDDLE_FROM_TOKENS, last)
        if pieces[at].strip() and pieces[at - 1].endswith((".", "\n"))
    )
    return Passage(title, tokens, text_at, sentences)


def _contexts(
    template: Template, seed: int, some: Sequence[Passage], foreign: Passage, count: int
) -> Iterator[Context]:
    """The passages in turn first; in none as they stood in the donor, behind a foreign one."""
    chance = random.Random(f"quotes {seed}")
    between = template.encode("\n\n")
    earlier, *preambles = _preambles(chance, count + 1)
    others = [foreign, *reversed(some)]
    donor, lay = place(template.around(earlier, "")[0], [one.tokens for one in others], between)
    where = dict(zip((one.title for one in others), lay, strict=True))
    for number, preamble in enumerate(preambles):
        turn = number % len(some)
        order = [*some[turn:], *some[:turn]]
        before, _ = template.around(preamble, "")
        tokens, documents = place(before, [one.tokens for one in order], between)
        asked = zip(KINDS, chance.sample(order, len(KINDS)), strict=True)
        yield Context(
            seed=seed,
            tokens=tokens,
            documents=documents,
            document_bytes=0,
            questions=tuple(
                _question(template, preamble, kind, passage, chance) for kind, passage in asked
            ),
            donor=Donor(donor, tuple(where[one.title] for one in order)),
        )


def _preambles(chance: random.Random, count: int) -> Iterator[str]:
    """One to three roles each; no role is in two of them."""
    roles = chance.sample(ROLES, len(ROLES))
    for _ in range(count):
        some = [roles.pop() for _ in range(chance.randint(1, 3))]
        yield " ".join(some)


def _question(
    template: Template, preamble: str, kind: str, passage: Passage, chance: random.Random
) -> Question:
    _, after = template.around(preamble, ASKED[kind].format(title=passage.title))
    at = 0 if kind == OPENING else chance.choice(passage.sentences)
    given = passage.text_at if kind == OPENING else at + GIVEN_TOKENS
    return Question(
        kind,
        (*after, *passage.tokens[at:given]),
        passage.tokens[given : given + ANSWER_TOKENS],
    )


def own(prompts: Sequence[Prompt], tokenizer: Any) -> list[Group]:
    """The user's prompts. Nobody knows the right answer: full attention's stands in for it."""
    template = Template(tokenizer)
    return [Group((_own(template, prompt),), counted=True) for prompt in prompts]


def _own(template: Template, prompt: Prompt) -> Context:
    end = min(prompt.spans[-1][1], len(prompt.tokens) - 1)  # the last token sees the whole prompt
    spans = tuple((start, min(stop, end)) for start, stop in prompt.spans if start < end)
    documents = [prompt.tokens[start:stop] for start, stop in spans]
    donor, where = place(
        template.encode(" ".join(ROLES[:2]) + "\n\n"),
        list(reversed(documents)),
        template.encode("\n\n"),
    )
    return Context(
        seed=0,
        tokens=prompt.tokens[:end],
        documents=spans,
        document_bytes=0,
        questions=(Question(OWN, prompt.tokens[end:], ()),),
        donor=Donor(donor, tuple(reversed(where))),
    )
