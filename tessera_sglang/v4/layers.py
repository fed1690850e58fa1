"""The cache objects of DeepSeek-V4's layers, over the pool.

They answer to the calls of ``DeepseekV4HCACache`` and ``DeepseekV4CSACache`` in transformers 5.19
(``models/deepseek_v4/modeling_deepseek_v4.py``), return what those return, and keep nothing: bytes are
in the pool, rows come from the step that the cache planned, and are gathered and scattered in bulk.

None is a subclass of one of those: a subclass registers itself for the layer type when it is defined,
and would take the place of the original in every ``DynamicCache``.

Shapes: B requests, S tokens of the pass, D channels. ``name`` is ``"compressor"`` or ``"indexer"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from tessera_sglang.memory_pool.ring import Ring

from .rope import Rope
from .step import Step
from .storage import LayerPlanes, PlaneRows

_ENTRIES = {"compressor": "entries", "indexer": "index"}
_TAIL = {"compressor": "tail", "indexer": "index_tail"}
_OVERLAP = {"compressor": "overlap", "indexer": "index_overlap"}


@dataclass(slots=True)
class Progress:
    """Where the requests of a cache are. The cache moves it, its layers read it."""

    length: int  # tokens that each request has, with those of a pass that began
    rope: Rope
    last_step: Step | None = None

    @property
    def step(self) -> Step:
        """The pass that runs."""
        assert self.last_step is not None, "no forward pass began"
        return self.last_step


class WindowLayer(CacheLayerMixin):  # type: ignore[misc] # untyped base
    """The branch that every layer has: the last tokens, keys and values in one. [B, 1, S, D]"""

    is_sliding = True

    def __init__(self, planes: LayerPlanes, progress: Progress) -> None:
        super().__init__()
        self.is_initialized = True  # the pool's memory is
        self._planes = planes.planes
        self._progress = progress
        self.sliding_window = self._planes["window"].plane.rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The window before the pass and the pass itself, [B, 1, window + S, D], twice."""
        before = self._read("window", key_states.dtype)
        self._write("window", key_states[:, 0])
        full = torch.cat([before.unsqueeze(1), key_states], dim=2)
        return full, full

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first position of what :meth:`update` will return for so many queries."""
        seen = min(self._progress.length, self.sliding_window - 1)
        return seen + query_length, self._progress.length - seen

    def get_seq_length(self) -> int:
        """Tokens that each request has."""
        return self._progress.length

    def get_max_length(self) -> int:
        """Tokens that the window branch can see, as transformers counts it."""
        return self.sliding_window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the pool's memory is there."""

    def reset(self, *_: object) -> NoReturn:
        """Refused: see the message."""
        raise NotImplementedError(
            "requests are ended and rows reordered in the pool, not in the cache: close the request"
        )

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = reset

    def _read(self, plane: str, dtype: torch.dtype) -> torch.Tensor:
        """What earlier passes left, [B, positions, elements]."""
        planes, step = self._planes[plane], self._progress.step
        rows = planes.rows.index_select(0, step.rings[_ring(planes)].read)
        return rows.view(step.requests, -1, rows.shape[1]).to(dtype)

    def _write(self, plane: str, states: torch.Tensor) -> None:
        """Keep the last of ``states``, [B, positions, elements], as many as the step has rows for."""
        planes, step = self._planes[plane], self._progress.step
        write = step.rings[_ring(planes)].write
        kept = states[:, states.shape[1] - len(write) // step.requests :]
        planes.rows.index_copy_(0, write, kept.flatten(0, 1).to(planes.rows.dtype))


class HcaLayer(WindowLayer):
    """A window, and one entry of every complete group. Groups do not overlap."""

    def __init__(self, planes: LayerPlanes, progress: Progress) -> None:
        super().__init__(planes, progress)
        self.compress_rate = self._planes["entries"].plane.tokens

    @property
    def entry_count(self) -> dict[str, int]:
        """Entries by name, those of the running pass included."""
        entries = self._progress.length // self.compress_rate
        return {name: entries for name, plane in _ENTRIES.items() if plane in self._planes}

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Take what the pass projects, [B, S, D] each; give back the tokens of groups that are complete.

        Returns series and gate, [B, groups * rate, D], and the position of the first group. The rest
        waits in the arena.
        """
        step, rate = self._progress.step, self.compress_rate
        waiting = step.start % rate
        complete = (waiting + step.tokens) // rate * rate
        rows = torch.cat([kv, gate], dim=-1)
        if not complete:
            self._write(_TAIL[name], rows)
            return kv[:, :0], gate[:, :0], step.start - waiting
        rows = torch.cat([self._read(_TAIL[name], rows.dtype), rows], dim=1)
        self._write(_TAIL[name], rows[:, complete:])
        series, gates = rows[:, :complete].chunk(2, dim=-1)
        return series, gates, step.start - waiting

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Keep the entries that the pass completes, [B, groups, D]; give back all, [B, entries, D].

        Entries of parts are turned to where the part stands, in the copy that is given back.
        """
        step, rows = self._progress.step, self._planes[_ENTRIES[name]].rows
        entries = step.entries[self.compress_rate]
        assert compressed.shape[1] == entries.new.shape[1], (
            "a pass closes other groups than planned"
        )
        rows.index_copy_(0, entries.new.flatten(), compressed.flatten(0, 1).to(rows.dtype))
        found = rows.index_select(0, entries.all.flatten()).to(compressed.dtype)
        if entries.shifts is not None:
            found = self._progress.rope.turn_entries(found, entries.shifts.flatten())
        return found.view(step.requests, -1, rows.shape[1])


class CsaLayer(HcaLayer):
    """Short groups that overlap, chosen by an indexer that compresses its keys in the same way."""

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Swap the first series of the last complete group for that of this pass.

        Chunks are [B, groups, rate, 2 * D]. Returns series and gate of the group before the pass,
        [B, rate, D] each; None for both where there is none.
        """
        rows = torch.cat([chunk_kv[:, -1, :, :head_dim], chunk_gate[:, -1, :, :head_dim]], dim=-1)
        before = self._read(_OVERLAP[name], rows.dtype)
        self._write(_OVERLAP[name], rows)
        if not before.shape[1]:
            return None, None
        series, gate = before.chunk(2, dim=-1)
        return series, gate


def _ring(planes: PlaneRows) -> Ring:
    assert planes.ring is not None, "a paged plane has no ring"
    return planes.ring
