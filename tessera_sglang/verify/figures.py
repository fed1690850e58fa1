"""Arithmetic on what a server answers: divergence, entropy, likelihood, agreement.

Distributions are known by their most probable tokens only. What is left of each is put into one
bucket; merging tokens can only lower a divergence or an entropy, so both are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Logprobs = Mapping[int, float]  # of token ids, nats
FLOOR = 1e-9  # probability of the bucket below which float32 log-probabilities say nothing


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest divergence of a setting, and where it was."""

    kl_nats: float
    where: str  # the prompt
    token: int  # position in the continuation, from 0


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """One prompt under one setting, against full attention. One entry of ``kl_nats`` a position."""

    where: str
    kl_nats: tuple[float, ...]
    nll_nats: float  # of the reference continuation, mean over its tokens
    full_nll_nats: float
    same_choices: int  # positions at which the most probable token is the reference's
    agreed_tokens: int  # that both greedy continuations begin with
    reference_tokens: int
    prompt_tokens: int
    cold_computed_tokens: int  # by the first reader of the spans
    warm_computed_tokens: int  # by a reader behind another preamble

    @property
    def agreement(self) -> float:
        """Share of the reference that the greedy continuation with spans begins with."""
        return self.agreed_tokens / self.reference_tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """All prompts under one setting. Means and choices are over tokens, agreement over prompts."""

    mean_kl_nats: float
    worst: Worst
    nll_nats: float
    full_nll_nats: float
    same_choice: float
    agreement: float
    prompt_tokens: int
    cold_computed_tokens: int
    warm_computed_tokens: int

    @property
    def saved(self) -> float:
        """Share of the prompts' tokens that a reader of known spans does not compute."""
        return 1 - self.warm_computed_tokens / self.prompt_tokens


def kl_nats(full: Logprobs, spans: Logprobs) -> float:
    """KL(full || spans) over the tokens of ``full`` and a bucket for all others: a lower bound.

    ``spans`` knows every token of ``full``.
    """
    total = sum(math.exp(logprob) * (logprob - spans[token]) for token, logprob in full.items())
    rest_full, rest_spans = _rest(full), _rest({token: spans[token] for token in full})
    if rest_full > FLOOR:
        total += rest_full * math.log(rest_full / max(rest_spans, FLOOR))
    return max(total, 0.0)


def entropy_nats(known: Logprobs) -> float:
    """Entropy over the known tokens and a bucket for all others: a lower bound."""
    total = -sum(math.exp(logprob) * logprob for logprob in known.values())
    rest = _rest(known)
    return total - rest * math.log(rest) if rest > FLOOR else total


def _rest(known: Logprobs) -> float:
    return max(1 - sum(map(math.exp, known.values())), 0.0)


def mean_nll_nats(logprobs: Sequence[float]) -> float:
    """Mean negative log-likelihood of the tokens that ``logprobs`` belong to."""
    return -sum(logprobs) / len(logprobs)


def same_choices(reference: Sequence[int], positions: Sequence[Logprobs]) -> int:
    """At how many positions the token of the reference is the most probable of those known."""
    return sum(
        known[token] >= max(known.values())
        for token, known in zip(reference, positions, strict=True)
    )


def agreed_tokens(reference: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(reference, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(other)))


def summarize(figures: Sequence[PromptFigures]) -> Summary:
    """Of one setting; at least one prompt."""
    positions = [
        Worst(kl, one.where, token) for one in figures for token, kl in enumerate(one.kl_nats)
    ]
    tokens = sum(one.reference_tokens for one in figures)
    return Summary(
        mean_kl_nats=sum(at.kl_nats for at in positions) / len(positions),
        worst=max(positions, key=lambda at: at.kl_nats),
        nll_nats=sum(one.nll_nats * one.reference_tokens for one in figures) / tokens,
        full_nll_nats=sum(one.full_nll_nats * one.reference_tokens for one in figures) / tokens,
        same_choice=sum(one.same_choices for one in figures) / tokens,
        agreement=sum(one.agreement for one in figures) / len(figures),
        prompt_tokens=sum(one.prompt_tokens for one in figures),
        cold_computed_tokens=sum(one.cold_computed_tokens for one in figures),
        warm_computed_tokens=sum(one.warm_computed_tokens for one in figures),
    )
