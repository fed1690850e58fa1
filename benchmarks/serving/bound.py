"""What counting lets one expect of a workload: tokens, and pairs that attention scores.

A prefill costs something for every token (projections, feed-forward) and something for every pair of a
query and a key that it may see. Stock computes every prompt whole. Tessera computes each span once,
behind the root, and of every prompt what is not shared; but those tokens see the whole prompt, so a
long document still costs every reader pairs. `fit` finds what a token, a pair and a request cost from
runs of the stock side alone; what Tessera's runs should then take is a prediction, no fit.

Counted are requests that share nothing but their spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera_sglang.attention.layout import ContextLayout, Span, lay_out
from tessera_sglang.bench.agents import Request


@dataclass(frozen=True, slots=True)
class Work:
    """Of all prefills together; ``requests`` are prompts and span prefills."""

    tokens: int
    pairs: int
    requests: int

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens, self.pairs + other.pairs, self.requests + other.requests
        )


NONE = Work(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a server shares spans."""

    page_tokens: int
    link_pages: int
    root_tokens: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds. A request's has its share of decoding and all that the engine does once for it."""

    token_s: float
    pair_s: float
    request_s: float

    def of(self, work: Work) -> float:
        """Of that work."""
        return (
            self.token_s * work.tokens + self.pair_s * work.pairs + self.request_s * work.requests
        )


def whole(requests: Sequence[Request]) -> Work:
    """Every prompt computed from its first token to its last."""
    return sum((_causal(len(request.input_ids)) for request in requests), NONE)


def shared(requests: Sequence[Request], geometry: Geometry) -> Work:
    """Every span once, the root once, and of every prompt what it can not share."""
    bodies: set[tuple[int, ...]] = set()
    total = NONE
    for request in requests:
        layout = _layout(request, geometry)
        if layout is None:
            total += _causal(len(request.input_ids))
            continue
        for run in layout.runs:
            bodies.add(request.input_ids[run.body_start : run.body_start + run.body_tokens])
        seen = np.asarray(layout.remaining, dtype=np.int64) + 1
        total += Work(len(seen), int(seen.sum()), 1)
    root = geometry.root_tokens
    for body in bodies:
        behind = _causal(root + len(body))
        total += Work(len(body), behind.pairs - _causal(root).pairs, 1)
    return total + (Work(root, _causal(root).pairs, 0) if bodies else NONE)


def _layout(request: Request, geometry: Geometry) -> ContextLayout | None:
    spans = [Span(start, end) for start, end in request.spans]
    return lay_out(
        spans,
        prompt_tokens=len(request.input_ids),
        page_size=geometry.page_tokens,
        root_tokens=geometry.root_tokens,
        linked_pages=geometry.link_pages,
    )


def _causal(tokens: int) -> Work:
    return Work(tokens, tokens * (tokens + 1) // 2, 1)


def fit(works: Sequence[Work], seconds: Sequence[float]) -> Cost:
    """Least squares of relative errors; a cost that would be negative is 0 and the others fit again.

    Raises:
        ValueError: fewer runs than costs.
    """
    if len(works) < 3:
        raise ValueError(f"three costs need three runs or more, got {len(works)}")
    rows = np.array([[w.tokens, w.pairs, w.requests] for w in works], dtype=np.float64)
    rows /= np.asarray(seconds, dtype=np.float64)[:, None]
    scale = rows.max(axis=0)  # pairs are millions, requests are few
    kept = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(rows[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    costs = np.zeros(3)
    costs[kept] = found / scale[kept]
    return Cost(*costs.tolist())
