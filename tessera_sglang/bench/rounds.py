"""Who is asked when: rounds in turns, every side with the same requests.

The side that begins changes from round to round, so that neither always finds the machine as the other
left it. The first round warms up and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, TypeVar

WARM_UP = -1  # number of the round that is not counted

T = TypeVar("T")


class Reachable(Protocol):
    """A server that answers at ``url``."""

    @property
    def url(self) -> str: ...


Opener = Callable[[], AbstractContextManager[Reachable]]
Run = Callable[[str, str, int], T]  # (side, url, number of the round) -> what was measured


def in_turns(
    sides: Mapping[str, Opener],
    rounds: int,
    run: Run[T],
    *,
    one_by_one: bool = False,
    warm_up: bool = True,
) -> dict[str, list[T]]:
    """What ``run`` measured in ``rounds`` rounds of each side.

    All servers run at once, unless ``one_by_one``: then a side has all of its rounds before the next one
    is started, for machines that can not hold two. Without ``warm_up`` every round counts.
    """
    found: dict[str, list[T]] = {side: [] for side in sides}
    groups = [[side] for side in sides] if one_by_one else [list(sides)]
    for group in groups:
        with ExitStack() as stack:
            urls = {side: stack.enter_context(sides[side]()).url for side in group}
            for number, side in _order(group, range(WARM_UP if warm_up else 0, rounds)):
                measured = run(side, urls[side], number)
                if number != WARM_UP:
                    found[side].append(measured)
    return found


def _order(sides: Sequence[str], numbers: Iterable[int]) -> Iterator[tuple[int, str]]:
    for number in numbers:
        for side in sides if number % 2 else reversed(sides):
            yield number, side


def runs(sides: int, rounds: int) -> int:
    """How often ``run`` is called, the warm-up included."""
    return sides * (rounds + 1)
