"""Decode with spans in fixed shapes, for CUDA graphs.

A captured graph replays the same kernels over the same addresses. So a decode step is laid out for a
fixed number of requests, span parts and query rows a part; what is not used is empty. A step then has
two halves:

* `StaticDecode.load`, outside the graph: which spans are read, from which pages, by which queries. It
  changes only when the batch does, and is skipped otherwise.
* `StaticDecode.begin` and every layer's `Pass.attend`, inside it: lengths and pages of the requests'
  own tokens follow from the engine's tables on the device.

Nothing in either half waits for the device.

With ``rows`` above 1 a span part holds the queries of as many requests that read the same pages, so
those are read once per step and not once per request. The capacities are chosen at capture; the
engine keeps one graph for each choice and takes the smallest that `StaticShape.holds` the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .execute import Executor, Pass, Stack
from .kernels.base import Kernel, Work
from .plan import BatchQueries, Ints, Launch, Plan, build_plan, indptr, ranges
from .transfer import upload


@dataclass(frozen=True, slots=True)
class StaticShape:
    """Capacities of a decode step."""

    requests: int
    spans: int  # of one request, at most
    parts: int  # physical runs, each counted once for every ``rows`` of its readers
    rows: int  # query rows of a span part

    def holds(self, plan: Plan) -> bool:
        """Whether a `static_plan` fits."""
        if plan.query_tokens > self.requests or not plan.single:
            return False
        if not plan.spans:
            return True
        if len(plan.spans) > 1:
            return False
        launch = plan.spans[0]
        deepest = launch.merge_table(plan.query_tokens).shape[1]
        return deepest <= self.spans and int(self._cut(launch).sum()) <= self.parts

    def _cut(self, launch: Launch) -> Ints:
        """How many parts of ``rows`` rows each part of a launch becomes. [parts of the launch]"""
        return np.asarray(-(-np.diff(launch.query_indptr) // self.rows))


def static_plan(batch: BatchQueries) -> Plan:
    """The parts of a decode step as fixed shapes want them: one launch of span parts, none joined."""
    return build_plan(batch, stacked_rows=sys.maxsize, join=False)


class Storage:
    """Tables of slots or pages that steps of different sizes share: only one of them runs at a time.

    Allocate the largest step first: a table that is captured can not grow.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loaded: object = None  # the step whose spans are in place
        self._tables: dict[tuple[str, torch.dtype], Tensor] = {}

    def table(self, name: str, entries: int, dtype: torch.dtype) -> Tensor:
        """The first ``entries`` of a table, zeros when it is new."""
        found = self._tables.get((name, dtype))
        if found is None or len(found) < entries:
            found = torch.zeros(entries, dtype=dtype, device=self.device)
            self._tables[name, dtype] = found
        return found[:entries]


@dataclass(frozen=True, slots=True, eq=False)
class SpanReads:
    """Which spans a decode batch reads and from where, but for lengths and row tables.

    Compared by identity. It holds what it compares, so that no other object can take its place.
    """

    layouts: tuple[object, ...]
    sources: tuple[Ints | None, ...]

    @classmethod
    def of(cls, batch: BatchQueries) -> SpanReads | None:
        """None where a run is private: nothing then says when its pages change."""
        if any(source is not None and bool((source < 0).any()) for source in batch.sources):
            return None
        return cls(batch.layouts, batch.sources)

    def same(self, other: SpanReads | None) -> bool:
        """Whether it is the same requests in the same order over the same pages."""
        return (
            other is not None
            and _identical(self.layouts, other.layouts)
            and _identical(self.sources, other.sources)
        )


def _identical(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


class StaticDecode:
    """The buffers of one captured decode step."""

    def __init__(
        self,
        executor: Executor,
        kernel: Kernel,
        shape: StaticShape,
        *,
        context_tokens: int,
        storage: Storage,
    ) -> None:
        """Allocate for rows of at most ``context_tokens`` tokens, on the device of ``storage``."""
        assert kernel.capabilities.graph_safe, kernel.capabilities.name
        assert executor.relocation is not None
        self.shape = shape
        self.loads = 0  # times that a batch was loaded and not found in place, for tests
        device = storage.device
        self._executor, self._kernel, self._device = executor, kernel, device
        self._storage = storage
        self._page = executor.shape.page_tokens
        self._by_page = kernel.capabilities.reads == "pages"
        unit = self._page if self._by_page else 1
        self._entries = -(-context_tokens // unit)  # capacity of a part, in pages or slots
        self._own_start = torch.zeros(shape.requests, dtype=torch.int64, device=device)
        self._own = self._work("own", shape.requests, 1)
        self._spans = self._work("spans", shape.parts, shape.rows)
        stacked = shape.parts * shape.rows
        self._query_index = torch.zeros(stacked, dtype=torch.int64, device=device)
        half = executor.relocation.rotation.rotary_dim // 2
        self._cos = torch.ones((stacked, half), dtype=torch.float32, device=device)
        self._sin = torch.zeros((stacked, half), dtype=torch.float32, device=device)
        self._table = torch.full(
            (shape.requests, shape.spans), stacked, dtype=torch.int64, device=device
        )
        self._loaded: SpanReads | None = None  # None: unknown, to be loaded anew

    # --- outside the graph -----------------------------------------------------------------------

    def load(self, batch: BatchQueries, row_slots: Tensor, request_rows: Tensor) -> None:
        """Put a batch of one new token a request in place.

        Args:
            batch: as many requests as there is room for; fill up with plain ones.
            row_slots: ``[rows, positions]`` integer: the slot of every row position.
            request_rows: ``[requests]`` integer: which of those rows is the request's.
        """
        reads = SpanReads.of(batch)
        if reads is not None and reads.same(self._loaded) and self._storage.loaded is self:
            return
        self._loaded, self._storage.loaded = reads, self
        self.loads += 1
        plan = static_plan(batch)
        assert self.shape.holds(plan), "the batch does not fit the graph that was chosen for it"
        own_start = np.array(
            [0 if layout is None else layout.shared_tokens for layout in batch.layouts],
            dtype=np.int64,
        )
        if plan.spans:
            self._load_spans(plan, plan.spans[0], own_start, row_slots, request_rows)
            return
        (own_start_on_device,) = upload([own_start], self._device)
        self._own_start.copy_(own_start_on_device)
        self._spans.key_indptr.zero_()
        self._table.fill_(self.shape.parts * self.shape.rows)

    def _load_spans(
        self, plan: Plan, launch: Launch, own_start: Ints, row_slots: Tensor, request_rows: Tensor
    ) -> None:
        assert launch.query_index is not None
        assert launch.rotation is not None
        shape, stacked = self.shape, self.shape.parts * self.shape.rows
        cut = shape._cut(launch)  # parts of fixed rows that each part becomes
        source_part = np.repeat(np.arange(launch.parts), cut)
        # Where the rows of the launch stand among the rows of fixed parts.
        at = ranges(indptr(cut)[:-1] * shape.rows, np.diff(launch.query_indptr))
        query_index = np.zeros(stacked, dtype=np.int64)
        query_index[at] = launch.query_index
        rotation = np.zeros(stacked, dtype=np.int64)
        rotation[at] = launch.rotation
        table = np.full((shape.requests, shape.spans), stacked, dtype=np.int64)
        found = launch.merge_table(shape.requests)
        table[:, : found.shape[1]] = np.append(at, stacked)[found]

        request, start, end = launch.pieces[source_part].T
        keys = np.zeros(shape.parts, dtype=np.int64)
        keys[: len(source_part)] = end - start
        unit = self._page if self._by_page else 1
        counts = -(-(end - start) // unit)
        total = int(counts.sum())
        into = ranges(np.arange(len(source_part)) * self._entries, counts)
        positions = ranges(np.zeros_like(counts), counts) * unit + np.repeat(start, counts)
        arrays = [own_start, query_index, rotation, table.reshape(-1), indptr(keys)]
        arrays += [into, positions, np.repeat(request, counts)]
        uploaded = upload(arrays, self._device)
        self._own_start.copy_(uploaded[0])
        self._query_index.copy_(uploaded[1])
        relocation = self._executor.relocation
        assert relocation is not None
        cos, sin = relocation.rotation.cos_sin(uploaded[2])
        self._cos.copy_(cos)
        self._sin.copy_(sin)
        self._table.copy_(uploaded[3].view_as(self._table))
        self._spans.key_indptr.copy_(uploaded[4])
        assert len(uploaded[5]) == total
        slots = row_slots[request_rows[uploaded[7]], uploaded[6]]
        self._fill(self._spans, slots, uploaded[5])

    def _fill(self, work: Work, slots: Tensor, into: Tensor) -> None:
        if work.pages is not None:
            work.pages[into] = (slots // self._page).to(torch.int32)
        else:
            assert work.slots is not None
            work.slots[into] = slots.long()

    # --- inside the graph ------------------------------------------------------------------------

    def begin(self, row_slots: Tensor, request_rows: Tensor, seq_tokens: Tensor) -> Pass:
        """The pass of a step; to be captured together with every layer's `attend`.

        Args:
            row_slots: as for `load`; request_rows: ``[requests]`` integer, on the device.
            seq_tokens: ``[requests]`` integer, on the device: row lengths, the new token included.
        """
        own = self._own
        held = (seq_tokens - self._own_start).clamp(min=0)
        own.key_indptr[1:].copy_(torch.cumsum(held, 0))
        unit = self._page if self._by_page else 1
        steps = torch.arange(self._entries, device=self._device) * unit
        positions = (self._own_start[:, None] + steps).clamp(max=row_slots.shape[1] - 1)
        slots = row_slots[request_rows.long()[:, None], positions].flatten()
        if own.pages is not None:
            own.pages.copy_(slots // self._page)
        else:
            assert own.slots is not None
            own.slots.copy_(slots)
        stack = Stack(self._spans, self._query_index, self._cos, self._sin, self._table, ())
        executor = self._executor
        return Pass(executor.shape, self._kernel, executor.relocation, own, (stack,))

    def _work(self, name: str, parts: int, rows: int) -> Work:
        def offsets(step: int) -> Tensor:
            return torch.arange(parts + 1, dtype=torch.int32, device=self._device) * step

        dtype = torch.int32 if self._by_page else torch.int64
        entries = self._storage.table(name, parts * self._entries, dtype)
        unit = self._page if self._by_page else 1
        return Work(
            causal=False,
            page_tokens=self._page,
            query_indptr=offsets(rows),
            key_indptr=torch.zeros(parts + 1, dtype=torch.int32, device=self._device),
            slots=None if self._by_page else entries,
            page_indptr=offsets(self._entries) if self._by_page else None,
            pages=entries if self._by_page else None,
            host_query_indptr=np.arange(parts + 1, dtype=np.int64) * rows,
            host_key_indptr=np.arange(parts + 1, dtype=np.int64) * self._entries * unit,
            static=True,
        )
