"""Decode and verification over MLA rows by a kernel in TileLang, on Ampere and newer.

SGLang's TileLang kernels pick each query's keys by an index of their own and return no lse for a whole
query. This one (`tilelang_source`) walks the slots of a part once for up to 32 of its stacked heads.
Keys are split over blocks; the splits' outputs are merged here, in float32.

The kernel is compiled when it is first prepared for a model, which takes seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from . import tilelang_source
from .base import AttentionShape, Capabilities, KernelUnavailableError, Phase, Work, no_rows
from .library import import_library, require
from .stacking import Batch, Stacking, stack

BLOCK_KEYS = 32
HEAD_TILE = 16  # rows of a matrix instruction
_MOST_SPLITS = 32
_SPLIT_TOKENS = 4 * BLOCK_KEYS  # fewer keys a split than this are not worth another one
_PARTIAL_BYTES = 1 << 28  # of the outputs of all splits of a call
_REMEDY = "pip install tilelang==0.1.12"
_DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """One call in every layer."""

    batch: Batch
    kernel: Any
    bounds: Tensor  # [b, splits + 1] int32
    limits: Tensor  # [b, heads] int32
    hidden: Tensor  # [b, rows] bool: rows that see nothing


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch of parts, for the layers of one forward pass."""

    work: Work
    shape: AttentionShape
    stacking: Stacking
    launches: tuple[_Launch, ...]


class TileLangKernel:
    """See `Kernel`. ``run`` returns float32 outputs."""

    def __init__(self, target: Literal["cuda", "c"] = "cuda") -> None:
        """Import ``tilelang``.

        Args:
            target: ``"c"`` compiles for the CPU, float32 only: slow, for tests.

        Raises:
            KernelUnavailableError: it is missing, broken, or not a version that is known.
        """
        self._tilelang = import_library("tilelang", _REMEDY)
        for name in ("jit", "language", "PassConfigKey"):
            require(self._tilelang, name, _REMEDY)
        for name in ("dynamic", "macro", "gemm", "if_then_else"):
            require(self._tilelang.language, name, _REMEDY)
        self._target = target
        self._compiled: dict[tuple[Any, ...], Any] = {}
        on_gpu = target == "cuda"
        self.capabilities = Capabilities(
            name="tilelang",
            devices=frozenset({"cuda" if on_gpu else "cpu"}),
            dtypes=frozenset({torch.bfloat16, torch.float16} if on_gpu else {torch.float32}),
            phases=frozenset({Phase.DECODE, Phase.VERIFY}),
            page_tokens=None,
            widths=frozenset({(576, 512)}) if on_gpu else None,
            latent=True,
            grouped=False,
            causal=True,
            logit_cap=False,
            lse_base="e",
            graph_safe=False,  # nothing in it waits for the device, but no capture was ever tried
            reads="slots",
            compute=((8, 0), (99, 9)),
        )

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> Prepared:
        """See `Kernel.prepare`.

        Raises:
            KernelUnavailableError: TileLang can not compile the kernel here.
        """
        assert shape.latent, shape
        stacking = stack(work, powers_of_two=True)
        launches = tuple(self._launch(work, shape, scale, batch) for batch in stacking.batches)
        return Prepared(work, shape, stacking, launches)

    def _launch(self, work: Work, shape: AttentionShape, scale: float, batch: Batch) -> _Launch:
        heads = padded_heads(batch.rows * shape.query_heads)
        block_heads = 2 * HEAD_TILE if heads % (2 * HEAD_TILE) == 0 else HEAD_TILE
        starts = batch.key_starts(work)
        tokens, visible = batch.key_tokens(work), batch.visible_keys(work)
        most = int((work.host_key_indptr[1:] - work.host_key_indptr[:-1])[batch.host_parts].max())
        splits = split_count(
            blocks=batch.size * heads // block_heads,
            most_keys=most,
            bytes_a_split=batch.size * heads * shape.value_width * 4,
            cores=_cores(starts.device),
        )
        limits = (starts[:, None] + visible).repeat_interleave(shape.query_heads, dim=1)
        limits = torch.nn.functional.pad(limits, (0, heads - limits.shape[1]))
        return _Launch(
            batch,
            self._kernel(shape, scale, block_heads),
            split_bounds(starts, tokens, splits),
            limits.to(torch.int32).contiguous(),
            visible == 0,
        )

    def _kernel(self, shape: AttentionShape, scale: float, block_heads: int) -> Any:
        key = (shape.dtype, shape.key_width, shape.value_width, block_heads, scale)
        if key not in self._compiled:
            try:
                self._compiled[key] = tilelang_source.build(
                    self._tilelang,
                    dtype=_DTYPES[shape.dtype],
                    key_width=shape.key_width,
                    value_width=shape.value_width,
                    block_heads=block_heads,
                    block_keys=BLOCK_KEYS,
                    scale=scale,
                    target=self._target,
                )
            except Exception as error:
                first_line = str(error).partition("\n")[0]
                raise KernelUnavailableError(
                    f"tilelang can not compile its kernel here ({type(error).__name__}: {first_line})"
                ) from error
        return self._compiled[key]

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
        assert logit_cap == 0.0, "this kernel does not cap logits"
        if work.rows == 0:
            return no_rows(q, shape)
        rows = key_buffer.squeeze(1)  # [num_slots, D]
        assert rows.is_contiguous(), "rows are gathered whole"
        outs, lses = [], []
        for launch in prepared.launches:
            batch = launch.batch
            own = batch.rows * shape.query_heads
            heads = launch.limits.shape[1]
            stacked = batch.stack(q).reshape(batch.size, own, shape.key_width)
            if heads > own:
                stacked = torch.nn.functional.pad(stacked, (0, 0, 0, heads - own))
            room = (batch.size, launch.bounds.shape[1] - 1, heads)
            partial = q.new_empty((*room, shape.value_width), dtype=torch.float32)
            partial_lse = q.new_empty(room, dtype=torch.float32)
            assert work.slots is not None
            launch.kernel(
                stacked.contiguous(),
                rows,
                launch.bounds,
                launch.limits,
                work.slots,
                partial,
                partial_lse,
            )
            out, lse = merge_splits(partial, partial_lse)
            out = out[:, :own].view(batch.size, batch.rows, shape.query_heads, -1)
            lse = lse[:, :own].view(batch.size, batch.rows, shape.query_heads)
            outs.append(out)
            lses.append(lse.masked_fill(launch.hidden[..., None], -math.inf))
        return prepared.stacking.restore(outs), prepared.stacking.restore(lses)


def padded_heads(heads: int) -> int:
    """Stacked heads in whole tiles of 16."""
    return -(-heads // HEAD_TILE) * HEAD_TILE


def split_count(*, blocks: int, most_keys: int, bytes_a_split: int, cores: int) -> int:
    """Into how many splits keys are cut: two blocks for each core, while there is work and memory."""
    wanted = -(-2 * cores // max(blocks, 1))
    worth = -(-most_keys // _SPLIT_TOKENS)
    return max(min(wanted, worth, _PARTIAL_BYTES // bytes_a_split, _MOST_SPLITS), 1)


def split_bounds(starts: Tensor, tokens: Tensor, splits: int) -> Tensor:
    """Where the splits of every entry begin and end among all keys, ``[b, splits + 1]`` int32.

    Equal shares in whole steps of `BLOCK_KEYS`; the last ones may be short, or empty.

    Args:
        starts: ``[b]`` int32, first key of the entry; tokens: ``[b]`` int32, how many it has.
        splits: at least 1.
    """
    share = -(-tokens // splits)
    share = -(-share // BLOCK_KEYS) * BLOCK_KEYS
    ends = torch.arange(splits + 1, dtype=torch.int32, device=tokens.device)
    return starts[:, None] + torch.minimum(share[:, None] * ends, tokens[:, None])


def merge_splits(partial: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all splits: ``[b, splits, heads, Dv]`` and lse ``[b, splits, heads]`` to one.

    An lse of a split that shows nothing is far below any other (see `tilelang_source.NOTHING`).
    """
    nothing = partial_lse < tilelang_source.NOTHING / 1e10
    lses = partial_lse.masked_fill(nothing, -math.inf)
    lse = lses.logsumexp(1)  # [b, heads]
    if partial.shape[1] == 1:
        return partial[:, 0], lse
    weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0)[:, None])
    return torch.einsum("bsh,bshd->bhd", weights, partial), lse


def _cores(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # exercises splits in tests
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
