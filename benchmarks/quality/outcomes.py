"""One question under one way: what the log-probabilities say, whoever computed them.

Everything is teacher-forced, on the right answer and on full attention's. Decoding greedily gives an
answer exactly if each of its tokens is the first choice behind those before it, so recall and
agreement are those of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera_sglang.verify.client import Scored
from tessera_sglang.verify.figures import kl_nats, mean_nll_nats

from .cases import Context, Question


@dataclass(frozen=True, slots=True)
class Reference:
    """What full attention says to one question."""

    tokens: tuple[int, ...]  # its greedy answer
    scored: Scored  # of that, with its most probable tokens

    @property
    def probable(self) -> tuple[int, ...]:
        """The tokens whose log-probabilities are compared."""
        found = {token for known in self.scored.top for token in known}
        return tuple(sorted(found.union(self.tokens)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one question. ``nll_nats`` and ``kl_nats`` are means over tokens."""

    way: str
    seed: int
    documents: int
    document_bytes: int
    kind: str
    exact: bool  # all tokens of the right answer are first choices
    right: float  # share of them that are
    nll_nats: float  # of the right answer
    kl_nats: (
        float  # full attention's distribution against this one's, along full attention's answer
    )
    worst_kl_nats: float
    agreed_tokens: int  # that greedy answers begin with, this way and with full attention
    agreement: float  # share of full attention's answer


@dataclass(frozen=True, slots=True)
class Cost:
    """What one reader's prompt took to compute, in tokens."""

    way: str
    documents: int
    document_bytes: int
    prompt_tokens: int
    computed_tokens: int
    warm: bool | None  # True: its documents were known; False: none of them was


def outcome(
    way: str,
    context: Context,
    question: Question,
    reference: Reference,
    on_reference: Scored,
    on_answer: Scored,
) -> Outcome:
    """``on_answer`` is scored on the right answer; both know their most probable token."""
    firsts, chosen = first_choices(on_answer), first_choices(on_reference)
    kl = [kl_nats(*pair) for pair in zip(reference.scored.top, on_reference.of, strict=True)]
    agreed = chosen.index(False) if False in chosen else len(chosen)
    return Outcome(
        way=way,
        seed=context.seed,
        documents=len(context.documents),
        document_bytes=context.document_bytes,
        kind=question.kind,
        exact=all(firsts),
        right=sum(firsts) / len(firsts),
        nll_nats=mean_nll_nats(on_answer.chosen),
        kl_nats=sum(kl) / len(kl),
        worst_kl_nats=max(kl),
        agreed_tokens=agreed,
        agreement=agreed / len(chosen),
    )


def first_choices(scored: Scored) -> list[bool]:
    """Of each position, whether its token is the most probable one."""
    pairs: Sequence[tuple[float, float]] = [
        (chosen, max(top.values())) for chosen, top in zip(scored.chosen, scored.top, strict=True)
    ]
    return [chosen >= most for chosen, most in pairs]
