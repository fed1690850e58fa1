"""Parts of unequal sizes for kernels that want equal ones.

A shared span's part stacks the queries of all its readers, so the parts of one launch have different
numbers of query rows; FlashMLA and Triton's decode kernel run a batch in which each entry has the same
number. Parts are therefore put into *buckets* by their rows, rounded up to a power of two, and padded
inside a bucket: at the front, because causal rows are aligned at the end. A bucket never holds more
than twice the rows that were asked for, and there are at most log2(rows) of them.

Everything is worked out on the host from `Work.host_query_indptr` and reaches the device in one copy.
A launch in which every part has as many rows, which is what a decode step without spans and every
static launch is, needs no copy and no index: its queries are a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..plan import Ints
from ..transfer import upload
from .base import Work


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Parts that run together, on the host."""

    parts: Ints  # [b] which, ascending
    rows: int  # of each, padding included
    gather: Ints  # [b * rows] the stacked row in each place; padding repeats the part's first


def buckets(host_query_indptr: Ints, *, powers_of_two: bool) -> tuple[tuple[Bucket, ...], Ints]:
    """Cut parts into buckets.

    Args:
        host_query_indptr: ``[P + 1]``, see `Work`. Parts without rows are in no bucket.
        powers_of_two: whether a bucket's rows are one, for kernels that are compiled per size; else
            they are those of its largest part.

    Returns:
        The buckets, smallest first, and for every stacked row its place among the buckets' places,
        laid one after the other, ``[N]``. A fixed number of bulk operations for each bucket.
    """
    counts = np.diff(host_query_indptr)
    # 1, 2, 3-4, 5-8 …; exact for counts up to 2^53
    classes = np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64)
    place = np.empty(int(host_query_indptr[-1]), dtype=np.int64)
    found: list[Bucket] = []
    taken = 0
    for size_class in np.unique(classes[counts > 0]).tolist():
        parts = np.flatnonzero((classes == size_class) & (counts > 0))
        rows = 1 << size_class if powers_of_two else int(counts[parts].max())
        within = np.arange(rows) - (rows - counts[parts])[:, None]  # [b, rows], < 0 in the padding
        gather = (host_query_indptr[parts][:, None] + np.maximum(within, 0)).reshape(-1)
        real = np.flatnonzero(within.reshape(-1) >= 0)
        place[gather[real]] = taken + real
        taken += len(gather)
        found.append(Bucket(parts, rows, gather))
    return tuple(found), place


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A bucket on the device."""

    parts: Tensor | None  # [b] int64; None: all parts of the work, in order
    host_parts: Ints  # [b]
    rows: int
    gather: Tensor | None  # [b * rows] int64; None: all stacked rows, in order

    @property
    def size(self) -> int:
        """b."""
        return len(self.host_parts)

    def stack(self, q: Tensor) -> Tensor:
        """Queries ``[N, H, D]`` as ``[b, rows, H, D]``; a view where none has to move."""
        picked = q if self.gather is None else q.index_select(0, self.gather)
        return picked.view(self.size, self.rows, *q.shape[1:])

    def key_tokens(self, work: Work) -> Tensor:
        """Keys of every part ``[b]`` int32, read on the device."""
        tokens = work.key_indptr.diff()
        return tokens if self.parts is None else tokens.index_select(0, self.parts)

    def visible_keys(self, work: Work) -> Tensor:
        """Keys that every row sees ``[b, rows]`` int32, none as 0; what padding sees is not said."""
        tokens = self.key_tokens(work)[:, None]
        if not work.causal:
            return tokens.expand(-1, self.rows)
        before_last = torch.arange(self.rows - 1, -1, -1, dtype=torch.int32, device=tokens.device)
        return (tokens - before_last).clamp(min=0)

    def block_table(self, work: Work, tokens: Tensor) -> Tensor:
        """Pages of every part ``[b, most]`` int32, padded with page 0, which every pool has.

        Offsets come from ``page_indptr`` and the width from the host's capacities, so that the shape
        of a static launch does not depend on how many keys it holds.
        """
        assert work.pages is not None
        assert work.page_indptr is not None
        capacity = np.diff(work.host_key_indptr)[self.host_parts]
        most = max(-(-int(capacity.max(initial=0)) // work.page_tokens), 1)
        starts = work.page_indptr[:-1]
        if self.parts is not None:
            starts = starts.index_select(0, self.parts)
        column = torch.arange(most, dtype=torch.int32, device=tokens.device)
        at = starts[:, None] + column
        inside = column * work.page_tokens < tokens[:, None]
        if work.pages.numel() == 0:
            return at * 0
        pages = work.pages[at.clamp(max=work.pages.numel() - 1)]
        return torch.where(inside, pages, 0)

    def key_starts(self, work: Work) -> Tensor:
        """Where every part's keys begin in ``work.slots``: ``[b]`` int32."""
        if work.static:  # at a fixed stride, however many there are
            assert self.parts is None
            stride = int(work.host_key_indptr[1])
            return (
                torch.arange(work.parts, dtype=torch.int32, device=work.key_indptr.device) * stride
            )
        starts = work.key_indptr[:-1]
        return starts if self.parts is None else starts.index_select(0, self.parts)

    def key_slots(self, work: Work) -> tuple[Tensor, Tensor]:
        """CSR of the bucket's keys: indptr ``[b + 1]`` int32 and slots ``[keys]`` int64.

        The work's own tables where the bucket is a run of its parts; else a copy without gaps, for
        static work as long as its capacity, and filled up with any slots.
        """
        assert work.slots is not None
        first, last = int(self.host_parts[0]), int(self.host_parts[-1])
        if last - first + 1 == self.size and not work.static:
            return work.key_indptr[first : last + 2], work.slots
        tokens = self.key_tokens(work)
        indptr = torch.nn.functional.pad(tokens.cumsum(0, dtype=torch.int32), (1, 0))
        total = int(np.diff(work.host_key_indptr)[self.host_parts].sum())
        at = torch.arange(total, dtype=torch.int32, device=tokens.device)
        entry = torch.searchsorted(indptr[1:], at, right=True).clamp(max=self.size - 1)
        source = (self.key_starts(work) - indptr[:-1])[entry] + at
        return indptr, work.slots[source.clamp(max=work.slots.numel() - 1)]


@dataclass(frozen=True, slots=True, eq=False)
class Stacking:
    """The buckets of a launch on the device, and the way back."""

    batches: tuple[Batch, ...]
    place: Tensor | None  # [N] int64 in the batches' places; None: as they are

    def restore(self, results: Sequence[Tensor]) -> Tensor:
        """Results ``[b, rows, …]`` of every batch, at least one, as ``[N, …]``: as the queries were."""
        flat = [result.flatten(0, 1) for result in results]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat)
        return joined if self.place is None else joined.index_select(0, self.place)


def stack(work: Work, *, powers_of_two: bool = False) -> Stacking:
    """Buckets of a launch, placed on its device. Nothing waits for the device.

    A static launch has equal parts: it is one bucket of exactly their rows, whatever was asked for.
    """
    found, place = buckets(work.host_query_indptr, powers_of_two=powers_of_two and not work.static)
    device = work.query_indptr.device
    straight = len(found) == 1 and np.array_equal(found[0].gather, np.arange(work.rows))
    if straight and len(found[0].parts) == work.parts:
        return Stacking((Batch(None, found[0].parts, found[0].rows, None),), None)
    assert not work.static, "parts of a static launch have as many rows"
    arrays = [place, *(bucket.parts for bucket in found), *(bucket.gather for bucket in found)]
    placed, *rest = upload(arrays, device)
    parts, gathers = rest[: len(found)], rest[len(found) :]
    batches = [
        Batch(part, bucket.parts, bucket.rows, gather)
        for bucket, part, gather in zip(found, parts, gathers, strict=True)
    ]
    return Stacking(tuple(batches), placed)
