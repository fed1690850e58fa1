"""What admission counts, what it leaves out, and how it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Config = Mapping[str, Any]
"""A Hugging Face configuration as a plain mapping."""

PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Weights that are what they say: their values can be compared."""


class AdmissionError(RuntimeError):
    """The loaded model is not what its configuration says; names the tensor, wanted and found."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What this rank makes of the model, beside what the configuration says."""

    ranks: int  # tensor-parallel ranks that share the heads out
    cache_dtype: torch.dtype | None  # of the KV pool to come; None: SGLang's kernels read it
    pool_row: tuple[int, ...]  # MLA: latent, rope; else KV heads per rank, key, value
    values: bool = True  # False while weights are placeholders


class Checks:
    """Counts what was looked at, and keeps what could not be."""

    def __init__(self) -> None:
        self.tensors = 0
        self.tried: list[str] = []  # what was compared by value
        self.left_out: list[str] = []

    def leave_out(self, what: str) -> None:
        """Say once that something was not checked."""
        if what not in self.left_out:
            self.left_out.append(what)

    def note(self, what: str) -> None:
        """Say once that something was compared by value."""
        if what not in self.tried:
            self.tried.append(what)

    def weight(self, path: str, module: Any, wanted: Sequence[int], rows: str) -> None:
        """The shape of ``module.weight``; ``rows`` says what the rows mean.

        Quantised weights may lie transposed; packed ones have no shape of their own.
        """
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or getattr(module, "use_intel_amx_backend", False):
            self.leave_out("packed weights")
            return
        found = tuple(weight.shape)
        fits = [tuple(wanted)]
        if weight.dtype not in PLAIN:
            if weight.dtype.itemsize > 1 or not weight.dtype.is_floating_point:
                self.leave_out(f"packed {weight.dtype} weights")
                return
            fits.append(tuple(reversed(wanted)))
            self.leave_out(f"values of quantised {weight.dtype} weights")
        if found not in fits:
            raise AdmissionError(
                f"{path}.weight: wanted {list(wanted)}, {rows}; found {list(found)}"
            )
        self.tensors += 1

    def bias(self, path: str, module: Any, config: Config) -> None:
        """A bias that the configuration promises: SGLang drops one that its model does not have."""
        if config.get("attention_bias") and getattr(module, "bias", None) is None:
            raise AdmissionError(
                f"{path}.bias: wanted one, as config attention_bias says; found none"
            )

    def tensor(self, path: str, tensor: Any, wanted: Sequence[int], meaning: str) -> None:
        """The shape of a tensor that is no layer's weight."""
        found = list(tensor.shape)
        if found != list(wanted):
            raise AdmissionError(f"{path}: wanted {list(wanted)}, {meaning}; found {found}")
        self.tensors += 1

    def equal(self, path: str, wanted: Any, found: Any, meaning: str) -> None:
        """A number or a name."""
        if wanted != found:
            raise AdmissionError(f"{path}: wanted {wanted}, {meaning}; found {found}")

    def close(self, path: str, wanted: float, found: float, meaning: str) -> None:
        """A scale, to a ten-thousandth."""
        if not abs(wanted - found) <= 1e-4 * abs(wanted):
            raise AdmissionError(f"{path}: wanted {wanted:.6g}, {meaning}; found {found:.6g}")


def is_plain(*modules: Any) -> bool:
    """Whether all weights are there and plain floating point."""
    weights = [getattr(module, "weight", None) for module in modules]
    return all(isinstance(w, torch.Tensor) and w.dtype in PLAIN for w in weights) and not any(
        getattr(module, "use_intel_amx_backend", False) for module in modules
    )


def share_of(config: Config, field: str, heads: int, ranks: int) -> int:
    """Heads of one rank, or AdmissionError where they can not be dealt out."""
    if heads % ranks:
        raise AdmissionError(
            f"config {field}: wanted a multiple of the {ranks} tensor-parallel ranks; found {heads}"
        )
    return heads // ranks
