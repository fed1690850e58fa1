"""CUDA graphs for decode batches with spans.

SGLang's decode runner can capture several *attention variants* of each batch size and choose one per
step. Beside the plain variant, which the stock backend captures, there is one for every bucket of
spans a request may read. A batch beyond the largest bucket, or beyond `MOST_PARTS`, runs without a
graph, as SGLang's log of decode batches says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera_sglang.attention.execute import Executor, Pass
from tessera_sglang.attention.kernels.base import Kernel
from tessera_sglang.attention.plan import BatchQueries
from tessera_sglang.attention.static_decode import (
    SpanReads,
    StaticDecode,
    StaticShape,
    Storage,
    static_plan,
)

from .batches import queries_of, readers_in
from .compat import ForwardBatch, capture_attention_variant

PLAIN = "plain"
SPAN_BUCKETS = (4, 16)  # shared runs of one request
STACKED_ROWS = 8  # queries of a span part in the shared variants
MOST_PARTS = 4096  # of a captured step: every one has room for a whole context of pages


class SpanStep:
    """One captured decode step with spans."""

    def __init__(self, decode: StaticDecode) -> None:
        self.decode = decode
        self.rids: Sequence[str] = ()  # of the batch that is about to run

    def load(self, batch: Any, row_slots: Tensor) -> None:
        """Before a capture or a replay. ``batch`` is padded to the graph's size."""
        tokens = [1] * batch.batch_size
        queries = queries_of(self.rids, tokens, batch.seq_lens_cpu.tolist())
        self.decode.load(queries, row_slots, batch.req_pool_indices)

    def begin(self, batch: ForwardBatch, row_slots: Tensor) -> Pass:
        """Captured."""
        return self.decode.begin(row_slots, batch.req_pool_indices, batch.seq_lens)


class SpanGraphs:
    """The variants of a server; SGLang's ``AttentionGraphVariants``."""

    def __init__(self, *, context_tokens: int, device: torch.device | str) -> None:
        """For rows of at most ``context_tokens``."""
        self.current: SpanStep | None = None  # of the batch in hand, None for a plain one
        self._context_tokens, self._device = context_tokens, torch.device(device)
        self._variants = {
            f"spans{spans}{suffix}": (spans, rows)
            for spans in SPAN_BUCKETS
            for suffix, rows in (("", 1), ("_shared", STACKED_ROWS))
        }
        self._steps: dict[tuple[int, str], SpanStep] = {}
        self._rids: Sequence[str] = ()
        self._label = PLAIN
        self._fitted: tuple[Any, str | None] = (None, None)  # the last batch asked about
        self._known: tuple[SpanReads, str | None] | None = None  # what it read, and the variant
        self._storage = Storage(self._device)

    @property
    def capture_labels(self) -> tuple[str, ...]:
        """What SGLang captures of each batch size, most parts first: graphs and tables share memory.

        SGLang takes batch sizes largest first as well, so that nothing captured has to grow.
        """

        def parts(label: str) -> int:
            return self._shape(64, *self._variants[label]).parts  # 64 requests: the bound cuts none

        return (*sorted(self._variants, key=parts, reverse=True), PLAIN)

    def bind(self, executor: Executor, kernel: Kernel) -> None:
        """What the steps run; before anything is captured."""
        self._executor, self._kernel = executor, kernel

    # --- choice ----------------------------------------------------------------------------------

    def select(self, forward_batch: ForwardBatch) -> str:
        """The variant for a batch that `can_run` let through; SGLang asks right before it loads it."""
        self._rids = list(forward_batch.rids or ())
        self._label = self._fitting(forward_batch) or PLAIN
        return self._label

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        """Whether there is a variant for the batch."""
        return self._fitting(forward_batch) is not None

    def _fitting(self, forward_batch: ForwardBatch) -> str | None:
        if self._fitted[0] is not forward_batch:
            self._fitted = forward_batch, self._fit(forward_batch)
        return self._fitted[1]

    def _fit(self, forward_batch: ForwardBatch) -> str | None:
        if not readers_in(forward_batch.rids):
            return PLAIN
        lengths: list[int] = forward_batch.seq_lens_cpu.tolist()
        queries = queries_of(forward_batch.rids, [1] * len(lengths), lengths)
        reads = SpanReads.of(queries)
        if reads is not None and self._known is not None and reads.same(self._known[0]):
            return self._known[1]
        found = self._smallest(queries)
        self._known = None if reads is None else (reads, found)
        return found

    def _smallest(self, queries: BatchQueries) -> str | None:
        plan = static_plan(queries)
        requests = len(queries.layouts)
        fitting = {
            label: rows > 1
            for label, (spans, rows) in self._variants.items()
            if self._shape(requests, spans, rows).holds(plan)
        }
        readers_share = any(launch.rows > launch.parts for launch in plan.spans)
        return min(fitting, key=lambda label: fitting[label] != readers_share, default=None)

    @staticmethod
    def _shape(requests: int, spans: int, rows: int) -> StaticShape:
        """Sharing halves the parts at least, or it is not worth the padding."""
        parts = requests * spans if rows == 1 else max(requests * spans // 2, spans)
        return StaticShape(requests, spans, min(parts, MOST_PARTS), rows)

    # --- steps -----------------------------------------------------------------------------------

    def step(self, batch: Any, in_capture: bool) -> SpanStep | None:
        """The step that is captured or replayed; None for the plain variant."""
        label = capture_attention_variant() if in_capture else self._label
        self.current = None
        if label is None or label == PLAIN or not batch.forward_mode.is_decode_or_idle():
            return None
        key = batch.batch_size, label
        found = self._steps.get(key)
        if found is None:
            assert in_capture, f"no graph of {batch.batch_size} requests was captured for {label}"
            spans, rows = self._variants[label]
            found = self._steps[key] = SpanStep(
                StaticDecode(
                    self._executor,
                    self._kernel,
                    self._shape(batch.batch_size, spans, rows),
                    context_tokens=self._context_tokens,
                    storage=self._storage,
                )
            )
        found.rids = () if in_capture else self._rids
        self.current = found
        return found


_serving: list[SpanGraphs] = []  # of this process's server: SGLang asks with no runner at hand


def serve(graphs: SpanGraphs) -> None:
    """What `graph_variants` answers from now on."""
    _serving[:] = [graphs]


def graph_variants(original: Any, hf_config: Any) -> Any:
    """Around ``create_attention_graph_variants``: a model with variants of its own keeps those."""
    found = original(hf_config)
    return found if found is not None or not _serving else _serving[0]


def graphs_of(model_runner: Any) -> SpanGraphs | None:
    """The variants of a runner whose backend is ours."""
    graphs: SpanGraphs | None = getattr(model_runner.attn_backend, "graphs", None)
    return graphs


def can_run_graph(original: Any, runner: Any, forward_batch: ForwardBatch) -> Any:
    """Around ``DecodeCudaGraphRunner.can_run_graph``: too many spans for any variant run eagerly."""
    graphs = graphs_of(runner.model_runner)
    captured = (
        not readers_in(forward_batch.rids) if graphs is None else graphs.can_run(forward_batch)
    )
    return captured and original(runner, forward_batch)


def can_run_prefill_graph(original: Any, runner: Any, forward_batch: ForwardBatch) -> Any:
    """Around ``PrefillCudaGraphRunner.can_run_graph``: a captured prefill is the stock backend's."""
    return not readers_in(forward_batch.rids) and original(runner, forward_batch)
