"""Which settings are good enough, and which of them is the cheapest.

A setting passes when its distributions are close to full attention's (mean KL), and when its first
choice is full attention's nearly as often as full attention's own in a second run. How long greedy
answers stay together is reported and decides nothing: one near-tie that falls the other way ends it,
so over a few prompts it says more about chance than about spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .figures import Summary
from .settings import FULL, SERVER, Setting

THRESHOLD_NATS = 0.05
CHOICE_MARGIN = 0.1  # share of positions, below the floor
UNSURE_NATS = 3.0  # entropy of the next token in full attention's answers
UNKNOWN_TEXT_NATS = 5.0  # a guess among 148 tokens; weights that learned nothing are above it
SHORT_TOKENS = 4  # mean length of its answers


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the figures say, with the bars they were held against."""

    threshold_nats: float
    least_same_choice: float  # share of positions: the floor less the margin
    passing: tuple[str, ...]  # names of settings
    server_passes: bool
    recommended: Setting | None  # None: spans are better not declared


def passes(summary: Summary, threshold_nats: float, least_same_choice: float) -> bool:
    """Whether a setting costs little enough."""
    return summary.mean_kl_nats <= threshold_nats and summary.same_choice >= least_same_choice


def judge(summaries: Mapping[Setting, Summary], threshold_nats: float) -> Verdict:
    """The verdict on all settings with spans; the server's own and full attention are among them.

    Recommended is the one that computes the fewest tokens for known spans; of equals that of the
    smaller divergence, to a hundredth, and one that can be named before the server's own.
    """
    floor = next(one.same_choice for setting, one in summaries.items() if setting.root == FULL)
    least = max(floor - CHOICE_MARGIN, 0.0)
    good = {
        setting: found
        for setting, found in summaries.items()
        if setting.root != FULL and passes(found, threshold_nats, least)
    }
    return Verdict(
        threshold_nats=threshold_nats,
        least_same_choice=least,
        passing=tuple(setting.name for setting in good),
        server_passes=any(setting.root == SERVER for setting in good),
        recommended=min(
            good,
            key=lambda s: (
                good[s].warm_computed_tokens,
                round(good[s].mean_kl_nats, 2),
                s.root == SERVER,
            ),
            default=None,
        ),
    )


def unsure(entropy_nats: float, text_nll_nats: float) -> str | None:
    """Why the figures of quality may mean nothing, if so.

    ``entropy_nats`` is of the next token in full attention's answers, ``text_nll_nats`` of the tokens at
    the end of the prompts; both are means.
    """
    if entropy_nats < UNSURE_NATS and text_nll_nats < UNKNOWN_TEXT_NATS:
        return None
    return (
        "this looks like random weights, or prompts that are no text: full attention's entropy is "
        f"{entropy_nats:.2f} nats a token or more in its answers (unsure from {UNSURE_NATS:g} on), and "
        f"the end of the prompts costs it {text_nll_nats:.2f} nats a token (unknown from "
        f"{UNKNOWN_TEXT_NATS:g} on). The figures of quality and the verdict mean nothing then."
    )


def short(mean_tokens: float) -> str | None:
    """Why there is little to compare, if so."""
    if mean_tokens >= SHORT_TOKENS:
        return None
    return (
        f"full attention ends its answers after {mean_tokens:.1f} tokens on average, so there is little "
        "to compare. A chat model wants its template: give the prompts as messages."
    )
