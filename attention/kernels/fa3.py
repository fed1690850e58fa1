"""FlashAttention 3 over pages, on Hopper: parts of any size, causal or not, MLA rows and K/V.

The function is passed in, since this room knows no engine: ``flash_attn_with_kvcache`` as SGLang 0.5.23
has it in ``sglang.kernels.ops.attention.flash_attention_v3``. What is relied on, from that file, from
``sgl_kernel/flash_attn.py`` and from how SGLang's own backend calls it
(``layers/attention/flashattention_backend.py``):

* ``cu_seqlens_q``, ``page_table [P, most]``, ``cache_seqlens [P]``: parts of unequal sizes in one call;
  causal masks are aligned at the end.
* MLA: the rotary channels are q and keys, the latent is ``qv`` and the values.
* With ``return_softmax_lse`` the lse is natural, ``[H, N]`` for unequal parts.

What it makes of parts without keys is not relied on: they read one key of page 0, and are hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base import AttentionShape, Capabilities, Phase, Work, no_rows
from .paging import in_pages
from .stacking import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch of parts, for the layers of one forward pass."""

    work: Work
    shape: AttentionShape
    scale: float
    lengths: Tensor  # [P] int32, at least 1
    table: Tensor  # [P, most] int32 pages
    hidden: Tensor  # [N] bool: rows that see nothing
    most_rows: int  # of a part


class FA3Kernel:
    """See `Kernel`. ``run`` returns outputs in q's dtype."""

    capabilities = Capabilities(
        name="fa3",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        phases=frozenset(Phase),
        page_tokens=None,
        widths=frozenset({(576, 512), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)}),
        latent=True,
        grouped=True,
        causal=True,
        logit_cap=True,
        lse_base="e",
        graph_safe=True,  # lengths are read on the device
        reads="pages",
        compute=((9, 0), (9, 0)),
    )

    def __init__(self, attend: Callable[..., Any]) -> None:
        """Wrap ``flash_attn_with_kvcache``."""
        self._attend = attend

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> Prepared:
        """See `Kernel.prepare`. The schedule is the library's own, made in every call."""
        counts = np.diff(work.host_query_indptr)
        every = Batch(None, np.arange(work.parts), 0, None)  # only asked for its pages
        tokens = every.key_tokens(work)
        rows = work.query_indptr.diff()
        part = torch.repeat_interleave(rows, output_size=work.rows)  # [N]
        seen = tokens[part]
        if work.causal:
            after = work.query_indptr[1:][part] - torch.arange(
                1, work.rows + 1, dtype=torch.int32, device=rows.device
            )
            seen = seen - after
        return Prepared(
            work,
            shape,
            scale,
            tokens.clamp(min=1),
            every.block_table(work, tokens),
            seen <= 0,
            int(counts.max(initial=0)),
        )

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
            return no_rows(q, shape, q.dtype)
        keys, values = (
            in_pages(key_buffer, work.page_tokens),
            in_pages(value_buffer, work.page_tokens),
        )
        extra: dict[str, Any] = {}
        if shape.latent:
            extra["qv"] = q[..., : shape.value_width].contiguous()
            q, keys = q[..., shape.value_width :], keys[..., shape.value_width :]
        out, lse, *_ = self._attend(
            q=q.contiguous(),
            k_cache=keys,
            v_cache=values,
            page_table=prepared.table,
            cache_seqlens=prepared.lengths,
            cu_seqlens_q=work.query_indptr,
            max_seqlen_q=prepared.most_rows,
            softmax_scale=prepared.scale,
            causal=work.causal,
            softcap=logit_cap,
            return_softmax_lse=True,
            **extra,
        )
        return out, lse.T.masked_fill(prepared.hidden[:, None], -math.inf)
