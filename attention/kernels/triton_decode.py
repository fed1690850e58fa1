"""SGLang's Triton decode kernel, for parts without a causal mask. Any GPU that Triton compiles for.

The kernel attends one query to each entry of a batch. A part with R stacked rows becomes one entry by
stacking the rows as *heads*: R·H heads that share the latent, or, with separate keys and values, R·G
heads for each KV head. Its keys are then read once for all rows.

The function is passed in, since this room knows no engine: `decode_attention_fwd` of
``sglang.kernels.ops.attention.decode_attention``. What is relied on, from that file (SGLang 0.5.23):

* Stage 1 writes one output and one natural-log lse for every split of the keys that is not empty, and
  leaves the others as they were; so lse starts at -inf, and the whole lse is the logsumexp over splits.
* Its lse buffer is indexed as ``offset of the output // Dv``: both are contiguous.
* ``has_mla`` (values are read from the loaded keys) needs the widths whose latent is one power of two
  and the rest another: 576/512 and 288/256. Other MLA rows pass their values as any K/V model does.
* The grouped kernel walks heads in tiles of 16 that must not straddle two KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import AttentionShape, Capabilities, Phase, Work, no_rows
from .stacking import Batch, Stacking, stack

KEY_SPLITS = 8  # SGLang's --triton-attention-num-kv-splits
_SPLIT_TOKENS = 256  # fewer keys a split than this are not worth another one
_PARTIAL_BYTES = 1 << 28  # of the outputs of all splits of a call
_HEAD_TILE = 16
_SPLIT_WIDTHS = {(576, 512), (288, 256)}


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """One call in every layer."""

    batch: Batch
    group: int  # query heads of a KV head in a row, padding included
    indptr: Tensor  # [b + 1] int32
    slots: Tensor  # [keys] int64
    splits: Tensor  # [b] int32
    partial: Tensor  # [b, heads, most splits, Dv] float32, scratch
    partial_lse: Tensor  # [b, heads, most splits] float32, scratch


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch of parts, for the layers of one forward pass."""

    work: Work
    shape: AttentionShape
    scale: float
    stacking: Stacking
    launches: tuple[_Launch, ...]


class TritonKernel:
    """See `Kernel`. ``run`` returns float32 outputs."""

    def __init__(self, launch: Callable[..., None], *, interpreted: bool = False) -> None:
        """Wrap ``decode_attention_fwd``.

        Args:
            launch: SGLang's function.
            interpreted: Triton was imported with ``TRITON_INTERPRET=1`` and runs on a CPU too.
        """
        self._launch_decode = launch
        self.capabilities = Capabilities(
            name="triton",
            devices=frozenset({"cuda", "cpu"} if interpreted else {"cuda"}),
            # Compiled, products of float32 are rounded to TF32; interpreted (Triton 3.8), the bits of
            # bfloat16 are multiplied as integers.
            dtypes=frozenset({torch.float16, torch.float32 if interpreted else torch.bfloat16}),
            phases=frozenset({Phase.DECODE}),
            page_tokens=None,
            widths=None,
            latent=True,
            grouped=True,
            causal=False,
            logit_cap=True,
            lse_base="e",
            graph_safe=True,
            reads="slots",
        )

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> Prepared:
        """See `Kernel.prepare`. Holds scratch memory for the splits while it lives."""
        assert not work.causal
        stacking = stack(work, powers_of_two=True)
        launches = tuple(_prepare(work, shape, batch) for batch in stacking.batches)
        return Prepared(work, shape, scale, stacking, launches)

    def run(
        self,
        prepared: Prepared,
        q: Tensor,
        key_buffer: Tensor,
        value_buffer: Tensor,
        *,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.run`."""
        work, shape = prepared.work, prepared.shape
        assert q.shape == (work.rows, shape.query_heads, shape.key_width), q.shape
        if work.rows == 0:
            return no_rows(q, shape)
        outs, lses = [], []
        for launch in prepared.launches:
            batch, rows = launch.batch, launch.batch.rows
            heads = rows_as_heads(batch.stack(q), shape.kv_heads, launch.group)
            launch.partial_lse.fill_(-math.inf)
            out = q.new_empty((*heads.shape[:2], shape.value_width), dtype=torch.float32)
            self._launch_decode(
                heads,
                key_buffer,
                value_buffer,
                out,
                launch.indptr,
                launch.slots,
                launch.partial,
                launch.partial_lse,
                launch.splits,
                launch.partial.shape[2],
                prepared.scale,
                1.0,  # scales of quantised keys and values
                1.0,
                logit_cap=logit_cap,
                has_mla=shape.latent and (shape.key_width, shape.value_width) in _SPLIT_WIDTHS,
            )
            lse = launch.partial_lse.logsumexp(-1)  # [b, heads]
            group = shape.query_heads // shape.kv_heads
            outs.append(heads_as_rows(out, rows, shape.kv_heads, group))
            lses.append(heads_as_rows(lse, rows, shape.kv_heads, group))
        return prepared.stacking.restore(outs), prepared.stacking.restore(lses)


def _prepare(work: Work, shape: AttentionShape, batch: Batch) -> _Launch:
    group = padded_group(batch.rows, shape.query_heads // shape.kv_heads, shape.kv_heads)
    heads = shape.kv_heads * batch.rows * group
    indptr, slots = batch.key_slots(work)
    device = indptr.device
    fits = _PARTIAL_BYTES // (batch.size * heads * shape.value_width * 4)
    # A power of two: the kernel is compiled for each number.
    most = min(KEY_SPLITS, 1 << max(fits.bit_length() - 1, 0))
    splits = (batch.key_tokens(work) // _SPLIT_TOKENS).clamp(1, most).to(torch.int32)
    room = (batch.size, heads, most)
    partial = torch.empty((*room, shape.value_width), dtype=torch.float32, device=device)
    partial_lse = torch.empty(room, dtype=torch.float32, device=device)
    return _Launch(batch, group, indptr, slots, splits, partial, partial_lse)


def padded_group(rows: int, group: int, kv_heads: int) -> int:
    """Query heads of a KV head, padded so that the heads of ``rows`` rows are whole tiles of 16.

    As they are with one KV head, or if the rows fit into one tile: nothing can straddle then.
    """
    while kv_heads > 1 and rows * group > _HEAD_TILE and rows * group % _HEAD_TILE:
        group += 1
    return group


def rows_as_heads(q: Tensor, kv_heads: int, group: int) -> Tensor:
    """``[b, rows, H, D]`` as ``[b, Hkv * rows * group, D]``, contiguous; padding heads are zero."""
    batch, rows, heads, width = q.shape
    own = heads // kv_heads
    apart = q.reshape(batch, rows, kv_heads, own, width).transpose(1, 2)  # [b, Hkv, rows, G, D]
    if own < group:
        apart = torch.nn.functional.pad(apart, (0, 0, 0, group - own))
    return apart.reshape(batch, kv_heads * rows * group, width).contiguous()


def heads_as_rows(result: Tensor, rows: int, kv_heads: int, group: int) -> Tensor:
    """The way back for ``[b, Hkv * rows * padded, …]``: ``[b, rows, Hkv * group, …]``."""
    rest = result.shape[2:]
    apart = result.view(result.shape[0], kv_heads, rows, -1, *rest)[:, :, :, :group]
    return apart.transpose(1, 2).reshape(result.shape[0], rows, kv_heads * group, *rest)
