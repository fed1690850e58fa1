"""Which rows one forward pass reads and writes, worked out once for all layers.

Layers of a kind keep the same positions, so the rows of a ring are the same in each, and so are the
entries of a stride. Everything is decided before the first layer runs: what a pass reads is found by the
tags that earlier passes left, then the tags move on to what this pass will write.

A pass takes ``tokens`` tokens of every request behind ``start``, the same for all: a compressor has one
first position for a whole batch. Requests of another length go in a pass of their own (:mod:`.forward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tessera_sglang.memory_pool.planes import Plane
from tessera_sglang.memory_pool.ring import Ring, Slots
from tessera_sglang.memory_pool.units import UnitIds

from .parts import Parts, StateMissing, pages_of
from .storage import LayerStorage

Interval = tuple[int, int]  # of positions, half open


@dataclass(frozen=True, slots=True)
class RingRows:
    """Rows of an arena plane; int64 [requests * positions], request by request."""

    read: torch.Tensor  # what earlier passes left
    write: torch.Tensor  # for the last of what this pass brings


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows of a paged plane in the order in which they came to be seen; int64 [requests, entries]."""

    all: torch.Tensor  # after this pass
    new: torch.Tensor  # those that it closes, the last ones
    shifts: (
        torch.Tensor | None
    )  # of all, in tokens: how far parts stand from where they were computed


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    requests: int
    start: int  # tokens that each request had before
    tokens: int  # of each request in this pass
    rings: Mapping[Ring, RingRows]
    entries: Mapping[int, EntryRows]  # by stride


def plan(
    storage: LayerStorage,
    slots: Slots,
    pages: UnitIds,
    start: int,
    tokens: int,
    parts: Sequence[Parts] = (),
) -> Step:
    """Find the rows of a pass, and move the tags on to what it will write.

    ``slots`` is int64 [requests], ``pages`` int64 [requests, pages], a request's own; ``parts`` are
    those that each reads besides, of as many pages in each, or empty where none reads any. Raises
    ValueError where the pages do not reach the end of the pass, and :class:`StateMissing`, with nothing
    changed, where a slot lacks a position that the pass reads. O(requests * entries).

    Windows go by position, over parts and own tokens alike. Groups are of own tokens, one after the
    other, as if no part stood between them: so tails and overlaps go by own tokens.
    """
    shared = pages_of(parts[0]) * storage.page_tokens if parts else 0
    assert all(pages_of(others) * storage.page_tokens == shared for others in parts)
    end, own_start = start + tokens, start - shared
    own_end = end - shared
    if pages.shape[1] * storage.page_tokens < own_end:
        raise ValueError(
            f"{pages.shape[1]} pages of {storage.page_tokens} tokens do not hold {own_end} tokens; "
            "reserve pages before the forward pass"
        )
    spans = {
        ring: intervals(ring.plane, start, end)
        if ring.plane.name == "window"
        else intervals(ring.plane, own_start, own_end)
        for ring in storage.rings
    }
    found = {ring: _read(ring, slots, reads) for ring, (reads, _) in spans.items()}
    rings = {
        ring: RingRows(found[ring], _write(ring, slots, writes))
        for ring, (_, writes) in spans.items()
    }
    entries = {
        stride: _entries(pages, parts, storage.page_tokens, stride, start, own_end)
        for stride in storage.strides
    }
    return Step(len(slots), start, tokens, rings, entries)


def intervals(plane: Plane, start: int, end: int) -> tuple[Interval, Interval]:
    """What a pass over ``[start, end)``, positions or own tokens, reads from an arena plane, and writes.

    - ``window``: the query at ``start`` sees itself and ``rows - 1`` tokens before it.
    - a ``tail`` holds the group that is not complete yet.
    - an ``overlap`` holds the last complete group, and is read and replaced when another is completed.
    """
    rows = plane.rows
    if plane.name == "window":
        return (max(0, start - rows + 1), start), (max(start, end - rows), end)
    before, after = start - start % rows, end - end % rows
    if plane.transient:
        return (before, start), (max(start, after), end)
    if before == after:
        return (start, start), (end, end)
    return (max(0, before - rows), before), (after - rows, after)


def _pairs(slots: Slots, positions: Interval) -> tuple[Slots, UnitIds]:
    wanted = np.arange(*positions)
    return np.repeat(slots, len(wanted)), np.tile(wanted, len(slots))


def _read(ring: Ring, slots: Slots, positions: Interval) -> torch.Tensor:
    owners, wanted = _pairs(slots, positions)
    rows, readable = ring.read_rows(owners, wanted)
    if not readable.all():
        gone = ~readable
        raise StateMissing(
            f"slot {owners[gone][0]} does not hold {ring.plane.name!r} of {np.count_nonzero(gone)} "
            f"positions from {wanted[gone][0]} on: restore the state of the page that the request "
            "goes on from, or start it at position 0"
        )
    return torch.from_numpy(rows)


def _write(ring: Ring, slots: Slots, positions: Interval) -> torch.Tensor:
    return torch.from_numpy(ring.write_rows(*_pairs(slots, positions)))


def _entries(
    pages: UnitIds, parts: Sequence[Parts], page_tokens: int, stride: int, start: int, own_end: int
) -> EntryRows:
    """A part is whole pages, so as many entries are seen at a position as without parts."""
    per_page = page_tokens // stride
    places = np.arange(own_end // stride)
    own = pages[:, places // per_page] * per_page + places % per_page
    if not any(parts):
        rows = torch.from_numpy(own)
        return EntryRows(rows, rows[:, start // stride :], None)
    found = [_woven(row, some, page_tokens, stride) for row, some in zip(own, parts, strict=True)]
    rows, shifts = (torch.from_numpy(np.stack(columns)) for columns in zip(*found, strict=True))
    return EntryRows(rows, rows[:, start // stride :], shifts)


def _woven(own: UnitIds, parts: Parts, page_tokens: int, stride: int) -> tuple[UnitIds, UnitIds]:
    """A request's own rows and those of its parts by the time they are seen, and their shifts."""
    per_page = page_tokens // stride
    rows, shifts = [], []
    done = shared = 0
    for part in parts:
        before = (part.start - shared) // stride  # own groups complete when the part begins
        inside = (part.pages[:, None] * per_page + np.arange(per_page)).reshape(-1)
        rows += [own[done:before], inside]
        shifts += [np.zeros(before - done, np.int64), np.full(len(inside), part.shift)]
        done, shared = before, shared + len(part.pages) * page_tokens
    rows.append(own[done:])
    shifts.append(np.zeros(len(own) - done, np.int64))
    return np.concatenate(rows), np.concatenate(shifts)
