"""A transformers ``Cache`` that is a view of the pool: requests of one length, for one or more passes.

It holds slots, pages and a length, and no tensors; a new one over the same three goes on where the last
stopped. Pass it as ``past_key_values``. Batches have no padding, so there is no attention mask to pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache

from tessera_sglang.memory_pool.models import HybridKind
from tessera_sglang.memory_pool.ring import Slots
from tessera_sglang.memory_pool.units import UnitIds

from .layers import CsaLayer, HcaLayer, Progress, WindowLayer
from .parts import Parts
from .step import plan
from .storage import LayerStorage

_LAYERS = {
    HybridKind.WINDOW: WindowLayer,
    HybridKind.HCA: HcaLayer,
    HybridKind.CSA: CsaLayer,
}


class PooledCache(Cache):  # type: ignore[misc] # untyped base
    """``past_key_values`` for a batch of requests that all have ``length`` tokens."""

    def __init__(
        self,
        storage: LayerStorage,
        slots: Slots,
        pages: UnitIds,
        length: int = 0,
        parts: Sequence[Parts] = (),
    ) -> None:
        """``slots`` is int64 [requests], ``pages`` int64 [requests, pages], in row order.

        ``parts`` are those that each request reads besides, counted in ``length``: as many pages in
        each request, or empty where none reads any. Pages must reach as far as the tokens that will
        come; those before ``length`` are only read, so they may be shared, but ``length`` must then be a
        whole number of pages.
        """
        assert len(slots) == len(pages) == len(np.unique(slots)), (
            "one slot and one row of pages each"
        )
        self.storage = storage
        self._slots, self._pages, self._parts = slots, pages, parts
        self._progress = Progress(length, storage.rope)
        self._next_layer = 0
        super().__init__(
            layers=[
                _LAYERS[kind](planes, self._progress)
                for kind, planes in zip(storage.model.kinds, storage.layers, strict=True)
            ]
        )

    @property
    def length(self) -> int:
        """Tokens that each request has, with those of a pass that began."""
        return self._progress.length

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The window branch of a layer; the first layer's call begins a pass.

        Raises ValueError for a batch of another size and for too few pages, ``StateMissing`` for a
        slot that was not restored, and RuntimeError where the pass before broke off between layers.
        """
        if layer_idx != self._next_layer:
            raise RuntimeError(
                f"layer {layer_idx} runs where layer {self._next_layer} is due: a forward pass broke "
                "off, and what its requests hold is not whole; close them"
            )
        if layer_idx == 0:
            self._begin(key_states.shape[0], key_states.shape[2])
        self._next_layer = (layer_idx + 1) % len(self.layers)
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return keys, values

    def _begin(self, requests: int, tokens: int) -> None:
        if requests != len(self._slots):
            raise ValueError(
                f"a batch of {requests} rows for a cache of {len(self._slots)} requests"
            )
        now = self._progress
        now.last_step = plan(
            self.storage, self._slots, self._pages, now.length, tokens, self._parts
        )
        now.length += tokens
