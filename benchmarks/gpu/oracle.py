"""What attention has to be: each query over its visible keys, moved to where the prompt has them.

Nothing of plan, kernels or merge is used. float64, request by request.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from benchmarks.attention.world import World
from tessera_sglang.attention.kernels.base import RowFormat
from tessera_sglang.attention.packed_rows import MLA_ROW, pack, unpack
from tessera_sglang.attention.plan import BatchQueries
from tessera_sglang.attention.reference import attend_reference


def moved(world: World, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """A request's keys where its prompt has them, in row order.

    Returns:
        keys ``[S, Hkv, D]``; values ``[S, Hkv, Dv]``; and the first prompt position from which each is
        seen ``[S]`` int64. Plain keys keep their dtype, packed ones are float32.
    """
    length = int(world.batch.seq_tokens[request])
    layout, shape = world.batch.layouts[request], world.shape
    device = world.keys.device
    keys, values = stored(world, world.rows[request, :length].long())
    seen_from = torch.arange(length, device=device)
    relocation = world.executor.relocation
    if layout is not None:
        assert relocation is not None
        positions = torch.from_numpy(layout.prompt_positions(0, length))
        seen_from = positions.to(device)
        for run in layout.runs:
            part = slice(run.row_start, run.row_end)
            keys[part] = relocation.rotation.rotate(
                keys[part], -run.rotation, start=relocation.start
            )
            seen_from[part] = run.prompt_end
    if shape.latent:
        values = keys[..., : shape.value_width]
    return keys, values, seen_from


def stored(world: World, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as they lie in ``slots``; new tensors."""
    if world.shape.rows is RowFormat.FP8_PACKED:
        row = unpack(world.keys[slots, 0], torch.float32)[:, None]
        return row, row[..., : world.shape.value_width]
    return world.keys[slots], world.values[slots]


@torch.no_grad()
def expected(world: World) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, Dv]`` and lse ``[T, H]`` of the batch, float32."""
    outs, lses, start = [], [], 0
    for request, layout in enumerate(world.batch.layouts):
        tokens = int(world.batch.query_tokens[request])
        length = int(world.batch.seq_tokens[request])
        keys, values, seen_from = moved(world, request)
        query_at = torch.arange(length - tokens, length, device=keys.device)
        if layout is not None:
            positions = layout.prompt_positions(length - tokens, length)
            query_at = torch.from_numpy(positions).to(keys.device)
        mask = seen_from[None] <= query_at[:, None]
        q = world.q[start : start + tokens]
        out, lse = attend_reference(q, keys, values, mask, world.scale)
        outs.append(out)
        lses.append(lse)
        start += tokens
    return torch.cat(outs), torch.cat(lses)


@torch.no_grad()
def flattened(world: World) -> World:
    """The same contexts as plain ones: keys moved, and rounded to what the pool holds, no spans.

    For requests whose new tokens see all of their row but what follows them.
    """
    page = world.shape.page_tokens
    lengths = world.batch.seq_tokens.tolist()
    slots = (sum(-(-length // page) for length in lengths) + 1) * page
    keys = torch.zeros((slots, *world.keys.shape[1:]), dtype=world.keys.dtype).to(world.keys.device)
    values = keys[..., : world.shape.value_width]
    if not world.shape.latent:
        values = torch.zeros_like(keys)
    rows = torch.zeros_like(world.rows)
    at = page
    for request, length in enumerate(lengths):
        where = slice(at, at + length)
        found, found_values, _ = moved(world, request)
        if world.shape.rows is RowFormat.FP8_PACKED:
            row = found[:, 0]
            keys[where, 0] = pack(row[:, : MLA_ROW.latent], row[:, MLA_ROW.latent :])
        else:
            keys[where] = found
            if not world.shape.latent:
                values[where] = found_values
        rows[request, :length] = torch.arange(at, at + length, device=rows.device)
        at += -(-length // page) * page
    assert at == slots, (at, slots)
    plain = BatchQueries.of(world.batch.query_tokens.tolist(), lengths, [None] * len(lengths))
    return dataclasses.replace(world, batch=plain, keys=keys, values=values, rows=rows)
