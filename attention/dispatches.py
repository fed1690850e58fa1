"""What ran: plain counters that a forward pass can afford, read by the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

Fallback = tuple[str, str, str]  # the kernel that was wanted, the one that ran, why


@dataclass(slots=True)
class Dispatches:
    """Only grow.

    A launch is one of a layer: a pass without spans has one, spans add some. A pass that one of
    SGLang's backends runs counts as one. Fallbacks are counted in passes. What could happen is there
    from the start, with 0.
    """

    launches: dict[tuple[str, str], int] = field(default_factory=dict)  # by kernel and phase
    fallbacks: dict[Fallback, int] = field(default_factory=dict)

    def add(self, kernel: str, phase: str, launches: int, fallback: Fallback | None = None) -> None:
        """Count a pass of ``launches`` launches. With 0 it only says that it could happen."""
        key = (kernel, phase)
        self.launches[key] = self.launches.get(key, 0) + launches
        if fallback is not None:
            self.fallbacks[fallback] = self.fallbacks.get(fallback, 0) + bool(launches)
