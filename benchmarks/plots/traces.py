"""Recorded sessions: what each side served from its cache.

Reads ``figures["sessions"]``, a list of ``{"name", "prompt_tokens", "shifted_tokens", "stock":
{"cached_tokens"}, "tessera": {"cached_tokens"}}``.
"""

from __future__ import annotations

from typing import Any

from benchmarks.saved import Saved

from .style import STOCK, TESSERA

_WIDTH = 0.4


def draw(pyplot: Any, result: Saved) -> Any:
    """Two bars a session, in the order of how much shifts in them."""
    sessions = sorted(
        result.figures["sessions"], key=lambda one: one["shifted_tokens"] / one["prompt_tokens"]
    )
    figure, axes = pyplot.subplots(figsize=(8.0, 3.4))
    for side, colour, offset in (("stock", STOCK, -_WIDTH / 2), ("tessera", TESSERA, _WIDTH / 2)):
        shares = [one[side]["cached_tokens"] / one["prompt_tokens"] for one in sessions]
        places = [place + offset for place in range(len(sessions))]
        axes.bar(places, [100 * share for share in shares], _WIDTH, color=colour, label=side)
    labels = [
        f"{one['name'][:4]}\n{one['shifted_tokens'] / one['prompt_tokens']:.0%}" for one in sessions
    ]
    axes.set_xticks(range(len(sessions)), labels)
    axes.set_ylim(0, 100)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("% of prompt tokens")
    axes.set_xlabel(
        "session, and the share of its tokens that stand where they did not stand before"
    )
    axes.set_title("Served from the cache, recorded sessions of agents")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return figure
