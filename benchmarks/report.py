"""The frame of every benchmark: checks beside raw figures, hardware, versions and commit.

A benchmark collects checks, figures and tables in a :class:`Report` and ends with
``sys.exit(report.emit(as_json=..., save=...))``. With ``--json`` that prints one object, otherwise
tables for readers; the exit status is 0 exactly if every check holds. ``--save`` writes the same object
to ``benchmarks/results/NAME.json``, from which plots and the tables of README.md are made; quick runs
are never saved.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tessera_sglang import machine, tables

from . import saved

ROOT = Path(__file__).resolve().parents[1]
MADE_BY_BENCHMARKS = ("benchmarks/results", "README.md")  # written by a run, so never its cause
PACKAGES = ("tessera-sglang", "sglang", "torch", "numpy", "xxhash")


@dataclass(frozen=True, slots=True)
class Check:
    """One claim: what was measured, what it has to be, and whether it is."""

    name: str
    value: float | int | None  # None: could not be measured, which never holds
    target: str
    holds: bool

    @classmethod
    def at_least(cls, name: str, value: float | None, bound: float) -> Check:
        """``value >= bound``."""
        holds = value is not None and value >= bound
        return cls(name, _rounded(value), f">= {bound:g}", holds)

    @classmethod
    def at_most(cls, name: str, value: float | None, bound: float) -> Check:
        """``value <= bound``."""
        holds = value is not None and value <= bound
        return cls(name, _rounded(value), f"<= {bound:g}", holds)

    @classmethod
    def below(cls, name: str, value: float | None, bound: float) -> Check:
        """``value < bound``."""
        holds = value is not None and value < bound
        return cls(name, _rounded(value), f"< {bound:g}", holds)

    @classmethod
    def above(cls, name: str, value: float | None, bound: float) -> Check:
        """``value > bound``."""
        holds = value is not None and value > bound
        return cls(name, _rounded(value), f"> {bound:g}", holds)

    @classmethod
    def equals(cls, name: str, value: int | None, wanted: int) -> Check:
        """``value == wanted``."""
        return cls(name, value, f"== {wanted}", value == wanted)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for readers; the same figures are in ``Report.figures`` for programs."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]

    def render(self) -> str:
        """The table as aligned text."""
        rows = tuple(tuple(_cell(cell) for cell in row) for row in self.rows)
        return "\n".join([self.title, *tables.Table("", tuple(self.columns), rows).lines()])


@dataclass(slots=True)
class Report:
    """Everything one run of a benchmark found."""

    benchmark: str
    settings: Mapping[str, object] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader must know to judge the figures

    @property
    def holds(self) -> bool:
        """Whether there are checks and all of them hold."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints and ``--save`` writes: plain JSON."""
        return saved.plain_object(
            {
                "benchmark": self.benchmark,
                "holds": self.holds,
                "checks": [asdict(check) for check in self.checks],
                "figures": self.figures,
                "settings": dict(self.settings),
                "notes": self.notes,
                "hardware": machine.hardware(),
                "versions": machine.versions(*PACKAGES),
                "commit": commit(),
            }
        )

    def emit(self, *, as_json: bool, save: bool = False) -> int:
        """Print the report and save it; returns the exit status: 0 exactly if all checks hold."""
        if save:
            progress(f"saved: {saved.write(self.as_dict())}")
        if as_json:
            print(json.dumps(self.as_dict(), indent=1))
        else:
            print(self.render())
        return 0 if self.holds else 1

    def render(self) -> str:
        """The report for readers."""
        checks = Table(
            "checks",
            ("name", "value", "target", "holds"),
            [(c.name, c.value, c.target, "yes" if c.holds else "NO") for c in self.checks],
        )
        made_on = ", ".join(f"{key} {value}" for key, value in machine.hardware().items() if value)
        installed = ", ".join(
            f"{name} {number}" for name, number in machine.versions(*PACKAGES).items()
        )
        held = sum(check.holds for check in self.checks)
        return "\n\n".join(
            [
                f"{self.benchmark}, commit {commit()}\n{made_on}\n{installed}",
                *(table.render() for table in self.tables),
                *(f"Note: {note}" for note in self.notes),
                checks.render(),
                f"{held} of {len(self.checks)} checks hold",
            ]
        )


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Parser with the options that every benchmark has: ``--json``, ``--quick`` and ``--save``."""
    parser = _Parser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, less than a minute")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME.json")
    return parser


class _Parser(argparse.ArgumentParser):
    """Quick sizes measure something else, and must not stand where full ones are expected."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(*args, **kwargs)
        if found.quick and found.save:
            self.error("--quick runs are not saved")
        return found, rest


def progress(message: str) -> None:
    """Say on stderr what is being measured."""
    print(message, file=sys.stderr, flush=True)


def commit() -> str:
    """Commit of the checkout; ``unknown`` without git.

    ``-dirty`` where tracked files differ, other than those that benchmarks write themselves: else the
    first result that is saved would mark all others.
    """
    others = [f":(exclude){path}" for path in MADE_BY_BENCHMARKS]
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _rounded(value: float | None) -> float | None:
    """Four significant digits; None for what JSON can not say (a comparison with NaN never holds)."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
