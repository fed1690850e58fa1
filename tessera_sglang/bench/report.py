"""What was measured, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tessera_sglang import machine, tables
from tessera_sglang.claims import Check
from tessera_sglang.tables import Table

from .client import CLIENT
from .sides import STOCK, TESSERA
from .summary import CACHED, FIGURES, Figure, Side, gain, only

_PACKAGES = ("tessera-sglang", "sglang", "torch")


@dataclass(frozen=True, slots=True)
class Report:
    """One command's measurements. With two sides there is a gain."""

    workload: str
    sides: tuple[Side, ...]
    settings: dict[str, object]
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = field(default=())

    @property
    def holds(self) -> bool:
        """Whether every claim that was asked for holds."""
        return all(check.holds for check in self.checks)

    def gain(self, figure: Figure) -> float | None:
        """Tessera by stock, above 1 where Tessera is better."""
        if len(self.sides) < 2:
            return None
        return gain(only(self.sides, STOCK), only(self.sides, TESSERA), figure)

    def as_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints. Times are seconds, shares of 1."""
        return {
            "command": "bench",
            "ok": self.holds,
            "client": CLIENT,
            "workload": self.workload,
            "settings": self.settings,
            "sides": {
                side.name: {
                    "median": {figure.name: side.median(figure) for figure in FIGURES},
                    "spread": {figure.name: side.spread(figure) for figure in FIGURES},
                    "rounds": [dataclasses.asdict(one) for one in side.rounds],
                }
                for side in self.sides
            },
            "gain": {figure.name: self.gain(figure) for figure in FIGURES},
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "notes": list(self.notes),
            "hardware": machine.hardware(),
            "versions": machine.versions(*_PACKAGES),
        }

    def emit(self, *, as_json: bool) -> int:
        """Print; 0 where all claims hold, else 1."""
        if as_json:
            print(json.dumps(self.as_dict(), indent=2))
        else:
            tables.show(table(self))
            for note in self.notes:
                print(note)
            for check in self.checks:
                print(check.line())
        return 0 if self.holds else 1


def table(report: Report) -> Table:
    """A row of medians for each side, one of spreads below, and the gain."""
    header = ("", *(figure.heading for figure in FIGURES))
    rows = [row for side in report.sides for row in _rows(side)]
    if len(report.sides) > 1:
        rows.append(("gain", *(_times(report.gain(figure)) for figure in FIGURES)))
    each = len(rows) // len(report.sides)
    sections = frozenset(range(each - 1, len(rows) - 1, each))
    return Table(report.workload, header, tuple(rows), sections=sections)


def _rows(side: Side) -> Iterator[tuple[str, ...]]:
    yield (side.name, *(_cell(figure, side.median(figure)) for figure in FIGURES))
    if len(side.rounds) > 1:
        yield ("  spread", *(_spread(figure, side) for figure in FIGURES))


def _cell(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure is CACHED:
        return f"{value:.1%}"
    if figure.name.endswith("_s") and not figure.more_is_better:
        return f"{value:,.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
    return f"{value:,.0f}"


def _spread(figure: Figure, side: Side) -> str:
    share = None if figure is CACHED else side.spread(figure)
    return "" if share is None else f"{share:.0%}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
