"""One model: the server first, the simulation after it, then rows and checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import Check, progress
from tessera_sglang.config import PAGE_TOKENS
from tessera_sglang.root import root_tokens
from tessera_sglang.verify.figures import agreed_tokens
from tessera_sglang.verify.run import VOCABULARY

from . import comparison, quote_cases
from .cases import Context, Group
from .outcomes import first_choices
from .recall_cases import Exam
from .rows import Row, rows
from .served import Asker, Found, serving
from .ways import BARE, DEFAULT, Way, span_ways

NEGLIGIBLE_NATS = 0.005  # a tenth of what `tessera-sglang verify` lets pass
SAME_NATS = 1e-3  # between server and simulation, both in float32
DECODED_AS_SCORED = 0.95  # share of answers; a near-tie may fall the other way
LOG_S = 15  # between two lines of progress in a log
HELD_AGAINST = 2  # contexts on which server and simulation are compared


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and what it is asked. With exams an answer is right in every token, or wrong."""

    name: str
    path: Path
    groups: tuple[Group, ...]
    tokenizer: Any
    pool_tokens: int
    exams: tuple[Exam, ...] = ()
    threads: int = 1  # of the server, and of the simulation after it

    @property
    def contexts(self) -> list[Context]:
        """Those that are read in every way."""
        return [c for group in self.groups for c in group.contexts if not c.questions[0].full_only]

    def answers(self, ways: int) -> int:
        """How many will be asked for, with so many ways beside full attention."""
        questions = [q for g in self.groups for context in g.contexts for q in context.questions]
        return len(questions) + ways * sum(not question.full_only for question in questions)


@dataclass(frozen=True, slots=True)
class Result:
    """Of one model."""

    rows: list[Row]
    checks: list[Check]


def measure(subject: Subject) -> Result:
    """Everything; minutes.

    Raises:
        LaunchError, ServerError: the server did not start, or gave up a request.
    """
    ways = list(span_ways(subject.tokenizer, PAGE_TOKENS))
    total = subject.answers(1 + len(ways) + len(comparison.SHARES))
    rate = 0.1 if sys.stderr.isatty() else LOG_S
    with tqdm(total=total, unit="answer", desc=subject.name, mininterval=rate) as bar:
        progress(f"{subject.name}: starting the server")
        with serving(subject.path, subject.pool_tokens, subject.threads) as client:
            asker = Asker(client, quote_cases.ANSWER_TOKENS, bar.update)
            found = asker.everything(subject.groups, ways)
            default = next(way for way in ways if way.name == DEFAULT)
            same = _decoded_as_scored(asker, found, subject, default)
        torch.set_num_threads(subject.threads)
        comparison.compare(subject.path, subject.groups, found, bar.update)
    apart = _apart(subject, found)
    whole = bool(subject.exams)
    measured = rows(subject.name, found.outcomes, found.costs, whole_answers=whole)
    checks = [
        *exam_checks(subject.name, subject.exams, found),
        *quality_checks(subject.name, measured),
        *(
            Check.at_most(
                f"{subject.name}: {way}, server against simulation, nats", nats, SAME_NATS
            )
            for way, nats in apart.items()
        ),
        Check.at_least(f"{subject.name}: answers decoded as scored", same, DECODED_AS_SCORED),
    ]
    return Result(measured, checks)


def _decoded_as_scored(asker: Asker, found: Found, subject: Subject, way: Way) -> float:
    """Share of first questions whose greedy answer leaves full attention's where scoring says."""
    same = []
    for context in subject.contexts:
        question = context.questions[0]
        key = (context.tokens, question.tokens)
        reference = found.references[key].tokens
        scored = [*first_choices(found.scored[way.name, key]), False].index(False)
        answer = asker.decoded(context, question, way, len(reference))
        same.append(agreed_tokens(reference, answer) == scored)
    return sum(same) / len(same)


def _apart(subject: Subject, found: Found) -> dict[str, float]:
    root = root_tokens(
        "auto", tokenizer=subject.tokenizer, vocab_size=VOCABULARY, page_size=PAGE_TOKENS
    )
    some = subject.contexts[:: -(-len(subject.contexts) // HELD_AGAINST)]
    return comparison.worst_difference(subject.path, some, found, root, PAGE_TOKENS)


def exam_checks(model: str, exams: Sequence[Exam], found: Found) -> Iterator[Check]:
    """Full attention's recall, over the questions that it alone was asked."""
    for exam in exams:
        exact = [one.exact for one in found.full_only if one.documents == exam.documents]
        name = f"{model}: recall of {len(exact)} questions, {exam.name}, full attention"
        yield Check.at_least(name, sum(exact) / len(exact), exam.recall)


def quality_checks(model: str, measured: Sequence[Row]) -> Iterator[Check]:
    """The default has to be worth its price. Differences below `NEGLIGIBLE_NATS` are none."""
    kl = {row.setting: row.kl for row in measured if row.by == "all"}
    name = f"{model}: KL of the default {DEFAULT}, by {BARE}'s or {NEGLIGIBLE_NATS:g}"
    yield Check.at_most(name, kl[DEFAULT], max(kl[BARE], NEGLIGIBLE_NATS))
