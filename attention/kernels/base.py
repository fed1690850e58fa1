"""What a kernel is: one call per part, and a record of what it can do.

A *part* is a contiguous run of query rows against one run of keys. Kernels return what `merge`
needs and decide nothing else: which parts exist is the plan's business, which kernel runs them
the router's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel can run, as the router reads it. ``None`` means no limit."""

    name: str
    devices: frozenset[str]  # torch device types
    dtypes: frozenset[torch.dtype]  # of the KV buffers
    page_sizes: frozenset[int] | None  # tokens
    max_qk_dim: int | None  # channels of a key
    max_v_dim: int | None  # channels of a value
    causal: bool  # takes causal_from; otherwise only full visibility
    lse_base: Literal["e", "2"]  # of the library underneath; `attend` always returns base e
    graph_safe: bool  # may be captured in a CUDA graph and replayed over other lengths

    def runs_on(self, device: torch.device) -> bool:
        """Whether tensors on ``device`` can be passed."""
        return device.type in self.devices

    def takes(self, dtype: torch.dtype, qk_dim: int, v_dim: int) -> bool:
        """Whether KV buffers of this dtype and these widths can be read."""
        return (
            dtype in self.dtypes
            and (self.max_qk_dim is None or qk_dim <= self.max_qk_dim)
            and (self.max_v_dim is None or v_dim <= self.max_v_dim)
        )


class Kernel(Protocol):
    """Attention of one part over paged KV."""

    @property
    def capabilities(self) -> Capabilities:
        """What this kernel can run."""
        ...

    def attend(
        self,
        q: Tensor,
        key_buffer: Tensor,
        value_buffer: Tensor,
        slots: Tensor,
        *,
        scale: float,
        causal_from: int | None,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the keys in ``slots``, in that order.

        Args:
            q: ``[T, H, D]`` float, any strides; query head h reads KV head ``h // (H/Hkv)``.
            key_buffer: ``[num_slots, Hkv, D]``, the layer's pool.
            value_buffer: ``[num_slots, Hkv, Dv]``; for MLA the view
                ``key_buffer[..., :kv_lora_rank]``, with Hkv = 1.
            slots: ``[S]`` int64. No other slot is read, whatever it holds.
            scale: of the scores.
            causal_from: number of keys before the first query row: row i sees keys
                ``j <= causal_from + i``. ``None``: every row sees every key.
            logit_cap: scores become ``cap · tanh(score / cap)``; 0 = none.

        Returns:
            ``out [T, H, Dv]`` float32 and natural-log ``lse [T, H]`` float32, both new; a row
            that sees no key has out 0 and lse -inf.
        """
        ...
