"""From layouts and a batch to the parts that a kernel runs.

Attention is a sum of parts. A run of queries attends to its own remaining tokens, causally, and to
each shared run it sees, fully and with a rotation of its own; the parts' outputs are merged by their
log-sum-exp. Because remaining tokens stand in prompt order, the queries that see a run are always
the last ones of their request, so a part is two intervals and no mask. A request without spans is
one part and needs no merge.

The plan is built once for a forward pass and read by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layout import ContextLayout


@dataclass(frozen=True, slots=True)
class RequestQueries:
    """The new tokens of one request in a batch."""

    query_start: int  # into the flattened queries of the batch
    query_tokens: int
    seq_tokens: int  # row length once the new tokens are stored
    layout: ContextLayout | None


@dataclass(frozen=True, slots=True)
class Part:
    """Queries ``[query_start, query_end)`` of the batch attend to row positions
    ``[key_start, key_end)`` of request ``request``.

    ``causal_from`` keys lie before the first query of the part and each further query sees one more;
    None: every query sees every key. Queries are turned by ``rotation`` positions first.
    ``merge`` is set when the queries have another part that was run before.
    """

    request: int
    query_start: int
    query_end: int
    key_start: int
    key_end: int
    causal_from: int | None
    rotation: int
    merge: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Parts in the order in which they run; the first part of each query does not merge."""

    parts: tuple[Part, ...]
    query_tokens: int
    shared_queries: tuple[tuple[int, int], ...]  # queries of requests with more than one part


def build_plan(requests: Sequence[RequestQueries]) -> Plan:
    """Parts for a batch, O(requests + shared runs)."""
    parts: list[Part] = []
    shared: list[tuple[int, int]] = []
    for number, request in enumerate(requests):
        if not request.query_tokens:
            continue
        layout = request.layout
        end = request.query_start + request.query_tokens
        first_row = request.seq_tokens - request.query_tokens
        own_start = layout.shared_tokens if layout is not None else 0
        parts.append(
            Part(
                request=number,
                query_start=request.query_start,
                query_end=end,
                key_start=own_start,
                key_end=request.seq_tokens,
                causal_from=first_row - own_start if request.query_tokens > 1 else None,
                rotation=0,
                merge=False,
            )
        )
        if layout is None:
            continue
        before = len(parts)
        for run, visible in zip(layout.runs, layout.visible_from, strict=True):
            start = max(request.query_start, request.query_start + own_start + visible - first_row)
            if start >= end:
                continue
            parts.append(
                Part(
                    request=number,
                    query_start=start,
                    query_end=end,
                    key_start=run.row_start,
                    key_end=run.row_end,
                    causal_from=None,
                    rotation=run.rotation,
                    merge=True,
                )
            )
        if len(parts) > before:
            shared.append((request.query_start, end))
    return Plan(tuple(parts), sum(r.query_tokens for r in requests), tuple(shared))
