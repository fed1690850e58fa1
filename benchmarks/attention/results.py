"""Lines of the tables, and what things are called in them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks.report import Table
from tessera_sglang.attention.kernels.base import AttentionShape


def model_name(shape: AttentionShape) -> str:
    """What the shape is of."""
    if shape.latent:
        return f"MLA {shape.query_heads} heads"
    return f"GQA {shape.query_heads}/{shape.kv_heads} heads"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Lines:
    """A table that grows: what was computed, by which way, in what time."""

    title: str
    ratio: str
    rows: list[tuple[object, ...]] = field(default_factory=list)

    def add(
        self, case: str, way: str, seconds: float, ratio: float | None = None, mark: str = ""
    ) -> None:
        """One way of one case."""
        self.rows.append((case, way, seconds * 1e3, ratio, mark))

    def table(self) -> Table:
        """For the report."""
        return Table(self.title, ("case", "way", "ms", self.ratio, ""), self.rows)
