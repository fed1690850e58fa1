"""Running a plan: where the keys lie, which queries are turned how far, and the merge.

`Executor.begin` does once per forward pass what does not depend on the layer: it looks up the slots or
pages of every part, prepares the kernel's launches and the rotations. `Pass.attend` is then called for
every layer. Nothing here waits for the device: sizes come from the plan, which is on the host, and
what the device needs of it travels in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kernels.base import AttentionShape, Kernel, Work
from .merge import merge_at, merge_by_table
from .plan import Ints, Launch, MergeStep, Plan, indptr
from .rope import RelativeRotation
from .transfer import upload

_STACKED_BYTES = 1 << 28  # of the outputs that one launch of span parts may hold before the merge
_STACKED_ROWS_ON_CPU = 256  # larger parts are merged while in the cache, and not copied
_TILE_ON_CPU = 1 << 22  # query elements of a part; memory for more is mapped anew each time


def stacked_rows(shape: AttentionShape, device: torch.device | str) -> int:
    """Rows of a launch of span parts, for `build_plan`: few launches on a GPU, small ones on a CPU."""
    if torch.device(device).type == "cpu":
        return _STACKED_ROWS_ON_CPU
    return max(_STACKED_BYTES // (shape.query_heads * shape.value_width * 4), 1)


@dataclass(frozen=True, slots=True)
class Relocation:
    """How queries are turned for keys that were stored elsewhere."""

    rotation: RelativeRotation
    start: int  # first rotary channel of a query head

    def to(self, device: torch.device | str) -> Relocation:
        """The same with its frequencies on ``device``."""
        return Relocation(self.rotation.to(device), self.start)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """A launch of span parts: its queries, and how its rows are merged."""

    work: Work
    query_index: Tensor  # [N] int64
    cos: Tensor  # [N, rotary/2] float32
    sin: Tensor
    table: Tensor | None  # [T, most] int64; None: `steps` say it
    steps: tuple[tuple[slice | Tensor, slice | Tensor], ...]


class Executor:
    """Runs plans of one model on one device."""

    def __init__(self, shape: AttentionShape, relocation: Relocation | None) -> None:
        """``relocation`` is None for a model that serves no spans."""
        self.shape = shape
        self.relocation = relocation

    def begin(self, plan: Plan, kernel: Kernel, row_slots: Tensor, request_rows: Tensor) -> Pass:
        """What all layers of a forward pass share.

        Args:
            plan: the pass's parts.
            kernel: what runs them.
            row_slots: ``[rows, positions]`` integer: the slot of every row position.
            request_rows: ``[R]`` integer: which of those rows is the request's.
        """
        spans = [tile for launch in plan.spans for tile in self._tiles(launch, row_slots.device)]
        looked_up = _look_up([plan.own, *spans], kernel, self.shape, row_slots, request_rows)
        stacks = []
        for launch, work in zip(spans, looked_up[1:], strict=True):
            assert self.relocation is not None, "spans on a model without relocation"
            stacks.append(self._stack(plan, launch, work, row_slots.device))
        return Pass(self.shape, kernel, self.relocation, looked_up[0], tuple(stacks))

    def _tiles(self, launch: Launch, device: torch.device) -> list[Launch]:
        """The launch, or, where it is a part of very many rows on a CPU, the part in runs of rows."""
        most = max(_TILE_ON_CPU // (self.shape.query_heads * self.shape.key_width), 1)
        if device.type != "cpu" or launch.parts > 1 or launch.rows <= most:
            return [launch]
        return [
            _rows_of(launch, a, min(a + most, launch.rows)) for a in range(0, launch.rows, most)
        ]

    def _stack(self, plan: Plan, launch: Launch, work: Work, device: torch.device) -> Stack:
        assert self.relocation is not None
        assert launch.query_index is not None
        assert launch.rotation is not None
        table = launch.merge_table(plan.query_tokens) if plan.single else None
        steps = [] if plan.single else launch.merge_steps()
        rotations, which = np.unique(launch.rotation, return_inverse=True)
        arrays = [launch.query_index, rotations, which]
        arrays += [table.reshape(-1)] if table is not None else []
        arrays += [side for step in steps for side in _index_arrays(step)]
        query_index, distinct, which_of, *rest = upload(arrays, device)
        cos, sin = (x[which_of] for x in self.relocation.rotation.cos_sin(distinct))
        if table is not None:
            return Stack(work, query_index, cos, sin, rest[0].view(table.shape), ())
        indices = iter(rest)
        placed = tuple(
            (step.rows, step.queries)
            if isinstance(step.rows, slice) and isinstance(step.queries, slice)
            else (next(indices), next(indices))
            for step in steps
        )
        return Stack(work, query_index, cos, sin, None, placed)


@dataclass(eq=False)
class Pass:
    """One forward pass: `attend` is called once per layer."""

    shape: AttentionShape
    kernel: Kernel
    relocation: Relocation | None
    own: Work
    stacks: tuple[Stack, ...]
    _prepared: dict[float, list[Any]] = field(default_factory=dict)  # by scale

    @property
    def launches(self) -> int:
        """Kernel launches of a layer."""
        return 1 + len(self.stacks)

    def prepare(self, scale: float) -> list[Any]:
        """The kernel's schedules for layers with this scale; made when first asked for."""
        found = self._prepared.get(scale)
        if found is None:
            works = [self.own, *(stack.work for stack in self.stacks)]
            found = [self.kernel.prepare(work, self.shape, scale=scale) for work in works]
            self._prepared[scale] = found
        return found

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, *, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        """Attention of one layer.

        Args:
            q: ``[T, H, D]``, the batch's queries, rotated for their prompt positions.
            keys: ``[slots, Hkv, D]``, the layer's pool; the new tokens are stored already.
            values: ``[slots, Hkv, Dv]``.
            scale: of the scores.
            logit_cap: see `Kernel.run`.

        Returns:
            ``[T, H, Dv]``, float32 or q's dtype.
        """
        own, *others = self.prepare(scale)
        out, lse = self.kernel.run(own, q, keys, values, logit_cap=logit_cap)
        if not self.stacks:
            return out
        out = out.float()
        for stack, prepared in zip(self.stacks, others, strict=True):
            assert self.relocation is not None
            turned = self.relocation.rotation.turn(
                q.index_select(0, stack.query_index),
                stack.cos,
                stack.sin,
                start=self.relocation.start,
            )
            part = self.kernel.run(prepared, turned, keys, values, logit_cap=logit_cap)
            if stack.table is not None:
                out, lse = merge_by_table(out, lse, *part, stack.table)
            else:
                for rows, queries in stack.steps:
                    merge_at(out, lse, *part, rows=rows, queries=queries)
        return out


def _rows_of(launch: Launch, begin: int, end: int) -> Launch:
    """Rows of a launch of one part: a part against the same keys."""
    assert launch.query_index is not None
    assert launch.rotation is not None
    assert launch.use_indptr is not None
    return replace(
        launch,
        query_indptr=np.array([0, end - begin]),
        query_index=launch.query_index[begin:end],
        rotation=launch.rotation[begin:end],
        use_indptr=np.unique(launch.use_indptr.clip(begin, end)) - begin,
    )


def _look_up(
    launches: Sequence[Launch],
    kernel: Kernel,
    shape: AttentionShape,
    row_slots: Tensor,
    request_rows: Tensor,
) -> list[Work]:
    """The launches as a kernel wants them: slots, or pages, of every key."""
    page = shape.page_tokens
    by_page = kernel.capabilities.reads == "pages"
    arrays: list[Ints] = []
    sizes = []
    for launch in launches:
        request, start, end = launch.pieces.T
        counts = -(-(end - start) // page) if by_page else end - start
        ends = indptr(counts)
        sizes.append(int(ends[-1]))
        arrays += [request, start, counts, ends[:-1]]
        arrays += [launch.query_indptr, launch.key_indptr, ends[launch.piece_indptr]]
    uploaded = upload(arrays, row_slots.device)
    works = []
    for number, (launch, size) in enumerate(zip(launches, sizes, strict=True)):
        request, start, counts, before, *offsets = uploaded[7 * number : 7 * number + 7]
        query_indptr, key_indptr, entry_indptr = (offset.to(torch.int32) for offset in offsets)
        piece = torch.repeat_interleave(counts, output_size=size)  # of every entry
        within = torch.arange(size, device=row_slots.device) - before[piece]
        positions = start[piece] + within * (page if by_page else 1)
        slots = row_slots[request_rows[request[piece]], positions]
        works.append(
            Work(
                causal=launch.causal,
                page_tokens=page,
                query_indptr=query_indptr,
                key_indptr=key_indptr,
                slots=None if by_page else slots.long(),
                page_indptr=entry_indptr if by_page else None,
                pages=(slots // page).to(torch.int32) if by_page else None,
                host_query_indptr=launch.query_indptr,
                host_key_indptr=launch.key_indptr,
            )
        )
    return works


def _index_arrays(step: MergeStep) -> list[Ints]:
    if isinstance(step.rows, slice) or isinstance(step.queries, slice):
        return []
    return [step.rows, step.queries]
