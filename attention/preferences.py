"""Which kernel is best for what: one table, and the situation that it is asked about."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kernels.base import AttentionShape, Phase

Compute = tuple[int, int]  # CUDA compute capability


@dataclass(frozen=True, slots=True)
class Situation:
    """What a server has to run, and on what."""

    shape: AttentionShape
    device: str  # torch device type
    compute: Compute | None = None  # None: not CUDA, or unknown: no kernel that has bounds runs
    row_dtype: torch.dtype | None = None  # of plain rows, where it is not the shape's

    @property
    def place(self) -> str:
        """The device in words."""
        return f"{self.device} {self.compute[0]}.{self.compute[1]}" if self.compute else self.device


@dataclass(frozen=True, slots=True)
class _Choice:
    name: str
    compute: tuple[Compute, Compute] | None = None  # meant for these, inclusive; None: for all

    def meant_for(self, compute: Compute | None) -> bool:
        if self.compute is None:
            return True
        return compute is not None and self.compute[0] <= compute <= self.compute[1]


_HOPPER = ((9, 0), (9, 0))
_AMPERE_ON = ((8, 0), (99, 9))
_FLASHMLA = _Choice("flashmla", _HOPPER)  # dense decode
_FLASHINFER = _Choice("flashinfer", _AMPERE_ON)
_FA3 = _Choice("fa3", _HOPPER)
_TILELANG = _Choice("tilelang", _AMPERE_ON)
_TRITON = _Choice("triton")
_TORCH = _Choice("torch")
_MLA_DECODE = (_FLASHMLA, _FLASHINFER, _FA3, _TILELANG, _TRITON, _TORCH)

# (device, MLA, phase): best first. What is not listed runs on PyTorch.
_PREFERENCES: dict[tuple[str, bool, Phase], tuple[_Choice, ...]] = {
    ("cuda", True, Phase.PREFILL): (_FLASHINFER, _FA3, _TORCH),
    ("cuda", True, Phase.DECODE): _MLA_DECODE,
    ("cuda", True, Phase.VERIFY): _MLA_DECODE,
    ("cuda", False, Phase.PREFILL): (_FA3, _FLASHINFER, _TORCH),
    ("cuda", False, Phase.DECODE): (_FA3, _FLASHINFER, _TRITON, _TORCH),
    ("cuda", False, Phase.VERIFY): (_FA3, _FLASHINFER, _TORCH),
}


def preferences(situation: Situation, phase: Phase) -> tuple[str, ...]:
    """Kernels that are meant for a device and a kind of model, best first."""
    key = (situation.device, situation.shape.latent, phase)
    found = _PREFERENCES.get(key, (_TORCH,))
    return tuple(choice.name for choice in found if choice.meant_for(situation.compute))
