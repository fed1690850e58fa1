"""The same requests on both sides, in turns, each time on an empty cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_sglang.bench.agents import Request
from tessera_sglang.bench.rounds import Opener, in_turns
from tessera_sglang.bench.sides import STOCK, TESSERA, running

from .run import Run, run
from .servers import SIDES, Urls

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass(frozen=True, slots=True)
class Comparison:
    """All counted rounds. Figures are fields and properties of `Run`, by name."""

    stock: tuple[Run, ...]
    tessera: tuple[Run, ...]

    def runs(self, side: str) -> tuple[Run, ...]:
        """The rounds of one side."""
        return self.stock if side == STOCK else self.tessera

    def median(self, side: str, figure: str) -> float:
        """Over the rounds of a side."""
        return float(statistics.median(getattr(one, figure) for one in self.runs(side)))

    def ratio(self, figure: str) -> float | None:
        """Tessera's median by stock's; None where stock's is 0."""
        stock = self.median(STOCK, figure)
        return self.median(TESSERA, figure) / stock if stock else None

    def spread(self, side: str, figure: str) -> float:
        """Largest by smallest round, less 1."""
        values = [getattr(one, figure) for one in self.runs(side)]
        return max(values) / min(values) - 1 if min(values) else 0.0


def compare(
    urls: Urls,
    model: Path,
    requests: Callable[[int], Sequence[Request]],
    *,
    rounds: int,
    bar: tqdm[Any],
    label: str = "",
    arguments: Sequence[str] = (),
    warm_up: bool = True,
    seed: int = 1,
) -> Comparison:
    """Medians need several rounds; each has its own seed, and both sides get what it makes.

    Without ``warm_up`` the first round counts: for servers that have worked already.
    """

    def once(side: str, url: str, number: int) -> Run:
        what = "warm-up" if number < 0 else f"round {number + 1} of {rounds}"
        bar.set_description(f"{label or 'requests'}: {side}, {what}")
        made = seed + number
        measured = run(url, side, model, requests(made), seed=made, arguments=arguments)
        bar.update()
        return measured

    sides: dict[str, Opener] = {side: partial(running, urls[side]) for side in SIDES}
    found = in_turns(sides, rounds, once, warm_up=warm_up)
    return Comparison(tuple(found[STOCK]), tuple(found[TESSERA]))


def runs(rounds: int, *, warm_up: bool = True) -> int:
    """How often `compare` moves its bar."""
    return len(SIDES) * (rounds + warm_up)
