"""Kernels that may be there: loaded when they are asked for, once, whatever their libraries do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .kernels.base import Kernel, KernelUnavailableError


@dataclass(frozen=True, slots=True)
class Offer:
    """A kernel that may be there. ``load`` raises KernelUnavailableError if it is not."""

    name: str
    load: Callable[[], Kernel]


class Shelf:
    """Kernels by name, each loaded when first asked for, once."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = {offer.name: offer for offer in offers}
        self._found: dict[str, Kernel | str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What is on offer."""
        return tuple(self._offers)

    def get(self, name: str) -> Kernel | str:
        """The kernel, or why there is none."""
        if name not in self._found:
            self._found[name] = self._load(name)
        return self._found[name]

    def _load(self, name: str) -> Kernel | str:
        offer = self._offers.get(name)
        if offer is None:
            return "this version has no adapter for it"
        try:
            return offer.load()
        except KernelUnavailableError as error:
            return _one_line(str(error))
        except Exception as error:  # a broken library raises what it likes while it is imported
            return _one_line(f"{type(error).__name__}: {error}")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
