"""What kernels over pages need of a `Work`, worked out on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..plan import Ints, indptr, ranges
from .base import Work


@dataclass(frozen=True, slots=True, eq=False)
class PagePlan:
    """Parts and their pages as int32 tensors on the host."""

    query_indptr: Tensor  # [P + 1]
    page_indptr: Tensor  # [P + 1] into `Work.pages`
    key_tokens: Tensor  # [P]
    last_page_tokens: Tensor  # [P], 0 for a part without keys


def page_plan(work: Work) -> PagePlan:
    """The host's view of a launch that is not static."""
    assert not work.static, "its host arrays hold capacities"
    keys = np.diff(work.host_key_indptr)
    pages = -(-keys // work.page_tokens)
    return PagePlan(
        query_indptr=_int32(work.host_query_indptr),
        page_indptr=_int32(indptr(pages)),
        key_tokens=_int32(keys),
        last_page_tokens=_int32(keys - np.maximum(pages - 1, 0) * work.page_tokens),
    )


def blind_rows(work: Work) -> Ints:
    """Stacked rows that see no key, ascending: of parts without keys, or, causally, too many rows."""
    assert not work.static, "its host arrays hold capacities"
    keys = np.diff(work.host_key_indptr)
    rows = np.diff(work.host_query_indptr)
    blind = np.maximum(rows - keys, 0) if work.causal else np.where(keys == 0, rows, 0)
    return ranges(work.host_query_indptr[:-1], blind)


def in_pages(buffer: Tensor, page_tokens: int) -> Tensor:
    """A pool ``[num_slots, Hkv, D]`` as ``[pages, page, Hkv, D]``, a view; a last page cut short is left
    out."""
    pages = buffer.shape[0] // page_tokens
    return buffer[: pages * page_tokens].view(pages, page_tokens, *buffer.shape[1:])


def _int32(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
