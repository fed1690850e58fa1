"""Which settings are good enough, and which of them is the cheapest.

A setting passes when full attention's distributions and its own are close (mean KL), and when greedy
answers stay together for a while (agreement). The second bar is low on purpose: one near-tie that
falls the other way ends the agreement of two answers that are equally good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .figures import Summary
from .settings import FULL, SERVER, Setting

THRESHOLD_NATS = 0.05
LEAST_AGREEMENT = 0.5
UNSURE_NATS = 1.5  # mean entropy of the next token under full attention
SHORT_TOKENS = 4  # mean length of its answers


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the figures say, with the bars they were held against."""

    threshold_nats: float
    least_agreement: float
    passing: tuple[str, ...]  # names of settings
    server_passes: bool
    recommended: Setting | None  # None: spans are better not declared


def passes(summary: Summary, threshold_nats: float) -> bool:
    """Whether a setting costs little enough."""
    return summary.mean_kl_nats <= threshold_nats and summary.agreement >= LEAST_AGREEMENT


def judge(summaries: Mapping[Setting, Summary], threshold_nats: float) -> Verdict:
    """The verdict on all settings with spans, the server's own among them.

    Recommended is the one that computes the fewest tokens for known spans; of equals that of the
    smaller divergence, to a hundredth, and one that can be named before the server's own.
    """
    good = {
        setting: found
        for setting, found in summaries.items()
        if setting.root != FULL and passes(found, threshold_nats)
    }
    return Verdict(
        threshold_nats=threshold_nats,
        least_agreement=LEAST_AGREEMENT,
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


def unsure(mean_entropy_nats: float) -> str | None:
    """Why the figures of quality may mean nothing, if so."""
    if mean_entropy_nats < UNSURE_NATS:
        return None
    return (
        f"full attention itself is unsure of its answers: its next-token entropy is "
        f"{mean_entropy_nats:.2f} nats or more on average, that of a trained model that answers a "
        f"question is as a rule below {UNSURE_NATS:g}. With random weights, or prompts that ask "
        "nothing, the figures of quality and the verdict mean nothing."
    )


def short(mean_tokens: float) -> str | None:
    """Why there is little to compare, if so."""
    if mean_tokens >= SHORT_TOKENS:
        return None
    return (
        f"full attention ends its answers after {mean_tokens:.1f} tokens on average, so there is little "
        "to compare. A chat model wants its template: give the prompts as messages."
    )
