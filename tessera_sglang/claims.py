"""Claims about measured values, and whether they hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, the value measured for it, and whether it holds."""

    name: str
    value: float
    target: str
    holds: bool

    def line(self) -> str:
        """For readers."""
        verdict = "holds " if self.holds else "FAILED"
        return f"{verdict}  {self.name}: {self.value:.4g} (claimed: {self.target})"


def at_least(name: str, value: float, target: float) -> Check:
    """``value >= target``."""
    return Check(name, value, f">= {target:g}", value >= target)


def at_most(name: str, value: float, target: float) -> Check:
    """``value <= target``."""
    return Check(name, value, f"<= {target:g}", value <= target)


def within(name: str, value: float, target: float, slack: float) -> Check:
    """``value`` differs from ``target`` by at most the share ``slack`` of it."""
    return Check(name, value, f"{target:g} ± {slack:.0%}", abs(value / target - 1) <= slack)
