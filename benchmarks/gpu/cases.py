"""What is compared and timed: batches by name, at the sizes of a GPU and of a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.attention.world import PAGE, Request, Use, llama, mla
from tessera_sglang.attention.kernels.base import AttentionShape, Phase, RowFormat


@dataclass(frozen=True, slots=True)
class Model:
    """Layers of a kind."""

    name: str
    shape: AttentionShape


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are compared with the oracle."""

    name: str
    phase: Phase
    requests: tuple[Request, ...]


def models(device: str) -> tuple[Model, ...]:
    """Layers that answers are compared for."""
    bf16, packed = torch.bfloat16, RowFormat.FP8_PACKED
    found = (
        Model("MLA 16 heads, bf16", mla(16, bf16)),
        Model("MLA 16 heads, fp8 rows", mla(16, bf16, packed)),
        Model("GQA 32/8 heads, bf16", llama(bf16)),
    )
    if device == "cuda":
        return (*found, Model("MLA 128 heads, bf16", mla(128, bf16)))
    return (Model("MLA 16 heads, float32", mla(16, torch.float32)), *found)


def batches(device: str) -> tuple[Batch, ...]:
    """Plain requests and readers, in every phase."""
    pages = 16 if device == "cuda" else 1  # of the smallest document
    a, b = 3 * pages * PAGE, pages * PAGE
    return (
        Batch("plain decode", Phase.DECODE, (Request(b + 300), Request(64), Request(a + 1))),
        Batch("plain append", Phase.VERIFY, (Request(b + 300, 4), Request(64, 2), Request(a, 3))),
        Batch("plain prefill", Phase.PREFILL, (Request(300, 300), Request(a + 70, 70))),
        Batch("decode with spans", Phase.DECODE, readers(a, b, new=1)),
        Batch("append with spans", Phase.VERIFY, readers(a, b, new=3)),
        Batch("prefill with spans", Phase.PREFILL, readers(a, b, new=100)),
    )


def readers(a: int, b: int, *, new: int) -> tuple[Request, ...]:
    """A plain request; two readers of document A at different offsets, one of which reads B too;
    and one with a copy of A. With 100 new tokens some stand before the spans and do not see them.
    """
    return (
        Request(300, new),
        Request(100, new, (Use(a, 0),)),
        Request(151, new, (Use(b, 1), Use(a, 0))),
        Request(130, new, (Use(a, 0, copy=1),)),
    )


def shared(count: int, tokens: int, own: int = 70) -> tuple[Request, ...]:
    """Requests that decode over one document, at different offsets: every other one reads another
    short document first."""
    return tuple(
        Request(own + number, 1, (Use(PAGE, 1), Use(tokens, 0))[1 - number % 2 :])
        for number in range(count)
    )


# --- timed, on a GPU -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timed:
    """Requests that are timed against a flat context of the same length."""

    name: str
    model: Model
    requests: tuple[Request, ...]
    phase: Phase = Phase.DECODE
    shared: bool = False  # one document for all, told so

    @property
    def flat(self) -> tuple[Request, ...]:
        """As many keys, no spans."""
        return tuple(Request(request.keys, request.new) for request in self.requests)


def with_spans(requests: int, keys: int, spans: int, *, own: int = 512) -> tuple[Request, ...]:
    """Decode over as many keys, of which all but ``own`` lie in private spans."""
    each = (keys - own) // spans
    assert each % PAGE == 0, (keys, own, spans)
    return tuple(
        Request(own, 1, tuple(Use(each, text, copy=reader) for text in range(spans)))
        for reader in range(requests)
    )


def timed() -> tuple[Timed, ...]:
    """What the table has a row for, with each kernel that can run it."""
    mla16 = Model("MLA 16 heads, bf16", mla(16, torch.bfloat16))
    mla128 = Model("MLA 128 heads, bf16", mla(128, torch.bfloat16))
    fp8 = Model("MLA 128 heads, fp8 rows", mla(128, torch.bfloat16, RowFormat.FP8_PACKED))
    gqa = Model("GQA 32/8 heads, bf16", llama(torch.bfloat16))
    one = tuple(Request(512, 1, (Use(32_256, 0),)) for _ in range(16))
    prefill = (Request(2048, 1024, tuple(Use(1024, text) for text in range(4))),)
    found = []
    for model in (mla16, mla128):
        found += [
            Timed("decode 16 x 32k, 4 spans", model, with_spans(16, 32_768, 4)),
            Timed("decode 16 x 32k, shared", model, one, shared=True),
            Timed("decode 64 x 8k, 4 spans", model, with_spans(64, 8192, 4)),
        ]
    return (
        *found,
        Timed("decode 16 x 32k, 4 spans", fp8, with_spans(16, 32_768, 4)),
        Timed("decode 16 x 32k, shared", fp8, one, shared=True),
        Timed("decode 16 x 8k, 4 spans", gqa, with_spans(16, 8192, 4)),
        Timed("prefill 1k behind 4 x 1k", mla16, prefill, Phase.PREFILL),
        Timed("prefill 1k behind 4 x 1k", gqa, prefill, Phase.PREFILL),
    )
