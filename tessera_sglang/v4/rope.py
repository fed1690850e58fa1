"""Rows turned to another position.

A row of a window, and an entry of a group, carries the rotation of its position p in its last channels:
R(p)c. Rotations add, so R(s)R(p)c is the row at p + s. Key and value are one row in DeepSeek-V4, and
the model turns an attention output back by its query's position: what is turned as a row is right as
both.

Windows of layers without compression turn by the frequencies that transformers calls ``main``, all other
rows by ``compress``.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from tessera_sglang.memory_pool.models import HybridKind

TABLES = ("default", "yarn", "linear", "llama3")
"""Kinds of rotary tables that depend on the position alone, so that rotations add."""


class Rope:
    """The frequencies of one model."""

    def __init__(self, config: Any) -> None:
        """``config`` is a ``DeepseekV4Config``."""
        table = DeepseekV4RotaryEmbedding(config)
        self.kinds: dict[str, str] = dict(table.rope_type)
        self._main = table.main_inv_freq.double()
        self._compress = table.compress_inv_freq.double()

    def refuse_unknown(self) -> None:
        """ValueError for a table in which a rotation depends on more than the position."""
        unknown = {name: kind for name, kind in self.kinds.items() if kind not in TABLES}
        if unknown:
            raise ValueError(
                f"shared parts need rotary tables of a kind in {list(TABLES)}, found {unknown}"
            )

    def turn_window(self, rows: torch.Tensor, shift: int, kind: HybridKind) -> torch.Tensor:
        """Rows of a window, [n, channels], ``shift`` tokens on; negative for back."""
        frequencies = self._main if kind is HybridKind.WINDOW else self._compress
        return _turn(rows, torch.full((len(rows),), shift), frequencies)

    def turn_entries(self, rows: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Entries or indexer keys, [n, channels], each by its own number of tokens, int64 [n]."""
        return _turn(rows, shifts, self._compress)


def _turn(rows: torch.Tensor, shifts: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbouring channels at the end of a row, by shift times frequency."""
    angles = shifts[:, None].double() * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    width = 2 * len(frequencies)
    even, odd = rows[:, -width::2].float(), rows[:, 1 - width :: 2].float()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(1)
    return torch.cat([rows[:, :-width], turned.to(rows.dtype)], dim=1)
