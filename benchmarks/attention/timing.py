"""Ways to compute the same thing, timed in turns.

Every way is called once, to warm up. Then, round by round, each is called once more, in an order that
rotates, so that whatever else the machine does falls on all of them. A time is the median of a way's
rounds; a ratio compares two ways inside a round, and the median of those is reported.

Of alternatives of which only the fastest matters, one that already took twice as long as the fastest
of them in its first call is not called again; its time is that of the one call, and is marked so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.report import progress

HOPELESS = 2.0  # times the first call of the fastest alternative


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of every round, by way. Ways that were given up have one, of their first call."""

    rounds: Mapping[str, tuple[float, ...]]
    given_up: frozenset[str]

    def median_s(self, way: str) -> float:
        """Median of a way's rounds."""
        return float(np.median(self.rounds[way]))

    def ratio(self, of: str, to: str) -> float:
        """Time of one way by that of another: the median over rounds."""
        first, second = np.array(self.rounds[of]), np.array(self.rounds[to])
        if len(first) != len(second):
            return self.median_s(of) / self.median_s(to)
        return float(np.median(first / second))

    def summary(self) -> dict[str, dict[str, object]]:
        """Figures for programs."""
        return {
            way: {
                "median_s": self.median_s(way),
                "fastest_s": min(seconds),
                "slowest_s": max(seconds),
                "calls": len(seconds),
                "given_up_after_first_call": way in self.given_up,
            }
            for way, seconds in self.rounds.items()
        }


@dataclass(frozen=True, slots=True)
class Turns:
    """How often ways are timed, and by which clock."""

    rounds: int
    clock: Callable[[], float] = time.perf_counter  # seconds

    def time(
        self, ways: Mapping[str, Callable[[], object]], *, keep: frozenset[str] | None = None
    ) -> Times:
        """Time ``ways``. Those not in ``keep`` (None: all) are alternatives that may be given up."""
        first = {way: self._seconds(call) for way, call in ways.items()}
        alternatives = [] if keep is None else [way for way in ways if way not in keep]
        limit = HOPELESS * min((first[way] for way in alternatives), default=math.inf)
        kept = [way for way in ways if way not in alternatives or first[way] <= limit]
        found: dict[str, list[float]] = {way: [] for way in kept}
        for number in range(self.rounds):
            turn = number % len(kept)
            for way in kept[turn:] + kept[:turn]:
                found[way].append(self._seconds(ways[way]))
        every = {way: tuple(found.get(way) or [first[way]]) for way in ways}
        medians = [f"{way} {np.median(s) * 1e3:,.1f} ms" for way, s in every.items()]
        progress("   " + ", ".join(medians))
        return Times(every, frozenset(ways) - frozenset(kept))

    def _seconds(self, call: Callable[[], object]) -> float:
        start = self.clock()
        call()
        return self.clock() - start
