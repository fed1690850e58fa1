"""From layouts and a batch to the parts that kernels run, as flat arrays.

Attention is a sum of parts. A request's new tokens attend to its own remaining tokens, causally, and
to each shared run they see, fully and with a rotation of its own; parts are merged by their
log-sum-exp. Because remaining tokens stand in prompt order, the queries that see a run are always the
last ones of their request, so a part is a run of queries and a few runs of keys, and no mask.

What can be one part is one: a run that needs no rotation and is seen by all of a request's queries is
read together with its own tokens, and requests that read the same physical pages stack their
(differently turned) queries, so that the pages are read once. A request without spans is one part.

A plan is built with a fixed number of bulk operations, whatever the batch, and serves every layer of
a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .layout import ContextLayout

Ints = npt.NDArray[np.int64]

PRIVATE = -1  # source of a run that is not known to be anybody else's
STACKED_ROWS = 1 << 14  # of one launch of span parts, unless told otherwise


@dataclass(frozen=True, slots=True, eq=False)
class BatchQueries:
    """The new tokens of a batch, request by request."""

    query_tokens: Ints  # [R]
    seq_tokens: Ints  # [R] length of the row once the new tokens are stored
    layouts: tuple[ContextLayout | None, ...]
    # Per request, an id of the physical pages of each of its runs, [runs]: equal ids, same pages.
    sources: tuple[Ints | None, ...]

    @classmethod
    def of(
        cls,
        query_tokens: Sequence[int],
        seq_tokens: Sequence[int],
        layouts: Sequence[ContextLayout | None],
        sources: Sequence[Ints | None] | None = None,
    ) -> BatchQueries:
        """From plain lists. Without ``sources`` every run is private to its request."""
        if sources is None:
            sources = [
                None if layout is None else np.full(len(layout.runs), PRIVATE, np.int64)
                for layout in layouts
            ]
        return cls(
            np.asarray(query_tokens, dtype=np.int64).reshape(-1),
            np.asarray(seq_tokens, dtype=np.int64).reshape(-1),
            tuple(layouts),
            tuple(sources),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MergeStep:
    """Stacked rows that are merged into their queries at once; both slices, or both index arrays."""

    rows: slice | Ints
    queries: slice | Ints


@dataclass(frozen=True, eq=False)
class Launch:
    """Parts that one kernel launch runs. Part p has rows ``query_indptr[p]:query_indptr[p + 1]`` of the
    stacked queries, and as keys the row positions of its pieces, one after the other.
    """

    causal: bool  # aligned at the end: the last query of a part sees all its keys
    query_indptr: Ints  # [P + 1]
    piece_indptr: Ints  # [P + 1]
    pieces: Ints  # [pieces, 3]: request, first row position, one past the last
    query_index: Ints | None  # [N] the batch's query in each stacked row; None: all, in order
    rotation: Ints | None  # [N] positions by which that query is turned; None: none is
    use_indptr: Ints | None = None  # [uses + 1] stacked rows of each request's use of a run

    @cached_property
    def key_indptr(self) -> Ints:
        """Keys of the parts, in tokens. [P + 1]"""
        ends = indptr(self.pieces[:, 2] - self.pieces[:, 1])
        return np.asarray(ends[self.piece_indptr])

    @property
    def rows(self) -> int:
        """N."""
        return int(self.query_indptr[-1])

    @property
    def parts(self) -> int:
        """P."""
        return len(self.query_indptr) - 1

    def merge_table(self, queries: int) -> Ints:
        """Stacked rows of every query, ``N`` where it has no more. [queries, most rows of one query]"""
        assert self.query_index is not None
        ordinals = _ordinals(self.query_index)
        depth = int(ordinals.max()) + 1 if len(ordinals) else 0
        table = np.full((queries, depth), self.rows, dtype=np.int64)
        table[self.query_index, ordinals] = np.arange(self.rows)
        return table

    def merge_steps(self) -> list[MergeStep]:
        """Stacked rows and their queries, cut so that no query occurs twice in a step.

        A use of a run is a run of rows over a run of queries: few of them are merged as slices, one by
        one. Many short ones are merged across requests, as many at a time as there are.
        """
        assert self.query_index is not None
        assert self.use_indptr is not None
        ordinals = _ordinals(self.query_index)
        depth = int(ordinals.max()) + 1 if len(ordinals) else 0
        if len(self.use_indptr) - 1 > 2 * depth:
            levels = [np.flatnonzero(ordinals == level) for level in range(depth)]
            return [MergeStep(rows, self.query_index[rows]) for rows in levels]
        steps = []
        for a, b in zip(self.use_indptr[:-1].tolist(), self.use_indptr[1:].tolist(), strict=True):
            first = int(self.query_index[a])
            steps.append(MergeStep(slice(a, b), slice(first, first + b - a)))
        return steps


@dataclass(frozen=True, eq=False)
class Plan:
    """What a forward pass runs. A query has one row in ``own`` and any number of them in ``spans``."""

    own: Launch
    spans: tuple[Launch, ...]
    query_tokens: int
    single: bool  # no request has more than one query: decode


def build_plan(batch: BatchQueries, *, stacked_rows: int = STACKED_ROWS, join: bool = True) -> Plan:
    """The parts of a batch.

    ``stacked_rows`` bounds the rows of one launch of span parts, which have an output of their own
    until they are merged; a single part may have more. Without ``join`` every run is a part of its
    own, also where it could be read with its request's tokens: plans of fixed shape need that.
    """
    tokens, lengths = batch.query_tokens, batch.seq_tokens
    active = np.flatnonzero(tokens)
    query_start = indptr(tokens)[:-1]
    first_row = lengths - tokens
    single = bool((tokens <= 1).all())
    own_start = np.zeros_like(lengths)
    readers = [number for number in active.tolist() if batch.layouts[number] is not None]
    if not readers:
        pieces = np.stack([active, own_start[active], lengths[active]], axis=1)
        own = Launch(
            not single, indptr(tokens[active]), np.arange(len(active) + 1), pieces, None, None
        )
        return Plan(own, (), int(tokens.sum()), single)

    tables, sources = [], []
    for number in readers:
        layout, source = batch.layouts[number], batch.sources[number]
        assert layout is not None
        assert source is not None
        own_start[number] = layout.shared_tokens
        tables.append(layout.run_table)
        sources.append(source)
    runs = np.concatenate(tables)  # [K, 4]: row start, row end, rotation, visible from
    source = np.concatenate(sources)  # [K]
    owner = np.repeat(np.array(readers), [len(table) for table in tables])  # [K]
    # The first query that sees a run, relative to the request's first query.
    before = np.maximum(own_start[owner] + runs[:, 3] - first_row[owner], 0)
    seeing = tokens[owner] - before  # [K] queries
    joined = (runs[:, 2] == 0) & (before == 0) & join
    apart = ~joined & (seeing > 0)

    own = _own_launch(active, tokens, own_start, lengths, owner[joined], runs[joined], not single)
    spans = _span_launches(
        owner[apart],
        runs[apart],
        source[apart],
        first_query=(query_start[owner] + before)[apart],
        queries=seeing[apart],
        stacked_rows=stacked_rows,
    )
    return Plan(own, spans, int(tokens.sum()), single)


def _own_launch(
    active: Ints,
    tokens: Ints,
    own_start: Ints,
    lengths: Ints,
    joined_owner: Ints,
    joined_runs: Ints,
    causal: bool,
) -> Launch:
    """A part for each request: the runs it reads as they lie, then its own tokens."""
    owner = np.concatenate([joined_owner, active])
    rows = np.concatenate(
        [joined_runs[:, :2], np.stack([own_start[active], lengths[active]], axis=1)]
    )
    order = np.argsort(owner, kind="stable")  # runs stand before the tokens of their request
    pieces = np.concatenate([owner[:, None], rows], axis=1)[order]
    counts = np.bincount(owner, minlength=len(tokens))[active]
    return Launch(causal, indptr(tokens[active]), indptr(counts), pieces, None, None)


def _span_launches(
    owner: Ints,
    runs: Ints,
    source: Ints,
    *,
    first_query: Ints,
    queries: Ints,
    stacked_rows: int,
) -> tuple[Launch, ...]:
    """A part for each physical run, its readers' queries stacked; K uses of runs."""
    uses = len(owner)
    if not uses:
        return ()
    # Private runs get numbers of their own, below all others.
    numbers = np.where(source == PRIVATE, np.arange(uses) - uses - 1, source)
    _, group = np.unique(numbers, return_inverse=True)  # [K]
    order = np.argsort(group, kind="stable")
    owner, runs, group = owner[order], runs[order], group[order]
    first_query, queries = first_query[order], queries[order]
    starts = np.flatnonzero(np.diff(group, prepend=-1))  # first use in each group

    rows = indptr(queries)  # [K + 1]
    query_index = ranges(first_query, queries)
    rotation = np.repeat(runs[:, 2], queries)
    ends = np.append(starts[1:], uses)
    pieces = np.stack([owner[starts], runs[starts, 0], runs[starts, 1]], axis=1)
    part_rows = rows[ends] - rows[starts]
    launches = []
    for a, b in _waves(part_rows, stacked_rows):
        uses_from, uses_to = int(starts[a]), int(ends[b - 1])
        first, last = int(rows[uses_from]), int(rows[uses_to])
        launches.append(
            Launch(
                False,
                indptr(part_rows[a:b]),
                np.arange(b - a + 1),
                pieces[a:b],
                query_index[first:last],
                rotation[first:last],
                rows[uses_from : uses_to + 1] - first,
            )
        )
    return tuple(launches)


def _waves(rows: Ints, limit: int) -> list[tuple[int, int]]:
    """Cut parts into runs of at most ``limit`` rows; a part with more stands alone."""
    if int(rows.sum()) <= limit:
        return [(0, len(rows))]
    waves, start, total = [], 0, 0
    for number, count in enumerate(rows.tolist()):
        if number > start and total + count > limit:
            waves.append((start, number))
            start, total = number, 0
        total += count
    return [*waves, (start, len(rows))]


def indptr(counts: Ints) -> Ints:
    """Offsets ``[0, c0, c0 + c1, …]``."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def ranges(starts: Ints, counts: Ints) -> Ints:
    """``[s0, s0 + 1, … s0 + c0 - 1, s1, …]``."""
    total = int(counts.sum())
    offset = np.arange(total) - np.repeat(indptr(counts)[:-1], counts)
    return np.repeat(starts, counts) + offset


def _ordinals(values: Ints) -> Ints:
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    first = np.flatnonzero(np.diff(in_order, prepend=in_order[:1] - 1))
    counts = np.diff(np.append(first, len(values)))
    found = np.empty(len(values), dtype=np.int64)
    found[order] = np.arange(len(values)) - np.repeat(first, counts)
    return found


class PlanCache:
    """The last plan, for as long as nothing that it follows from has changed.

    Engines may ask for a plan more than once in a pass. What it follows from: the requests' layouts
    and the pages of their runs, the numbers of new tokens, and the lengths of the rows. Which physical
    pages the *rows* name is looked up anew in every pass and is no part of a plan.
    """

    def __init__(self, *, stacked_rows: int = STACKED_ROWS) -> None:
        self.builds = 0  # plans built, for tests and counters
        self._stacked_rows = stacked_rows
        self._key: tuple[object, ...] | None = None
        self._plan: Plan | None = None

    def get(self, batch: BatchQueries) -> Plan:
        """A plan for the batch: the last one if the batch is the same, else a new one."""
        key = (
            batch.query_tokens.tobytes(),
            batch.seq_tokens.tobytes(),
            # Layouts are compared by identity and kept alive by the key, so no id is used twice.
            tuple(_Same(layout) for layout in batch.layouts),
            tuple(None if source is None else source.tobytes() for source in batch.sources),
        )
        if self._plan is None or key != self._key:
            self._plan, self._key = build_plan(batch, stacked_rows=self._stacked_rows), key
            self.builds += 1
        return self._plan


class _Same:
    """Equal only to itself and to what holds the same object."""

    __slots__ = ("what",)

    def __init__(self, what: object) -> None:
        self.what = what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.what is other.what

    def __hash__(self) -> int:
        return id(self.what)
