"""Recorded sessions on both sides: every prompt in order, one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.report import Check, Report, Table
from benchmarks.serving.replay import replay
from benchmarks.serving.servers import SIDES, Urls
from benchmarks.serving.state import state_of
from benchmarks.workloads.traces import Replayed
from tessera_sglang.bench.sides import STOCK, TESSERA
from tessera_sglang.demo.client import flush

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass(frozen=True, slots=True)
class Side:
    """One pass over a session, on an empty cache."""

    cached_tokens: int  # of the prompts
    computed_tokens: int  # by the engine: spans, roots and linked pages too
    wall_s: float
    ttft_p50_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A session and its passes, by side."""

    name: str
    requests: int
    spans: int
    prompt_tokens: int
    shifted_tokens: int
    passes: dict[str, tuple[Side, ...]]

    def median(self, side: str, figure: str) -> float:
        """Over the passes of a side."""
        return float(statistics.median(getattr(one, figure) for one in self.passes[side]))

    @property
    def gained_tokens(self) -> float:
        """Cached with Tessera, less stock's."""
        return self.median(TESSERA, "cached_tokens") - self.median(STOCK, "cached_tokens")


def measure(
    urls: Urls,
    name: str,
    requests: Sequence[Replayed],
    rounds: int,
    bar: tqdm[Any],
    *,
    link_pages: int | None = None,
) -> Outcome:
    """``rounds`` passes of each side, in turns. ``link_pages`` overrides the server's."""
    passes: dict[str, list[Side]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            bar.set_description(f"session {name}, {side}")
            passes[side].append(_pass(urls[side], side, requests, bar, link_pages))
    return Outcome(
        name=name,
        requests=len(requests),
        spans=sum(len(one.request.spans) for one in requests),
        prompt_tokens=sum(len(one.request.input_ids) for one in requests),
        shifted_tokens=sum(one.shifted_tokens for one in requests),
        passes={side: tuple(found) for side, found in passes.items()},
    )


def _pass(
    url: str, side: str, requests: Sequence[Replayed], bar: tqdm[Any], link_pages: int | None
) -> Side:
    flush(url)
    before = state_of(url).computed_tokens
    start = time.perf_counter()
    sent = [one.request for one in requests]
    answers = replay(url, side, sent, bar.update, link_pages=link_pages)
    wall_s = time.perf_counter() - start
    return Side(
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        computed_tokens=state_of(url).computed_tokens - before,
        wall_s=wall_s,
        ttft_p50_s=statistics.median(answer.ttft_s for answer in answers),
    )


def add(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Checks, figures and the table."""
    for one in outcomes:
        gained = f"session {one.name}: tokens from the cache, tessera less stock"
        check = Check.above if one.shifted_tokens else Check.at_least
        report.checks.append(check(gained, one.gained_tokens, 0))
    report.figures["sessions"] = [_figures(one) for one in outcomes]
    report.figures["all"] = _all(outcomes)
    report.tables.append(_table(outcomes))


def _figures(one: Outcome) -> dict[str, object]:
    names = ("cached_tokens", "computed_tokens", "wall_s", "ttft_p50_s")
    return {
        "name": one.name,
        "requests": one.requests,
        "spans": one.spans,
        "prompt_tokens": one.prompt_tokens,
        "shifted_tokens": one.shifted_tokens,
        **{side: {name: one.median(side, name) for name in names} for side in SIDES},
    }


def _all(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Sums over the sessions."""
    prompt = sum(one.prompt_tokens for one in outcomes)
    sums = {
        side: {
            name: sum(one.median(side, name) for one in outcomes)
            for name in ("cached_tokens", "computed_tokens", "wall_s")
        }
        for side in SIDES
    }
    return {
        "requests": sum(one.requests for one in outcomes),
        "prompt_tokens": prompt,
        "shifted_tokens": sum(one.shifted_tokens for one in outcomes),
        **{
            side: {**found, "cached_share": found["cached_tokens"] / prompt}
            for side, found in sums.items()
        },
    }


def _table(outcomes: Sequence[Outcome]) -> Table:
    rows: list[tuple[object, ...]] = []
    for one in outcomes:
        shares = (one.median(side, "cached_tokens") / one.prompt_tokens for side in SIDES)
        computed = (round(one.median(side, "computed_tokens")) for side in SIDES)
        walls = (f"{one.median(side, 'wall_s'):.2f}" for side in SIDES)
        shifted = f"{one.shifted_tokens / one.prompt_tokens:.1%}"
        shown = (f"{share:.1%}" for share in shares)
        rows.append((one.name, one.requests, one.prompt_tokens, shifted, *shown, *computed, *walls))
    columns = ("session", "requests", "prompt tokens", "shifted")
    heads = (f"{what}, {side}" for what in ("cached", "computed", "wall s") for side in SIDES)
    return Table(
        "Recorded sessions, prompts in order, caches empty at the start", (*columns, *heads), rows
    )
