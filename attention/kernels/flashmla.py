"""FlashMLA: decode over MLA rows on Hopper, from the wheel ``sgl-flash-mla`` (imports as ``flash_mla``).

Plain BF16 rows run its dense kernel, which reads pages of 64 tokens through a block table. Packed FP8
rows run its sparse kernel, given every key of the part as an index.

What is relied on, and where it is said. sgl-flash-mla 1.0.0, ``flash_mla_interface.py``: the ABI, the
reuse of metadata, the shape of lse ``[b, H, s_q]``, natural logarithms. Upstream (deepseek-ai/FlashMLA),
``csrc/api/dense_decode.h``: a call takes one ``s_q``, masks causally from the end, any number of heads;
``csrc/sm90/kernels/splitkv_mla.cu``: ``lse = ln(sum) + max``, and +inf for a row that sees nothing;
``csrc/api/sparse_decode.h``: 64 or 128 heads, 656-byte rows, indices in blocks of 64. What the kernels
make of sequences without keys is not relied on: such parts read one key of page 0, and are hidden.

The schedule ("metadata") depends on everything that the shapes of a call do, and on the lengths of the
sequences, which the library does not check. So it is made anew by every `prepare`, lives in what
`prepare` returns, and serves the layers of one forward pass.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import AttentionShape, Capabilities, Phase, RowFormat, Work, no_rows
from .flashmla_abi import REMEDY, Abi, recognise_abi
from .library import import_library
from .paging import in_pages
from .stacking import Batch, Stacking, stack

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """One call of the library in every layer."""

    batch: Batch
    lengths: Tensor  # [b] int32, at least 1
    hidden: Tensor  # [b, rows] bool: rows that see nothing
    table: Tensor | None  # [b, most] int32 pages; None for packed rows
    indices: Tensor | None  # [b, rows, topk] int32 slots, -1 = none; None for plain rows
    metadata: Any
    num_splits: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch of parts, for the layers of one forward pass."""

    work: Work
    shape: AttentionShape
    scale: float
    stacking: Stacking
    launches: tuple[_Launch, ...]


class FlashMLAKernel:
    """See `Kernel`. ``run`` returns outputs in BF16."""

    def __init__(self, module: Any = None) -> None:
        """Import ``flash_mla``, or take it as ``module``.

        Raises:
            KernelUnavailableError: it is missing, broken or unknown.
        """
        self._module = import_library("flash_mla", REMEDY) if module is None else module
        self.abi = recognise_abi(self._module)
        accepts = inspect.signature(self._module.flash_mla_with_kvcache).parameters
        sparse = self.abi is not Abi.EAGER and {"indices", "topk_length"} <= set(accepts)
        packed = {RowFormat.FP8_PACKED} if sparse else set()
        self.capabilities: Capabilities = replace(
            _CAPABILITIES, rows=frozenset({RowFormat.PLAIN, *packed})
        )

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> Prepared:
        """See `Kernel.prepare`. The schedule follows in the first `run`, on the device."""
        assert shape.latent, shape
        assert shape.page_tokens == work.page_tokens == PAGE_TOKENS, shape
        stacking = stack(work)
        launches = tuple(self._launch(work, shape, batch) for batch in stacking.batches)
        return Prepared(work, shape, scale, stacking, launches)

    def _launch(self, work: Work, shape: AttentionShape, batch: Batch) -> _Launch:
        tokens = batch.key_tokens(work)
        visible = batch.visible_keys(work)
        lengths = tokens.clamp(min=1)
        table: Tensor | None = batch.block_table(work, tokens)
        indices = None
        if shape.rows is RowFormat.FP8_PACKED:
            assert table is not None
            indices, table = key_indices(table, visible, work.causal), None
        if self.abi is Abi.EAGER:
            rows_per_kv_head = batch.rows * shape.query_heads
            made = self._module.get_mla_metadata(lengths, rows_per_kv_head, 1)
        else:
            made = self._module.get_mla_metadata()
        return _Launch(batch, lengths, visible == 0, table, indices, made[0], made[1])

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
        assert logit_cap == 0.0, "FlashMLA does not cap logits"
        if work.rows == 0:
            return no_rows(q, shape, q.dtype)
        pages = in_pages(key_buffer, PAGE_TOKENS)
        q = q.contiguous()  # TMA wants rows at multiples of 16 bytes
        outs, lses = [], []
        for launch in prepared.launches:
            stacked = launch.batch.stack(q)  # [b, rows, H, D]
            call = self._dense if launch.indices is None else self._sparse
            out, lse = call(prepared, launch, stacked, pages)
            lse = lse.transpose(1, 2)[..., : shape.query_heads]  # [b, rows, H]
            outs.append(out[:, :, : shape.query_heads])
            lses.append(lse.masked_fill(launch.hidden[..., None], -math.inf))
        return prepared.stacking.restore(outs), prepared.stacking.restore(lses)

    def _dense(
        self, prepared: Prepared, launch: _Launch, q: Tensor, pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        extra: dict[str, Any] = {}
        if self.abi is not Abi.EAGER:
            extra["is_fp8_kvcache"] = False
        if self.abi is Abi.LAZY_LEGACY:
            extra["use_legacy"] = True
        out, lse = self._module.flash_mla_with_kvcache(
            q,
            pages,
            launch.table,
            launch.lengths,
            prepared.shape.value_width,
            launch.metadata,
            launch.num_splits,
            softmax_scale=prepared.scale,
            causal=prepared.work.causal,
            **extra,
        )
        return out, lse

    def _sparse(
        self, prepared: Prepared, launch: _Launch, q: Tensor, pages: Tensor
    ) -> tuple[Tensor, Tensor]:
        extra = {"use_legacy": True} if self.abi is Abi.LAZY_LEGACY else {}
        out, lse = self._module.flash_mla_with_kvcache(
            pad(q, (0, 0, 0, padded_heads(q.shape[2]) - q.shape[2])),
            pages,
            None,
            None,
            prepared.shape.value_width,
            launch.metadata,
            None,
            softmax_scale=prepared.scale,
            causal=False,  # the indices say which keys a row sees
            is_fp8_kvcache=True,
            indices=launch.indices,
            topk_length=launch.lengths,
            **extra,
        )
        return out, lse


def padded_heads(heads: int) -> int:
    """Query heads that the sparse kernel is compiled for: 64 or 128. `ValueError` for more."""
    if heads > 128:
        raise ValueError(f"FlashMLA's FP8 kernel runs at most 128 query heads, not {heads}")
    return 64 if heads <= 64 else 128


def key_indices(table: Tensor, visible: Tensor, causal: bool) -> Tensor:
    """Slots of the keys of every row ``[b, rows, most * 64]`` int32, -1 behind the last.

    Args:
        table: ``[b, most]`` int32 pages.
        visible: ``[b, rows]`` int32, how many of a part's keys the row sees.
        causal: whether rows of a part differ in that; else they share one list, which is not copied.
    """
    tokens = torch.arange(PAGE_TOKENS, dtype=torch.int32, device=table.device)
    slots = (table[..., None] * PAGE_TOKENS + tokens).flatten(1)[:, None]  # [b, 1, keys]
    seen = visible if causal else visible[:, -1:]
    column = torch.arange(slots.shape[-1], dtype=torch.int32, device=table.device)
    found = torch.where(column < seen[..., None], slots, -1)
    return found.expand(-1, visible.shape[1], -1)


_CAPABILITIES = Capabilities(
    name="flashmla",
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16}),
    phases=frozenset({Phase.DECODE, Phase.VERIFY}),
    page_tokens=frozenset({PAGE_TOKENS}),
    widths=frozenset({(576, 512)}),
    latent=True,
    grouped=False,
    causal=True,
    logit_cap=False,
    lse_base="e",
    graph_safe=True,  # the schedule is made on the device, by the first `run` of a capture
    reads="pages",
    compute=((9, 0), (9, 0)),
)
