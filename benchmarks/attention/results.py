"""Lines of the tables, and what things are called in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import Table
from tessera_sglang.attention.kernels.base import AttentionShape

# What two ways to compute the same thing may differ by; inputs are N(0, 1).
SAME = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def model_name(shape: AttentionShape) -> str:
    """What the shape is of."""
    if shape.latent:
        return f"MLA {shape.query_heads} heads"
    return f"GQA {shape.query_heads}/{shape.kv_heads} heads"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def largest_difference(wanted: Tensor, found: Iterable[Tensor]) -> float:
    """Largest |difference| / (1 + |wanted|) of any of ``found``; NaN if any holds one."""
    wanted = wanted.float()
    return float(
        np.max([float(((f.float() - wanted).abs() / (1 + wanted.abs())).max()) for f in found])
    )


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
