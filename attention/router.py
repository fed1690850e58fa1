"""Which kernel runs what: decided once per server, from what is installed, the device and the model.

Preferences stand in one table. `auto` takes the first kernel of its list that loads and does not refuse
the model; that a better one was meant for the device and could not run is a *fallback*, and every
forward pass that runs on one is counted. A kernel that is asked for by name runs what it has a kernel
for, or the server does not start. What nobody knows (a library that does not load, a GPU whose
generation can not be read, rows of another dtype) is refused, never tried.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .dispatches import Dispatches
from .kernels.base import Kernel, Phase
from .preferences import Compute, Situation, preferences
from .shelf import Offer, Shelf

logger = logging.getLogger(__name__)

AUTO = "auto"
Label = Literal["unavailable", "refused"]  # why a better kernel does not run; the value in metrics


class RouteError(RuntimeError):
    """No kernel can serve, or not the one that was asked for; says what to do."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel that was preferred and does not run."""

    name: str
    why: str
    label: Label | None  # None: it has no kernel for the phase, so nothing is lost


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What runs one phase, and why."""

    phase: Phase
    name: str
    kernel: Kernel
    reason: str
    rejected: tuple[Rejected, ...] = ()  # better kernels, best first

    @property
    def _passed_over(self) -> Rejected | None:
        return next((other for other in self.rejected if other.label is not None), None)

    @property
    def wanted(self) -> str:
        """The best kernel that is meant for this phase here."""
        return self.name if self._passed_over is None else self._passed_over.name

    @property
    def fallback(self) -> tuple[str, str, Label] | None:
        """``(wanted, got, reason)`` if a better kernel could not run."""
        other = self._passed_over
        if other is None or other.label is None:
            return None
        return other.name, self.name, other.label


def route(wanted: str, phase: Phase, situation: Situation, shelf: Shelf) -> Route:
    """Choose the kernel of one phase.

    Args:
        wanted: ``"auto"``, or the kernel that runs every phase it has a kernel for.
        phase: which.
        situation: model and device.
        shelf: what there is.

    Raises:
        RouteError: ``wanted`` can not run the model here, or nothing can.
    """
    note = ""
    if wanted != AUTO:
        kernel = require(wanted, situation.device, situation.compute, shelf)
        if _has(kernel, phase):
            refusal = _refusal(kernel, situation, phase)
            if refusal is not None:
                raise _unmet(wanted, f"it {refusal} ({situation.shape})", situation.place)
            return Route(phase, wanted, kernel, "asked for")
        note = f"; {wanted} was asked for and has no {phase.value} kernel"
    rejected: list[Rejected] = []
    for name in preferences(situation, phase):
        found = shelf.get(name)
        if isinstance(found, str):
            rejected.append(Rejected(name, f"unavailable: {found}", "unavailable"))
            continue
        refusal = _refusal(found, situation, phase)
        if refusal is None:
            reason = f"instead of {_listed(rejected)}" if rejected else "first choice"
            return Route(phase, name, found, reason + note, tuple(rejected))
        label: Label | None = "refused" if _has(found, phase) else None
        rejected.append(Rejected(name, refusal, label))
    raise RouteError(
        f"no kernel can run {phase.value} of this model on {situation.place} ({situation.shape}): "
        f"{_listed(rejected)}. Choose another --attention-backend"
    )


def require(wanted: str, device: str, compute: Compute | None, shelf: Shelf) -> Kernel:
    """The kernel that was asked for; what can be said of it before a model is known.

    Raises:
        RouteError: it is not there, or not made for this device.
    """
    found = shelf.get(wanted)
    place = f"{device} {compute[0]}.{compute[1]}" if compute else device
    if isinstance(found, str):
        raise _unmet(wanted, f"it is unavailable: {found}", place)
    refusal = found.capabilities.misplaced(device, compute)
    if refusal is not None:
        raise _unmet(wanted, f"it {refusal}", place)
    return found


def _unmet(wanted: str, found: str, place: str) -> RouteError:
    remedy = 'use "auto"' if wanted == "torch" else 'use "auto" or "torch"'
    return RouteError(
        f'TESSERA_CONFIG: kernel "{wanted}" can not serve on {place}: {found}; {remedy}'
    )


def _refusal(kernel: Kernel, situation: Situation, phase: Phase) -> str | None:
    able, device, compute = kernel.capabilities, situation.device, situation.compute
    refusal = able.refusal(situation.shape, phase, device, compute)
    row = situation.row_dtype
    if refusal is None and row is not None and not (able.name == "torch" and row in able.dtypes):
        return f"does not read {row} rows for {situation.shape.dtype} queries"  # PyTorch converts
    return refusal


def _has(kernel: Kernel, phase: Phase) -> bool:
    able = kernel.capabilities
    return phase in able.phases and (phase is Phase.DECODE or able.causal)


def _listed(rejected: Sequence[Rejected]) -> str:
    return "; ".join(f"{other.name} ({other.why})" for other in rejected)


class Router:
    """The table of a server: one route per phase, kernels shared between them."""

    def __init__(
        self,
        wanted: str,
        situation: Situation,
        offers: Sequence[Offer],
        phases: Sequence[Phase] = tuple(Phase),
    ) -> None:
        """Decide.

        Raises:
            RouteError: see `route`.
        """
        self._shelf = Shelf(offers)
        self.situation = situation
        self.routes = {phase: route(wanted, phase, situation, self._shelf) for phase in phases}
        self.dispatches = Dispatches()
        for phase, found in self.routes.items():
            self.dispatches.add(found.name, phase.value, 0, found.fallback)

    def kernel(self, phase: Phase) -> Kernel:
        """What runs a phase."""
        return self.routes[phase].kernel

    def refusal(self, name: str, phase: Phase) -> str | None:
        """Why a kernel could not run a phase here, whether or not it is the one that does."""
        found = self._shelf.get(name)
        return found if isinstance(found, str) else _refusal(found, self.situation, phase)

    def log(self) -> None:
        """One line per phase, a warning where it is a fallback."""
        for phase, found in self.routes.items():
            level = logging.INFO if found.fallback is None else logging.WARNING
            logger.log(
                level,
                "attention kernel for %s on %s: %s (%s); %s",
                phase.value,
                self.situation.place,
                found.name,
                found.reason,
                self.situation.shape,
            )

    def count(self, phase: Phase, launches: int = 1) -> None:
        """Once per forward pass: how often a layer of it launched the phase's kernel."""
        found = self.routes[phase]
        self.dispatches.add(found.name, phase.value, launches, found.fallback)

    def count_named(self, name: str, phase: Phase, launches: int = 1) -> None:
        """A pass that another kernel ran, such as ``sglang:fa3``."""
        self.dispatches.add(name, phase.value, launches)
