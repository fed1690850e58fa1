"""Workloads (a) to (e) on every side, round by round, and what the rounds say.

Sides take turns within a round, in an order that rotates, so that whatever else the machine does
falls on all of them. A ratio compares the sides inside a round; the median of the rounds is reported.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .sides import NEXT, OURS, Found, Side, in_turn, request
from .workloads import Prompts, Trace

Calls = dict[str, list[tuple[int, int]]]  # operation -> (nanoseconds, tokens) of each call
Values = npt.NDArray[np.float64]  # one for each round
Hits = dict[str, list[int]]  # workload -> tokens found by each look-up


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round of one side."""

    calls: Calls
    hits: Hits


@dataclass(slots=True)
class Rounds:
    """All rounds of all sides."""

    outcomes: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))

    @property
    def operations(self) -> list[str]:
        """Names like ``a.match``."""
        return sorted(next(iter(self.outcomes.values()))[0].calls)

    def seconds(self, side: str, operation: str) -> Values:
        """Time spent in an operation in each round."""
        return np.array(
            [sum(ns for ns, _ in o.calls[operation]) / 1e9 for o in self.outcomes[side]]
        )

    def percentile_us(self, side: str, operation: str, percent: float) -> Values:
        """Percentile of the latency in each round."""
        return np.array(
            [
                np.percentile([ns for ns, _ in outcome.calls[operation]], percent) / 1e3
                for outcome in self.outcomes[side]
            ]
        )

    def summary(self, side: str, operation: str) -> dict[str, float]:
        """Throughput and latency of a side: medians of the rounds."""
        tokens = sum(count for _, count in self.outcomes[side][0].calls[operation])
        return {
            "calls": len(self.outcomes[side][0].calls[operation]),
            "tokens_per_call": tokens / len(self.outcomes[side][0].calls[operation]),
            "tokens_per_s": tokens / float(np.median(self.seconds(side, operation))),
            "p50_us": float(np.median(self.percentile_us(side, operation, 50))),
            "p99_us": float(np.median(self.percentile_us(side, operation, 99))),
        }

    def throughput_ratio(self, stock: str, operation: str) -> float:
        """Our throughput by stock's."""
        return _median_ratio(self.seconds(stock, operation), self.seconds(OURS, operation))

    def p99_ratio(self, stock: str, operation: str) -> float:
        """Stock's p99 latency by ours: more is better for us."""
        return _median_ratio(
            self.percentile_us(stock, operation, 99), self.percentile_us(OURS, operation, 99)
        )

    def hits(self, side: str) -> Hits:
        """Tokens found, of the first round; every round must find the same."""
        first, *others = self.outcomes[side]
        assert all(other.hits == first.hits for other in others), "rounds found different tokens"
        return first.hits


def run_rounds(sides: Sequence[Side], rounds: int, scenario: Callable[[Side], Outcome]) -> Rounds:
    """One round to warm up, then ``rounds`` that count."""
    found = Rounds()
    for number in range(rounds + 1):
        for side in in_turn(sides, number):
            side.reset()
            gc.collect()
            outcome = scenario(side)
            if number:
                found.outcomes[side.name].append(outcome)
    return found


def prompts_scenario(prompts: Prompts, repeats: int) -> Callable[[Side], Outcome]:
    """(d) insert everything; (a) to (c) are matched on the way or afterwards.

    ``a.match`` repeats the very prompts. ``b.match`` are the look-ups on arrival, when the shared
    prefix is there and a request's own tokens are not; ``b.match_again`` those of the next turn.
    ``c.match`` looks for spans by their own chains, ``c.readers`` by the prompts that hold them.
    """

    def run(side: Side) -> Outcome:
        calls: Calls = {}
        hits: Hits = {}
        for workload, indexed in (
            ("a", prompts.long),
            ("b", prompts.shared),
            ("c", prompts.bodies),
        ):
            lives = [side.insert(tokens) for tokens in indexed]
            found, took = [f for f, _ in lives], [ns for _, ns in lives]
            lengths = [len(tokens) for tokens in indexed]
            calls[f"{workload}.insert"] = list(zip(took, lengths, strict=True))
            calls.setdefault("d.insert", []).extend(calls[f"{workload}.insert"])
            if workload == "b":
                calls |= _look_up_calls("b.match", found, lengths)
            hits[f"{workload}.arrival"] = [f.page_tokens for f in found]
        calls["d.insert_duplicates"] = _insert_duplicates(side, prompts.long)
        for operation, again, times in (
            ("a.match", prompts.long, repeats),
            ("b.match_again", prompts.shared_next_turn, 1),
            ("c.match", [body + NEXT for body in prompts.bodies], repeats),
        ):
            requests = [request(tokens) for tokens in again] * times
            found = [side.look_up(req) for req in requests]
            lengths = [len(req.full_untruncated_fill_ids) for req in requests]
            calls |= _look_up_calls(operation, found, lengths)
            hits[operation] = [f.page_tokens for f in found]
        readers = [side.look_up(request(tokens)) for tokens in prompts.readers]
        hits["c.readers"] = [f.page_tokens for f in readers]
        return Outcome(calls, hits)

    return run


def trace_scenario(trace: Trace) -> Callable[[Side], Outcome]:
    """(e) replay: each request is matched, published when its prompt is computed and at its end."""

    def run(side: Side) -> Outcome:
        found: list[Found] = []
        looked_up: list[int] = []
        inserted: list[tuple[int, int]] = []
        for recorded in trace.requests:
            req = request(recorded.prompt)
            found.append(side.look_up(req))
            looked_up.append(len(recorded.prompt))
            side.admit(req, output_tokens=len(recorded.output))
            inserted.append((side.publish(req, len(recorded.prompt)), len(recorded.prompt)))
            took = side.finish(req, recorded.output)
            if recorded.output:
                inserted.append((took, len(recorded.prompt) + len(recorded.output) - 1))
        calls = _look_up_calls("e.match", found, looked_up)
        calls["e.insert"] = inserted
        return Outcome(calls, {"e": [f.page_tokens for f in found]})

    return run


def _insert_duplicates(side: Side, prompts: Iterable[Any]) -> list[tuple[int, int]]:
    """Publish copies of what is there, by requests that were admitted before it was."""
    calls = []
    for tokens in prompts:
        req = request(tokens)
        req.last_node = side.cache.root_node_handle()
        side.admit(req)
        calls.append((side.publish(req, len(tokens)), len(tokens)))
        side.finish(req)
    return calls


def _look_up_calls(operation: str, found: Sequence[Found], tokens: Sequence[int]) -> Calls:
    pairs = list(zip(found, tokens, strict=True))
    return {
        operation: [(f.match_ns, count) for f, count in pairs],
        f"{operation}+slots": [(f.slots_ns, count) for f, count in pairs],
    }


def _median_ratio(stock: Values, ours: Values) -> float:
    return float(np.median(stock / ours))
