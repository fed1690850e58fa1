"""A needle at length, read by a kernel instead of by PyTorch; see `benchmarks.needle`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention.world import mla
from benchmarks.needle import Attend
from tessera_sglang.attention.kernels.base import Kernel, Work

PAGE = 64


def reader(kernel: Kernel, heads: int) -> Attend:
    """The kernel as `benchmarks.needle` calls it: one part, bfloat16 queries."""

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        shape = mla(heads, torch.bfloat16)
        rows, length = len(q), len(slots)
        assert length % PAGE == 0, length
        by_page = kernel.capabilities.reads == "pages"
        pages = slots[::PAGE] // PAGE
        host_rows, host_keys = np.array([0, rows]), np.array([0, length])

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(q.device, torch.int32)

        work = Work(
            causal=False,
            page_tokens=PAGE,
            query_indptr=put(host_rows),
            key_indptr=put(host_keys),
            slots=None if by_page else slots,
            page_indptr=put(host_keys // PAGE) if by_page else None,
            pages=pages.to(torch.int32) if by_page else None,
            host_query_indptr=host_rows,
            host_key_indptr=host_keys,
        )
        prepared = kernel.prepare(work, shape, scale=scale)
        out, lse = kernel.run(prepared, q.to(torch.bfloat16), keys, values)
        return out.float(), lse

    return attend
