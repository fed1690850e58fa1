"""Attention in plain PyTorch: any device, float32 accumulation, no T × S matrix.

Keys are walked in blocks; each block is gathered from the pool once, converted to float32 once,
and meets all query rows that see it. Query rows keep a running maximum, sum and output (online
softmax, Milakov & Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). Three things
follow from walking keys in order:

* The query rows that see a block wholly form one run at the end of the query, those on the
  causal diagonal one run before it, and the rows before that skip the block.
* On the diagonal, rows ``[a, b)`` and the keys that those rows see first form a square, and only
  the square needs a mask: the upper triangle, the same one each time.
* Every row's first block is block 0, so accumulators need no initial value.

Grouped heads are never repeated: the G query heads of a KV head are stacked as rows,
``[Hkv, T·G, D]``, and meet its keys in one batched matmul. For MLA that is all heads at once.

Where PyTorch has flash attention that returns the lse, on a CPU for keys as wide as values, that is
used (`torch_flash`). ``F.scaled_dot_product_attention`` itself returns no lse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import torch_flash, torch_parts
from .base import AttentionShape, Capabilities, Phase, RowFormat, Work


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes. A block of scores is [rows, keys] float32 with rows = query rows × H."""

    keys: int  # of a block, when there are enough rows to make use of it
    scores: int  # elements of a block of scores: what should stay in the cache
    gathered: int  # elements of a gathered block of keys: bounds memory when there are few rows
    diagonal: int  # query rows per square


# CPU: measured on two EPYC cores with 1 MiB of L2 each. Elsewhere: few and large launches.
_CPU_BLOCKS = Blocks(keys=512, scores=1 << 18, gathered=1 << 19, diagonal=128)
_GPU_BLOCKS = Blocks(keys=2048, scores=1 << 26, gathered=1 << 26, diagonal=256)


class TorchKernel:
    """The kernel that always works; see `Kernel` for the contract."""

    capabilities = Capabilities(
        name="torch",
        devices=frozenset({"cpu", "cuda", "xpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        phases=frozenset(Phase),
        page_tokens=None,
        widths=None,
        latent=True,
        grouped=True,
        causal=True,
        logit_cap=True,
        lse_base="e",
        graph_safe=True,  # static work: masked to its capacity, see `torch_parts`
        reads="slots",
        rows=frozenset(RowFormat),
    )

    def __init__(self, blocks: Blocks | None = None) -> None:
        self._blocks = blocks

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> torch_parts.Prepared:
        """See `Kernel.prepare`. Nothing to schedule."""
        return torch_parts.Prepared(work, shape, scale)

    @torch.no_grad()
    def run(
        self,
        prepared: torch_parts.Prepared,
        q: Tensor,
        key_buffer: Tensor,
        value_buffer: Tensor,
        *,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.run`. Part by part; static work all at once."""
        if prepared.work.static:
            return torch_parts.run_static(prepared, q, key_buffer, value_buffer, logit_cap)
        return torch_parts.run(self.attend, prepared, q, key_buffer, value_buffer, logit_cap)

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        key_buffer: Tensor,
        value_buffer: Tensor,
        slots: Tensor,
        *,
        scale: float,
        causal_from: int | None,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the keys in ``slots``, in that order: one part. O(T·S) time, memory for a block.

        Args:
            q: ``[T, H, D]`` float, any strides; query head h reads KV head ``h // (H/Hkv)``.
            key_buffer: ``[num_slots, Hkv, D]``; value_buffer: ``[num_slots, Hkv, Dv]``, for MLA the
                view ``key_buffer[..., :kv_lora_rank]``.
            slots: ``[S]`` int64. No other slot is read, whatever it holds.
            scale: of the scores.
            causal_from: number of keys before the first query row: row i sees keys
                ``j <= causal_from + i``. ``None``: every row sees every key.
            logit_cap: scores become ``cap · tanh(score / cap)``; 0 = none.

        Returns:
            ``out [T, H, Dv]`` float32 and natural-log ``lse [T, H]`` float32, both new; a row that sees
            no key has out 0 and lse -inf.
        """
        rows, heads, _ = q.shape
        _, kv_heads, v_dim = value_buffer.shape
        assert heads % kv_heads == 0, (heads, kv_heads)
        keys, blind = slots.shape[0], 0
        if causal_from is not None:
            blind = min(max(-causal_from, 0), rows)  # leading rows that see no key
            keys = max(min(keys, causal_from + rows), 0)  # what the last row sees
        if keys == 0:
            blind = rows
        if blind or rows == 0:
            out = q.new_zeros((rows, heads, v_dim), dtype=torch.float32)
            lse = q.new_full((rows, heads), -math.inf, dtype=torch.float32)
            if blind < rows:
                out[blind:], lse[blind:] = self.attend(
                    q[blind:],
                    key_buffer,
                    value_buffer,
                    slots,
                    scale=scale,
                    causal_from=0,
                    logit_cap=logit_cap,
                )
            return out, lse

        if self._blocks is None and torch_flash.suits(q, key_buffer, value_buffer, logit_cap):
            found = torch_flash.attend(
                q, key_buffer, value_buffer, slots[:keys], scale=scale, causal_from=causal_from
            )
            if found is not None:
                return found
        blocks = self._blocks or (_CPU_BLOCKS if q.device.type == "cpu" else _GPU_BLOCKS)
        values_at = _values_inside_keys(key_buffer, value_buffer)
        # Few rows, as in decode: let the block of keys grow until the scores fill theirs.
        step = min(
            max(blocks.keys, blocks.scores // max(rows * heads, 1)),
            max(blocks.gathered // (kv_heads * q.shape[-1]), 1),
        )
        whole = causal_from is None or causal_from >= keys - 1
        run = _Run(q, kv_heads, v_dim, scale, logit_cap)
        if whole and keys <= step and rows * heads * keys <= blocks.scores:
            return run.at_once(*_gather(key_buffer, value_buffer, slots[:keys], values_at))
        run.prepare(blocks, min(step, keys))
        for begin in range(0, keys, step):
            end = min(begin + step, keys)
            k, v = _gather(key_buffer, value_buffer, slots[begin:end], values_at)
            seen, full = 0, 0  # first row that sees any key of the block, and all of them
            if causal_from is not None:
                seen = max(begin - causal_from, 0)
                full = min(max(end - 1 - causal_from, seen), rows)
                run.add_diagonal(seen, full, causal_from - begin, k, v, begin == 0)
            run.add_full(full, rows, k, v, begin == 0)
        return run.finish()


class _Run:
    """The query rows of one call and their running softmax."""

    def __init__(
        self, q: Tensor, kv_heads: int, v_dim: int, scale: float, logit_cap: float
    ) -> None:
        rows, heads, dim = q.shape
        self.rows, self.heads, self.kv_heads, self.v_dim = rows, heads, kv_heads, v_dim
        self.group = heads // kv_heads
        self.logit_cap = logit_cap
        factor = scale / logit_cap if logit_cap > 0.0 else scale
        own = q.dtype != torch.float32  # then the conversion is a copy to write to
        stacked = q.float().mul_(factor) if own else q.mul(factor)  # [T, H, D]
        if kv_heads > 1:
            stacked = stacked.view(rows, kv_heads, self.group, dim).transpose(0, 1)
        self.q = stacked.reshape(kv_heads, rows * self.group, dim)  # [Hkv, T·G, D]

    def at_once(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All rows against all keys, if that is one block and hides nothing."""
        p = torch.bmm(self.q, k)  # [Hkv, T·G, S]
        if self.logit_cap > 0.0:
            p.tanh_().mul_(self.logit_cap)
        self.top = p.amax(-1, keepdim=True)  # [Hkv, T·G, 1]
        p.sub_(self.top).exp_()
        self.total = p.sum(-1, keepdim=True)
        self.out = torch.bmm(p, v)  # [Hkv, T·G, Dv]
        return self.finish()

    def prepare(self, blocks: Blocks, keys: int) -> None:
        """Room for the running softmax and for one block of scores against ``keys`` keys."""
        new = self.q.new_empty
        batch, stacked, _ = self.q.shape
        self.out = new((batch, stacked, self.v_dim))
        self.top = new((batch, stacked, 1))  # running maximum
        self.total = new((batch, stacked, 1))  # running sum of exp(score - top)
        self.tile = min(max(blocks.scores // (self.heads * keys), 1), self.rows)
        self.square = min(self.tile, blocks.diagonal)
        self.scores = new((self.tile * self.heads * keys,))

    def add_full(self, a: int, b: int, k: Tensor, v: Tensor, first: bool) -> None:
        """Rows [a, b) see every key of the block."""
        for start in range(a, b, self.tile):
            self._add(start, min(start + self.tile, b), k, v, first)

    def add_diagonal(self, a: int, b: int, before: int, k: Tensor, v: Tensor, first: bool) -> None:
        """Row i of [a, b) sees the first ``before + i + 1`` keys of the block."""
        if a >= b:
            return
        broken = ~torch.isfinite(v).all(-1, keepdim=True)  # [Hkv, S, 1]
        v = v.masked_fill(broken, 0.0)  # probability 0 times NaN would be NaN
        n = self.square
        hidden = self.q.new_ones((n, n), dtype=torch.bool).triu_(1)[:, None]  # [n, 1, n]
        for start in range(a, b, self.square):
            stop = min(start + self.square, b)
            seen = before + stop
            p = self._add(start, stop, k[..., :seen], v[:, :seen], first, hidden)
            # Rows that do see a broken value must show it.
            shows = torch.bmm(p, broken[:, :seen].to(p.dtype)) > 0.0  # [Hkv, rows, 1]
            g = self.group
            self.out[:, start * g : stop * g].masked_fill_(shows, math.nan)

    def _add(
        self, a: int, b: int, k: Tensor, v: Tensor, first: bool, hidden: Tensor | None = None
    ) -> Tensor:
        """One tile; returns its unnormalised probabilities [Hkv, rows·G, S], valid until the next.

        ``hidden`` is the upper triangle that is not seen of the last b - a keys.
        """
        g, keys, n = self.group, k.shape[-1], b - a
        span = slice(a * g, b * g)
        p = self.scores[: self.heads * n * keys].view(self.kv_heads, n * g, keys)
        torch.bmm(self.q[:, span], k, out=p)
        if self.logit_cap > 0.0:
            p.tanh_().mul_(self.logit_cap)
        if hidden is not None:
            square = p.view(self.kv_heads, n, g, keys)[..., keys - n :]  # [Hkv, n, G, n]
            square.masked_fill_(hidden[:n, :, :n], -math.inf)
        out, top, total = self.out[:, span], self.top[:, span], self.total[:, span]
        highest = p.amax(-1, keepdim=True)  # [Hkv, rows·G, 1]
        if first:
            top.copy_(highest)
            p.sub_(highest).exp_()
            torch.sum(p, -1, keepdim=True, out=total)
            out.baddbmm_(p, v, beta=0.0)
            return p
        torch.maximum(highest, top, out=highest)
        decay = top.sub(highest).exp_()
        top.copy_(highest)
        p.sub_(highest).exp_()
        total.mul_(decay).add_(p.sum(-1, keepdim=True))
        out.mul_(decay).baddbmm_(p, v)
        return p

    def finish(self) -> tuple[Tensor, Tensor]:
        """out [T, H, Dv] and lse [T, H]."""
        out, lse = self.out.div_(self.total), self.total.log_().add_(self.top)
        if self.kv_heads > 1:
            apart = (self.kv_heads, self.rows, self.group)
            out = out.view(*apart, self.v_dim).transpose(0, 1).contiguous()
            lse = lse.view(apart).transpose(0, 1).contiguous()
        shape = (self.rows, self.heads)
        return out.reshape(*shape, self.v_dim), lse.reshape(shape)


def _values_inside_keys(key_buffer: Tensor, value_buffer: Tensor) -> int | None:
    """The first value channel within a key, if values are a slice of the keys (MLA)."""
    at = int(value_buffer.storage_offset()) - int(key_buffer.storage_offset())
    inside = (
        0 <= at <= key_buffer.shape[-1] - value_buffer.shape[-1]
        and value_buffer.dtype == key_buffer.dtype
        and value_buffer.stride() == key_buffer.stride()
        and value_buffer.untyped_storage().data_ptr() == key_buffer.untyped_storage().data_ptr()
    )
    return at if inside else None


def _gather(
    key_buffer: Tensor, value_buffer: Tensor, slots: Tensor, values_at: int | None
) -> tuple[Tensor, Tensor]:
    """k [Hkv, D, S] and v [Hkv, S, Dv], float32, of the S ``slots``."""
    k = key_buffer.index_select(0, slots).to(torch.float32)  # [S, Hkv, D]
    if values_at is None:
        v = value_buffer.index_select(0, slots).to(torch.float32)  # [S, Hkv, Dv]
    else:
        v = k[..., values_at : values_at + value_buffer.shape[-1]]
    return k.permute(1, 2, 0), v.transpose(0, 1)
