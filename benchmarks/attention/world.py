"""A layer's pool with a batch of requests in it: what a server has when attention is called.

Contents follow from names: a text has the same keys wherever a copy of it lies, and a request its own
tokens whether or not it reads spans. So two worlds that differ only in who shares what must give the
same answers. Pages are shuffled, and every slot that holds no token is poisoned with NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera_sglang.attention.execute import Executor, Pass, Relocation, stacked_rows
from tessera_sglang.attention.kernels.base import AttentionShape, Kernel, RowFormat
from tessera_sglang.attention.layout import ContextLayout, Span, lay_out
from tessera_sglang.attention.packed_rows import MLA_ROW, pack
from tessera_sglang.attention.plan import BatchQueries, Plan, build_plan
from tessera_sglang.attention.rope import (
    Pairing,
    RelativeRotation,
    mla_softmax_scale,
    yarn_inv_freq,
)

PAGE = 64  # tokens: what FlashMLA reads
ROOT_TOKENS = PAGE
LEAD, GAP = 37, 5  # remaining tokens before the first span, and between two: no span lies as stored
CHUNK = 1 << 14  # rows that are made at a time


@dataclass(frozen=True, slots=True)
class Use:
    """A request's use of a span of whole pages. Equal copies of equal texts are the same pages."""

    tokens: int
    text: int
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What a request's row holds, in tokens."""

    own: int  # remaining tokens, the new ones included
    new: int = 1
    spans: tuple[Use, ...] = ()

    @property
    def keys(self) -> int:
        """Length of the row."""
        return self.own + sum(use.tokens for use in self.spans)

    def layout(self) -> ContextLayout | None:
        """Where its spans stand: behind a preamble, a few tokens between them, before what is new."""
        if not self.spans:
            return None
        spans, at = [], LEAD
        for use in self.spans:
            spans.append(Span(at, at + use.tokens))
            at += use.tokens + GAP
        layout = lay_out(
            spans, prompt_tokens=self.keys, page_size=PAGE, root_tokens=ROOT_TOKENS, linked_pages=0
        )
        assert layout is not None
        assert layout.shared_tokens == self.keys - self.own, "spans are whole pages"
        assert all(run.rotation != 0 for run in layout.runs)
        return layout


def mla(heads: int, dtype: torch.dtype, rows: RowFormat = RowFormat.PLAIN) -> AttentionShape:
    """DeepSeek's latents: 512 channels and 64 rotated ones."""
    return AttentionShape(
        heads, 1, MLA_ROW.latent + MLA_ROW.rope, MLA_ROW.latent, True, PAGE, dtype, rows
    )


def llama(dtype: torch.dtype) -> AttentionShape:
    """Llama 3 8B: 32 query heads on 8 KV heads of 128 channels."""
    return AttentionShape(32, 8, 128, 128, False, PAGE, dtype)


def relocation(shape: AttentionShape) -> Relocation:
    """DeepSeek's YaRN on the last channels of a latent row; plain RoPE on all of a head's."""
    if shape.latent:
        freq = yarn_inv_freq(10_000.0, MLA_ROW.rope, 40.0, 4096)
        start = shape.value_width
        return Relocation(RelativeRotation.from_inv_freq(freq, Pairing.INTERLEAVED), start)
    freq = yarn_inv_freq(500_000.0, shape.key_width, 1.0, 8192)
    return Relocation(RelativeRotation.from_inv_freq(freq, Pairing.HALF_SPLIT), 0)


@dataclass(frozen=True, eq=False)
class World:
    """One layer of a server."""

    shape: AttentionShape
    requests: tuple[Request, ...]
    batch: BatchQueries
    keys: Tensor  # [slots, Hkv, D], or packed rows [slots, 1, 656] uint8
    values: Tensor  # [slots, Hkv, Dv]; for MLA a view of the keys
    rows: Tensor  # [requests, positions] int32: the slot of every row position
    request_rows: Tensor  # [requests] int64
    q: Tensor  # [T, H, D]
    executor: Executor

    @property
    def scale(self) -> float:
        """Of the scores."""
        return mla_softmax_scale(192) if self.shape.latent else self.shape.key_width**-0.5

    @property
    def private(self) -> BatchQueries:
        """The same batch, told that nobody shares anything."""
        batch = self.batch
        return BatchQueries.of(
            batch.query_tokens.tolist(), batch.seq_tokens.tolist(), batch.layouts
        )

    def plan(self, batch: BatchQueries | None = None) -> Plan:
        """The parts of the batch, as the server would build them."""
        return build_plan(
            batch or self.batch, stacked_rows=stacked_rows(self.shape, self.keys.device)
        )

    def begin(self, kernel: Kernel, batch: BatchQueries | None = None) -> Pass:
        """A forward pass: what its layers share."""
        return self.executor.begin(self.plan(batch), kernel, self.rows, self.request_rows)

    def attend(self, begun: Pass) -> Tensor:
        """One layer of it."""
        return begun.attend(self.q, self.keys, self.values, scale=self.scale)

    def forward(self, kernel: Kernel, batch: BatchQueries | None = None) -> Tensor:
        """A forward pass of one layer, planning included."""
        return self.attend(self.begin(kernel, batch))


def build(
    shape: AttentionShape,
    requests: Sequence[Request],
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> World:
    """A pool that holds just these requests."""
    device = torch.device(device)
    layouts = [request.layout() for request in requests]
    stored = sorted({use for request in requests for use in request.spans}, key=_place)
    lengths = [use.tokens for use in stored] + [request.own for request in requests]
    slots = _pages(lengths, seed)
    total = (sum(-(-length // PAGE) for length in lengths) + 2) * PAGE
    pool = _Pool(shape, total, device)
    names = [(1, use.text) for use in stored] + [(2, n) for n in range(len(requests))]
    for (kind, name), where in zip(names, slots, strict=True):
        pool.fill(where.to(device), seed * 7919 + 2 * name + kind)
    rows = torch.zeros(len(requests), max(r.keys for r in requests), dtype=torch.int32)
    number = {use: n for n, use in enumerate(stored)}
    sources: list[np.ndarray | None] = []
    for row, request in enumerate(requests):
        parts = [slots[number[use]] for use in request.spans] + [slots[len(stored) + row]]
        rows[row, : request.keys] = torch.cat(parts)
        held = np.array([number[use] for use in request.spans], dtype=np.int64)
        sources.append(held if request.spans else None)
    batch = BatchQueries.of([r.new for r in requests], [r.keys for r in requests], layouts, sources)
    q = _random((sum(r.new for r in requests), shape.query_heads, shape.key_width), seed, device)
    return World(
        shape,
        tuple(requests),
        batch,
        pool.keys,
        pool.values,
        rows.to(device),
        torch.arange(len(requests), device=device),
        q.to(shape.dtype),
        Executor(shape, relocation(shape).to(device)),
    )


def _place(use: Use) -> tuple[int, int, int]:
    return use.text, use.copy, use.tokens


def _pages(lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Slots of as many runs of keys, each in pages of its own, page 0 and another one unused."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)) + 1
    starts = itertools.accumulate([0, *counts])
    within = torch.arange(PAGE)
    return [
        (order[at : at + count, None] * PAGE + within).flatten()[:length]
        for at, count, length in zip(starts, counts, lengths, strict=False)
    ]


class _Pool:
    """Buffers of one layer, NaN where nothing is stored."""

    def __init__(self, shape: AttentionShape, slots: int, device: torch.device) -> None:
        self.shape = shape
        self.packed = shape.rows is RowFormat.FP8_PACKED
        if self.packed:  # 0xFF bytes are NaN in E4M3, FP32 and BF16 alike
            width = (slots, 1, MLA_ROW.row_bytes)
            self.keys = torch.full(width, 0xFF, dtype=torch.uint8, device=device)
            self.values = self.keys
            return
        heads = shape.kv_heads
        self.keys = torch.full(
            (slots, heads, shape.key_width), math.nan, dtype=shape.dtype, device=device
        )
        self.values = self.keys[..., : shape.value_width]
        if not shape.latent:
            self.values = torch.full(
                (slots, heads, shape.value_width), math.nan, dtype=shape.dtype, device=device
            )

    def fill(self, slots: Tensor, seed: int) -> None:
        """Store the keys and values that a seed names, the same on every run of a device."""
        shape = self.shape
        for at in range(0, len(slots), CHUNK):
            some = slots[at : at + CHUNK]
            size = (len(some), shape.kv_heads)
            keys = _random((*size, shape.key_width), seed + at, self.keys.device)
            if self.packed:
                row = keys[:, 0]
                packed = pack(row[:, : MLA_ROW.latent], row[:, MLA_ROW.latent :])
                self.keys[some, 0] = packed
                continue
            self.keys[some] = keys.to(shape.dtype)
            if not shape.latent:
                values = _random((*size, shape.value_width), ~(seed + at), self.keys.device)
                self.values[some] = values.to(shape.dtype)


def _random(size: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed & (1 << 62) - 1)
    return torch.randn(size, generator=generator, device=device)
