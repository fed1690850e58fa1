"""Kernels on a GPU: answers against the oracle, precision at length, and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.report import Report, argument_parser, progress
from tessera_sglang.attention.kernels.base import Kernel
from tessera_sglang.attention.shelf import Shelf

from .answers import Answers
from .budget import Budget
from .kernels import offers, versions
from .precision import Needles
from .speed import Speed
from .timing import BUSY_CYCLES, FLUSHED_BYTES

NOT_MEASURED = "GPU: not measured (no CUDA device here); these are the parts that run on a CPU"
COMPILING = frozenset({"flashinfer", "tilelang"})  # with nvcc, for minutes: they come last
Kernels = Mapping[str, Kernel | str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; the exit status is 0 if all checks hold."""
    options = argument_parser(__doc__ or "").parse_args(arguments)
    budget = Budget()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # many small steps: more threads wait for each other
    shelf = Shelf(offers())
    # Nothing but PyTorch runs on a CPU here, and some libraries take long to say so.
    names = shelf.names if device == "cuda" else ("torch",)
    kernels = {name: shelf.get(name) for name in names}
    report = measure(kernels, device, budget, quick=options.quick)
    status = report.emit(as_json=options.json, save=options.save)
    if device == "cpu":
        progress(NOT_MEASURED)
    return status


@torch.no_grad()
def measure(kernels: Kernels, device: str, budget: Budget, *, quick: bool = False) -> Report:
    """Everything that the device and the budget allow.

    Args:
        kernels: by name; a text says why one is not there.
        device: ``"cuda"`` or ``"cpu"``.
        budget: seconds.
        quick: answers alone, and fewer needles.
    """
    report = Report("gpu", {"device": device, "quick": quick})
    report.figures["libraries"] = versions()
    report.figures["kernels"] = {
        name: found if isinstance(found, str) else "loaded" for name, found in kernels.items()
    }
    timed = device == "cuda" and not quick
    report.figures["gpu_measured"] = timed
    answers, needles, timings = Answers(device), Needles(device, quick or device == "cpu"), Speed()
    for compiling in (False, True):
        some = {name: found for name, found in kernels.items() if (name in COMPILING) == compiling}
        if not some:
            continue
        sections = {"answers": answers.measure, "needle": needles.measure}
        if timed:
            sections["speed"] = timings.measure
        for name, section in sections.items():
            what = f"{name} of {', '.join(some)}"
            if budget.allows(what):
                with budget.guarding(what):
                    section(some, budget)
    answers.finish(report)
    needles.finish(report)
    if timed:
        timings.finish(report)
    report.notes += _notes(device, timed, budget)
    report.figures["skipped"] = budget.skipped
    report.figures["seconds"] = round(budget.spent_s, 1)
    return report


def _notes(device: str, timed: bool, budget: Budget) -> list[str]:
    notes = []
    if device == "cpu":
        notes.append(NOT_MEASURED)
    if timed:
        notes.append(
            "µs: GPU time of a layer, median; the L2 cache is overwritten before each call "
            f"({FLUSHED_BYTES >> 20} MiB), the host is ahead ({BUSY_CYCLES:,} cycles). Graph: captured "
            "and replayed. By flat: by FlashMLA's own call on flat contexts as long, or, where it "
            "can not run, by the fastest flat layer. Bytes: keys once for each part that reads them."
        )
    if budget.skipped:
        notes.append(f"Out of time, skipped: {', '.join(budget.skipped)}.")
    return notes
