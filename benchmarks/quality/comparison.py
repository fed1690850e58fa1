"""The simulated ways, on the questions that the server was asked; and the simulation itself, checked.

*Reused*: every document's KV is what it was in another request, behind another preamble and other
documents, moved to its place. *Recomputed*: likewise, but the first 15 % of each document's tokens are
computed in place, as EPIC (arXiv 2410.15332) does with the beginnings of chunks, and CacheBlend with
tokens that it selects.

Two of the server's own ways are simulated as well, on some contexts: how far the distributions are
apart says whether the comparison is fair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tessera_sglang.verify.client import Scored
from tessera_sglang.verify.figures import kl_nats

from .cases import Context, Group, Question
from .outcomes import Cost, outcome
from .served import Found, Key
from .simulated import Moved, Simulator
from .ways import BARE, DEFAULT, FULL, PATCHED, RECOMPUTED_SHARE, REUSED

SHARES = {REUSED: 0.0, PATCHED: RECOMPUTED_SHARE}


def compare(
    model: Path, groups: Sequence[Group], found: Found, progress: Callable[[], object]
) -> None:
    """Adds the outcomes and costs of both ways to ``found``."""
    simulator = Simulator.load(model)
    for group in groups:
        if group.contexts[0].questions[0].full_only:
            continue
        donors: dict[tuple[int, ...], Any] = {}  # contexts of a group may have the same one
        for context in group.contexts:
            tokens = context.donor.tokens
            if tokens not in donors:
                donors = {tokens: simulator.computed(tokens)}
            for way, share in SHARES.items():
                parts = list(moved(context, donors[tokens], share))
                cache = simulator.assembled(context.tokens, parts)
                if group.counted:
                    found.costs.append(_cost(way, context, parts))
                for question, key in _asked(context):
                    _add(found, simulator, cache, way, context, question, key)
                    progress()


def moved(context: Context, donor: Any, share: float) -> Iterator[Moved]:
    """The documents out of the donor; the first ``share`` of their tokens is left to be computed."""
    pairs = zip(context.documents, context.donor.documents, strict=True)
    for (start, stop), (donor_start, donor_stop) in pairs:
        computed = math.ceil(share * (stop - start))
        if computed < stop - start:
            yield Moved(donor, donor_start + computed, donor_stop, to=start + computed)


def _cost(way: str, context: Context, parts: Sequence[Moved]) -> Cost:
    question = next(_asked(context))[0]
    prompt = len(context.tokens) + len(question.tokens)
    return Cost(
        way=way,
        documents=len(context.documents),
        document_bytes=context.document_bytes,
        prompt_tokens=prompt,
        computed_tokens=prompt - sum(part.end - part.start for part in parts),
        warm=True,
    )


def _asked(context: Context) -> Iterator[tuple[Question, Key]]:
    for question in context.questions:
        if not question.full_only:
            yield question, (context.tokens, question.tokens)


def _add(
    found: Found,
    simulator: Simulator,
    cache: Any,
    way: str,
    context: Context,
    question: Question,
    key: Key,
) -> None:
    reference = found.references[key]
    on_reference = simulator.score(cache, question.tokens, reference.tokens, reference.probable)
    on_answer = on_reference
    if question.answer and question.answer != reference.tokens:
        on_answer = simulator.score(cache, question.tokens, question.answer, reference.probable)
    found.outcomes.append(outcome(way, context, question, reference, on_reference, on_answer))


def worst_difference(
    model: Path,
    contexts: Sequence[Context],
    found: Found,
    auto_root: Sequence[int],
    page_tokens: int,
) -> dict[str, float]:
    """Of three of the server's ways: the largest KL of its answers to the simulated ones, nats."""
    simulator = Simulator.load(model)
    worst = dict.fromkeys((FULL, BARE, DEFAULT), 0.0)
    for context in contexts:
        parts = {
            FULL: [],
            BARE: span_parts(simulator, context, (), 0, page_tokens),
            DEFAULT: span_parts(simulator, context, auto_root, 1, page_tokens),
        }
        for way, some in parts.items():
            cache = simulator.assembled(context.tokens, some)
            for question, key in _asked(context):
                reference = found.references[key]
                probable = reference.probable
                there = simulator.score(cache, question.tokens, reference.tokens, probable)
                here = found.scored[way, key]
                worst[way] = max(worst[way], *_apart(here, there))
    return worst


def span_parts(
    simulator: Simulator, context: Context, root: Sequence[int], link_pages: int, page_tokens: int
) -> list[Moved]:
    """Spans as the design has them: each body computed behind the root, its first pages in place."""
    found = []
    for start, end in context.documents:
        shared = (end - start) // page_tokens * page_tokens
        linked = link_pages * page_tokens
        if shared > linked:
            body = simulator.computed((*root, *context.tokens[start : start + shared]))
            found.append(
                Moved(body, len(root) + linked, len(root) + shared, to=start + linked),
            )
    return found


def _apart(here: Scored, there: Scored) -> list[float]:
    return [kl_nats(*pair) for pair in zip(here.of, there.of, strict=True)]
