"""Saved results: one JSON file for each benchmark, ``benchmarks/results/NAME.json``.

Written by ``python -m benchmarks.NAME --save``; read by ``benchmarks.plots`` and ``benchmarks.readme``.
A file holds what ``--json`` prints: checks, figures, settings, hardware, versions, commit. Floats keep
six significant digits: no measurement here has more, and a new run differs in fewer lines.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Saved:
    """A report that was saved. ``figures`` are as each benchmark describes them."""

    benchmark: str
    checks: tuple[Mapping[str, Any], ...]
    figures: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str

    @property
    def failed(self) -> tuple[Mapping[str, Any], ...]:
        """The checks that did not hold."""
        return tuple(check for check in self.checks if not check["holds"])


def write(report: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Write a report's object under its benchmark's name, whole or not at all."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['benchmark']}.json"
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(rounded(report), indent=1, allow_nan=False) + "\n", "utf-8")
    scratch.replace(path)
    return path


def read(name: str, folder: Path | None = None) -> Saved | None:
    """The saved report of that benchmark; None where there is none."""
    path = (folder or RESULTS) / f"{name}.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text("utf-8"))
    return Saved(
        benchmark=found["benchmark"],
        checks=tuple(found["checks"]),
        figures=found["figures"],
        settings=found["settings"],
        notes=tuple(found["notes"]),
        hardware=found["hardware"],
        versions=found["versions"],
        commit=found["commit"],
    )


def plain_object(report: Mapping[str, Any]) -> dict[str, Any]:
    """``report`` as JSON can say it. What is not finite becomes None."""
    return {str(key): _plain(value) for key, value in report.items()}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(one) for one in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _plain(value.tolist())
    return str(value)


def rounded(value: Any) -> Any:
    """Plain JSON with floats of six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return value
