"""A needle at length, read by a kernel instead of by PyTorch; see `benchmarks.needle`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks import needle
from benchmarks.attention.world import PAGE, mla
from benchmarks.report import Report, progress
from tessera_sglang.attention.kernels.base import Kernel, Phase, Work

from .budget import Budget
from .kernels import refusal

KEYS, HEADS = 131_072, 16


@dataclass(slots=True)
class Needles:
    """What the needle showed, kernel by kernel."""

    device: str
    small: bool
    found: dict[str, list[needle.Finding]] = field(default_factory=dict)

    @property
    def keys(self) -> int:
        """Length of the context."""
        return 8192 if self.small else KEYS

    def measure(self, kernels: Mapping[str, Kernel | str], budget: Budget) -> None:
        """Every kernel that reads MLA rows."""
        heads = 4 if self.small else HEADS
        where = needle.depths(self.keys)[:: 5 if self.small else 1]
        rows = needle.haystack(self.keys, torch.device(self.device))
        for name, kernel in kernels.items():
            if isinstance(kernel, str):
                continue
            if refusal(kernel, mla(heads, torch.bfloat16), Phase.DECODE, self.device) is not None:
                continue
            what = f"needle of {self.keys:,} keys by {name}"
            if budget.allows(what):
                progress(f"{what} ({budget.spent_s:.0f} s)")
                self.found[name] = list(needle.measure(reader(kernel, heads), rows, heads, where))

    def finish(self, report: Report) -> None:
        """Add what was found."""
        for name, findings in self.found.items():
            one, title = needle.report(findings, {}), f"needle of {self.keys:,} keys by {name}"
            report.figures[title] = [asdict(finding) for finding in findings]
            report.checks += [replace(c, name=f"{title}, {c.name}") for c in one.checks]
            report.tables += [replace(t, title=f"{title}: {t.title}") for t in one.tables]


def reader(kernel: Kernel, heads: int) -> needle.Attend:
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
