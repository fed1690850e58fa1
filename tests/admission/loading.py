"""A model that SGLang has loaded, and ways to spoil it. Fixtures that load are in `conftest`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import nn

admission = pytest.importorskip("tessera_sglang.admission", exc_type=ImportError)

ATTENTION = "model.layers.1.self_attn"
"""Where `spoiled` spoils."""


@dataclass(frozen=True)
class Loaded:
    """A model, and what its server would say of it."""

    model: Any
    config: dict[str, Any]
    deployment: Any

    def admit(self) -> Any:
        """Look through it."""
        return admission.admit(self.model, self.config, self.deployment)

    def layer(self, number: int = 1) -> Any:
        """Self-attention of one layer."""
        return self.model.model.layers[number].self_attn


def spoiled(loaded: Loaded, spoil: Callable[[Any], None] | None = None, **changes: Any) -> Loaded:
    """One thing made wrong: in a layer, in the configuration, or in the deployment."""
    if spoil is not None:
        spoil(loaded.layer())
    parts = ("ranks", "cache_dtype", "pool_row")
    fields = {name: changes.pop(name) for name in parts if name in changes}
    return replace(
        loaded,
        config={**loaded.config, **changes},
        deployment=replace(loaded.deployment, **fields),
    )


def refusal(loaded: Loaded) -> str:
    """Why a model is not admitted."""
    with pytest.raises(admission.AdmissionError) as raised:
        loaded.admit()
    return str(raised.value)


def rows(name: str, count: int) -> Callable[[Any], None]:
    """A projection with another number of rows."""

    def spoil(layer: Any) -> None:
        weight = getattr(layer, name).weight
        getattr(layer, name).weight = nn.Parameter(weight.new_zeros((count, *weight.shape[1:])))

    return spoil
