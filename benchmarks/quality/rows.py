"""Outcomes as flat rows: one for everything, one for each size and kind, one for each cell."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from .outcomes import Cost, Outcome
from .ways import AGAIN, FULL, PATCHED, REUSED

_T = TypeVar("_T")
RECALL, QUOTED = "recall", "quote accuracy"
LABELS = ("documents", "document_bytes", "kind")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting on some of the questions: all, those that share one label, or those of a *cell*.

    A label is None where the questions differ in it.

    ``recall`` is the share of answers that are right in every token, or, where ``right`` says so, of
    tokens of a quotation. Spreads are standard deviations of the seeds' means.
    """

    model: str
    setting: str
    root: str | None
    link_pages: int | None
    simulated: bool
    by: str  # "all", the name of a label, or "cell": all labels
    documents: int | None
    document_bytes: int | None
    kind: str | None
    questions: int
    seeds: int
    right: str  # what ``recall`` is: RECALL or QUOTED
    recall: float
    recall_spread: float
    nll: float  # nats a token, of the right answer
    nll_spread: float
    kl: float  # nats a token
    kl_spread: float
    worst_kl: float
    agreement: float  # share of full attention's answer
    agreed_tokens: float
    prompt_tokens: float | None
    computed_warm: float | None  # tokens of a prompt whose documents were read before, mean
    computed_cold: float | None  # of a first reader, as the server reports it: at most the prompt


def rows(
    model: str, outcomes: Sequence[Outcome], costs: Sequence[Cost], *, whole_answers: bool
) -> list[Row]:
    """Of every setting, in the order in which they were measured."""
    settings = list(dict.fromkeys(one.way for one in outcomes))
    found = []
    for setting in settings:
        mine = [one for one in outcomes if one.way == setting]
        paid = [one for one in costs if one.way == setting]
        for by, labels in _selections(mine):
            some = [one for one in mine if _fits(one, labels)]
            if some:
                here = _paid(paid, labels)
                found.append(_row((model, setting, by), some, here, whole_answers))
    return found


def _selections(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """A label with one value selects nothing."""
    values = {name: sorted({getattr(one, name) for one in outcomes}) for name in LABELS}
    values = {name: some for name, some in values.items() if len(some) > 1}
    yield "all", {}
    for name, some in values.items():
        yield from ((name, {name: value}) for value in some)
    if len(values) > 1:
        for cell in product(*values.values()):
            yield "cell", dict(zip(values, cell, strict=True))


def _fits(one: object, labels: Mapping[str, object]) -> bool:
    return all(getattr(one, name) == value for name, value in labels.items())


def _paid(costs: Sequence[Cost], labels: Mapping[str, object]) -> list[Cost]:
    """Readers of such documents, whatever was asked."""
    sizes = {name: value for name, value in labels.items() if name != "kind"}
    return [one for one in costs if _fits(one, sizes)]


def _row(
    names: tuple[str, str, str],
    outcomes: Sequence[Outcome],
    costs: Sequence[Cost],
    whole_answers: bool,
) -> Row:
    model, setting, by = names
    right: Callable[[Outcome], float] = (
        (lambda one: one.exact) if whole_answers else (lambda one: one.right)
    )
    root, _, pages = setting.rpartition("/")
    return Row(
        model=model,
        setting=setting,
        root=root or None,
        link_pages=int(pages) if root else None,
        simulated=setting in (REUSED, PATCHED),
        by=by,
        documents=_common(one.documents for one in outcomes),
        document_bytes=_common(one.document_bytes for one in outcomes) or None,
        kind=_common(one.kind for one in outcomes),
        questions=len(outcomes),
        seeds=len({one.seed for one in outcomes}),
        right=RECALL if whole_answers else QUOTED,
        recall=_mean(outcomes, right),
        recall_spread=_spread(outcomes, right),
        nll=_mean(outcomes, lambda one: one.nll_nats),
        nll_spread=_spread(outcomes, lambda one: one.nll_nats),
        kl=_mean(outcomes, lambda one: one.kl_nats),
        kl_spread=_spread(outcomes, lambda one: one.kl_nats),
        worst_kl=max(one.worst_kl_nats for one in outcomes),
        agreement=_mean(outcomes, lambda one: one.agreement),
        agreed_tokens=_mean(outcomes, lambda one: one.agreed_tokens),
        prompt_tokens=_tokens(costs, lambda one: one.prompt_tokens),
        computed_warm=_computed(costs, setting, warm=True),
        computed_cold=_computed(costs, setting, warm=False),
    )


def _common(values: Iterable[_T]) -> _T | None:
    known = set(values)
    return known.pop() if len(known) == 1 else None


def _computed(costs: Sequence[Cost], setting: str, *, warm: bool) -> float | None:
    """Full attention knows no documents: each of its readers is both."""
    plain = setting in (FULL, AGAIN)
    return _tokens(
        [one for one in costs if plain or one.warm is warm], lambda one: one.computed_tokens
    )


def _tokens(costs: Sequence[Cost], of: Callable[[Cost], int]) -> float | None:
    return statistics.fmean(map(of, costs)) if costs else None


def _mean(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> float:
    return statistics.fmean(map(of, outcomes))


def _spread(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> float:
    seeds: dict[int, list[Outcome]] = {}
    for one in outcomes:
        seeds.setdefault(one.seed, []).append(one)
    means = [_mean(some, of) for some in seeds.values()]
    return statistics.stdev(means) if len(means) > 1 else 0.0
