"""Markdown of tables and of what stands under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.saved import Saved

MISSING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_SHOWN_FAILURES = 3
_COMMIT_DIGITS = 7


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column starts left, numbers end right."""
    rules = ["---", *("---:" for _ in columns[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rules, *rows))


def under(result: Saved) -> str:
    """How the figures came about, in one paragraph."""
    made_on = ", ".join(_hardware(result.hardware))
    commit, *dirty = result.commit.split("-")
    state = " with changes" if dirty else ""
    return (
        f"`python -m benchmarks.{result.benchmark}` at {commit[:_COMMIT_DIGITS]}{state}, {made_on}, "
        f"SGLang {result.versions.get('sglang', 'absent')}. {_checks(result)}"
    )


def _hardware(hardware: Mapping[str, Any]) -> Sequence[str]:
    gpu = hardware.get("gpu")
    return (
        str(hardware["cpu"]),
        f"{hardware['cores']} cores",
        f"GPU {gpu}" if gpu else "no GPU",
    )


def _checks(result: Saved) -> str:
    if not result.checks:
        return "It checks nothing."
    failed = [str(check["name"]) for check in result.failed]
    if not failed:
        count = len(result.checks)
        return f"All {count} checks of the command held." if count > 1 else "Its check held."
    named = "; ".join(f"*{name}*" for name in failed[:_SHOWN_FAILURES])
    more = f" and {len(failed) - _SHOWN_FAILURES} more" if len(failed) > _SHOWN_FAILURES else ""
    return f"{len(failed)} of its {len(result.checks)} checks did not hold: {named}{more}."


def count(value: float) -> str:
    """``12,345``"""
    return f"{value:,.0f}"


def share(value: float | None) -> str:
    """``12.3 %``"""
    return MISSING if value is None else f"{value:.1%}".replace("%", " %")


def ratio(value: float | None) -> str:
    """Two or three digits: ``0.97``, ``12.3``, ``123``; a dash for None."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """``1.23 s`` or ``12.3 ms``."""
    if value is None:
        return MISSING
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
