"""Admission: a loaded model against its geometry, before a page is allocated.

A cache that is laid out for other rows than the model writes, or read with another rotation, does not
crash: it answers wrongly. So every projection's shape and partition, the order of fused rows, the norm
of the latent, rotary pairing, theta and scaling, the softmax scale and the dtype of the cache are
compared with what the model's configuration means, by formulas of our own. The first thing that does
not fit raises :class:`AdmissionError` with the tensor's name. What is not recognised is not refused;
the log line says that it was left out.

:mod:`seam` is where SGLang calls; :func:`admit` needs no running server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tessera_sglang.compat import RadixAttention
from tessera_sglang.memory_pool.model_geometry import ModelConfigError, read_model
from tessera_sglang.memory_pool.models import GroupedModel, MlaModel

from .checks import AdmissionError, Checks, Config, Deployment
from .grouped import check_grouped
from .latent import check_latent, is_latent

__all__ = ["CACHE_DTYPES", "Admission", "AdmissionError", "Config", "Deployment", "admit"]

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels read; SGLang's own kernels may read more."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What was looked at. ``str`` is the line that a server logs."""

    tensors: int
    layers: int
    geometry: str
    tried: tuple[str, ...]  # compared by value
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        parts = [self.geometry]
        if self.tried:
            parts.append("compared by value: " + ", ".join(self.tried))
        if self.left_out:
            parts.append("not checked: " + ", ".join(self.left_out))
        return (
            f"admission: {self.tensors} tensors of {self.layers} layers fit the geometry "
            f"({'; '.join(parts)})"
        )


def admit(model: Any, config: Config, deployment: Deployment, *, whole: bool = True) -> Admission:
    """Look through a loaded model. Raises :class:`AdmissionError`.

    ``config`` is the text model's, as it was before SGLang built the model; ``whole`` is False for
    a pipeline stage, which has some of the layers.
    """
    checks = Checks()
    found: dict[str, None] = {}  # descriptions, in order
    layers = 0
    known = _known(checks, config)
    _check_dtype(deployment)
    for path, module in model.named_modules():
        if is_latent(module):
            found[str(check_latent(checks, path, module, config, deployment))] = None
            layers += 1
            continue
        paged = [layer for layer in module.children() if isinstance(layer, RadixAttention)]
        if isinstance(known, GroupedModel) and len(paged) == 1:
            w = check_grouped(checks, path, module, paged[0], config, known, deployment)
            found[str(w)] = None
            layers += 1
        elif paged:
            checks.leave_out(f"{type(module).__name__}, which is not known")
    expected = len(known.windows) if isinstance(known, GroupedModel) else None
    expected = known.layers if isinstance(known, MlaModel) else expected
    if expected is not None and whole:
        checks.equal("num_hidden_layers", expected, layers, "layers that cache")
    if deployment.cache_dtype is not None and found:
        found[str(deployment.cache_dtype).removeprefix("torch.") + " cache"] = None
    return Admission(
        tensors=checks.tensors,
        layers=layers,
        geometry=", ".join(found) or "no layer that is known",
        tried=tuple(checks.tried),
        left_out=tuple(checks.left_out),
    )


def _known(checks: Checks, config: Config) -> Any:
    """The model in the ledger of geometries, None where it is not listed."""
    try:
        return read_model(config, "the model")
    except (ModelConfigError, ValueError):
        checks.leave_out(
            f"architecture {config.get('model_type')!r}, which the ledger does not know"
        )
        return None


def _check_dtype(deployment: Deployment) -> None:
    dtype = deployment.cache_dtype
    if dtype is not None and dtype not in CACHE_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in CACHE_DTYPES)
        raise AdmissionError(
            f"the KV pool's dtype: wanted one of {names}; found {str(dtype).removeprefix('torch.')}"
        )
