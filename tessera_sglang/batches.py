"""Readers in a batch: how their layouts get to the attention backend, and what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera_sglang.attention.kernels.base import Phase
from tessera_sglang.attention.plan import BatchQueries

from .compat import ForwardBatch, ScheduleBatch
from .reader import Reader, ReaderId, reader_of


def mark_readers(
    forward_batch: ForwardBatch, cls: Any, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> ForwardBatch:
    """Hook after ``ForwardBatch.init_new``: the layouts of the readers, and prompt positions for them.

    A row position says where KV is stored; the rotary phase of a reader's tokens is that of the
    prompt. In decode the two agree, since the row is exactly as long as the prompt.
    """
    readers = [reader_of(req) for req in batch.reqs]
    if not any(readers):
        return forward_batch
    forward_batch.rids = [
        req.rid if reader is None else ReaderId(req.rid, reader.layout, reader.sources(req))
        for req, reader in zip(batch.reqs, readers, strict=True)
    ]
    if not forward_batch.forward_mode.is_decode_or_idle():
        forward_batch.positions = _prompt_positions(forward_batch, readers)
    return forward_batch


def _prompt_positions(forward_batch: ForwardBatch, readers: list[Reader | None]) -> Tensor:
    positions: Tensor = forward_batch.positions.clone()
    start = 0
    for reader, before, tokens in zip(
        readers,
        forward_batch.extend_prefix_lens_cpu,
        forward_batch.extend_seq_lens_cpu,
        strict=True,
    ):
        if reader is not None:
            layout = reader.layout
            assert before >= layout.shared_tokens, "a reader was scheduled without its spans"
            own = torch.from_numpy(layout.prompt_positions(before, before + tokens))
            positions[start : start + tokens] = own.to(positions)
        start += tokens
    return positions


def readers_in(rids: Sequence[str] | None) -> bool:
    """Whether any request of a batch reads spans."""
    return rids is not None and any(isinstance(rid, ReaderId) for rid in rids)


def queries_of(
    rids: Sequence[str] | None, query_tokens: Sequence[int], seq_tokens: Sequence[int]
) -> BatchQueries:
    """What the plan of a batch follows from. Requests behind the last id are plain: padding."""
    known = list(rids or ())
    known += [""] * (len(seq_tokens) - len(known))
    return BatchQueries.of(
        query_tokens,
        seq_tokens,
        [rid.layout if isinstance(rid, ReaderId) else None for rid in known],
        [rid.sources if isinstance(rid, ReaderId) else None for rid in known],
    )


def phase_of(forward_mode: Any) -> Phase:
    """What a forward pass does, as the router knows it."""
    if forward_mode.is_decode_or_idle():
        return Phase.DECODE
    return Phase.VERIFY if forward_mode.is_target_verify() else Phase.PREFILL
