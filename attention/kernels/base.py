"""What a kernel is: parts in, outputs and log-sum-exps out, and a record of what it can do.

A *part* is a run of query rows against one list of keys. The parts of one kernel launch come as
flat tensors (`Work`), the same for every layer of a forward pass. Kernels return what `merge` needs
and decide nothing else: which parts exist is the plan's business, which kernel runs them the
router's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..plan import Ints


class KernelUnavailableError(RuntimeError):
    """A kernel library is missing, or is not one that its adapter knows; says which and why."""


class Phase(Enum):
    """What a forward pass does with a request. Values are what metrics and logs say."""

    PREFILL = "prefill"  # many queries a request, causal; chunks and appends too
    DECODE = "decode"  # one query a request
    VERIFY = "verify"  # a few queries a request, causal


class RowFormat(Enum):
    """How a KV row lies in the pool."""

    PLAIN = "plain"  # one dtype throughout
    FP8_PACKED = "fp8_packed"  # 656 B: E4M3 latent, FP32 scales, BF16 rope; see `packed_rows`


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Everything about a model's layers and pool that decides which kernel can run them."""

    query_heads: int  # on this rank
    kv_heads: int
    key_width: int  # channels of a key: latent + rope for MLA
    value_width: int  # channels of a value: latent for MLA
    latent: bool  # MLA: one row a token, whose first channels are the value
    page_tokens: int
    dtype: torch.dtype  # of queries and, unless rows are packed, of keys and values
    rows: RowFormat = RowFormat.PLAIN
    logit_cap: float = 0.0

    def __str__(self) -> str:
        kind = "MLA" if self.latent else "K/V"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{kind} {self.query_heads}/{self.kv_heads} heads, {self.key_width}/{self.value_width} "
            f"channels, {dtype} {self.rows.value} rows, pages of {self.page_tokens}"
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel can run. ``None`` means no limit."""

    name: str
    devices: frozenset[str]  # torch device types
    dtypes: frozenset[torch.dtype]
    phases: frozenset[Phase]
    page_tokens: frozenset[int] | None
    widths: frozenset[tuple[int, int]] | None  # (key, value) channels
    latent: bool  # runs MLA rows
    grouped: bool  # runs separate keys and values
    causal: bool  # takes parts in which later queries see more keys
    logit_cap: bool
    lse_base: Literal["e", "2"]  # of the library underneath; `run` always returns base e
    graph_safe: bool  # prepare + run may be captured and replayed over other contents of `Work`
    reads: Literal["slots", "pages"]  # which of the two tables of `Work` it needs
    rows: frozenset[RowFormat] = frozenset({RowFormat.PLAIN})
    compute: tuple[tuple[int, int], tuple[int, int]] | None = None  # CUDA, inclusive bounds

    def misplaced(self, device: str, compute: tuple[int, int] | None) -> str | None:
        """Why the kernel is not made for a device, whatever the model; None if it is."""
        if device not in self.devices:
            return f"runs on {_words(self.devices)}, not on {device}"
        if self.compute is None or device != "cuda":
            return None
        low, high = self.compute
        if compute is not None and low <= compute <= high:
            return None
        found = f"{compute[0]}.{compute[1]}" if compute else "none that can be read"
        return f"wants compute capability {low[0]}.{low[1]} to {high[0]}.{high[1]}, found {found}"

    def refusal(
        self,
        shape: AttentionShape,
        phase: Phase,
        device: str,
        compute: tuple[int, int] | None = None,
    ) -> str | None:
        """Why the kernel can not run this, or None if it can.

        ``device`` is a torch device type, ``compute`` the CUDA compute capability; a kernel that has
        bounds for it does not run where it is unknown (None).
        """
        misplaced = self.misplaced(device, compute)
        if misplaced is not None:
            return misplaced
        if phase not in self.phases:
            return f"has no {phase.value} kernel"
        if phase is not Phase.DECODE and not self.causal:
            return "has no causal mask"
        if shape.latent and not self.latent:
            return "does not read MLA rows"
        if not shape.latent and not self.grouped:
            return "reads MLA rows only"
        if shape.rows not in self.rows:
            return f"does not read {shape.rows.value} rows"
        if shape.dtype not in self.dtypes:
            return f"takes {_words({_dtype(d) for d in self.dtypes})}, not {_dtype(shape.dtype)}"
        if self.page_tokens is not None and shape.page_tokens not in self.page_tokens:
            return f"takes pages of {_words(self.page_tokens)} tokens, not {shape.page_tokens}"
        if self.widths is not None and (shape.key_width, shape.value_width) not in self.widths:
            found = f"{shape.key_width}/{shape.value_width}"
            return f"takes {_words(f'{k}/{v}' for k, v in self.widths)} channels, not {found}"
        if shape.logit_cap > 0.0 and not self.logit_cap:
            return "does not cap logits"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The parts of one launch as flat tensors. Built once per forward pass, read by every layer.

    Part p has the query rows ``[query_indptr[p], query_indptr[p + 1])`` of the stacked queries that
    are passed to `Kernel.run`, and ``key_indptr[p + 1] - key_indptr[p]`` keys. If ``causal``, row i of
    a part with n rows and S keys sees keys ``j <= S - n + i``; else every row sees every key. Parts may
    be empty in rows, in keys, or in both.

    ``static`` work is made for replay: its tensors are buffers of fixed capacity whose contents change
    from step to step, so only they say how many keys a part has. The host arrays then hold
    capacities, every part has the same number of query rows, ``causal`` is False, and slots and pages
    lie at a fixed stride: those of part p begin at p times the capacity of a part (``page_indptr`` says
    the same of pages; ``key_indptr`` counts keys and is no offset into ``slots``).
    """

    causal: bool
    page_tokens: int
    query_indptr: Tensor  # [P + 1] int32
    key_indptr: Tensor  # [P + 1] int32, in tokens
    slots: Tensor | None  # [keys] int64: where the key's row is; None if the kernel reads pages
    page_indptr: Tensor | None  # [P + 1] int32; None if the kernel reads slots
    pages: Tensor | None  # [pages] int32 page ids; only the last page of a part may be partial
    host_query_indptr: Ints  # [P + 1], the same on the host: kernels that schedule on the host
    host_key_indptr: Ints  # [P + 1]
    static: bool = False

    @property
    def parts(self) -> int:
        """P."""
        return len(self.host_query_indptr) - 1

    @property
    def rows(self) -> int:
        """N, stacked query rows of all parts."""
        return int(self.host_query_indptr[-1])


class Kernel(Protocol):
    """Attention of parts over paged KV."""

    @property
    def capabilities(self) -> Capabilities:
        """What this kernel can run."""
        ...

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> Any:
        """Schedule a launch, once per forward pass. The result is passed back to `run` only.

        No host-device sync unless ``capabilities.graph_safe`` is False. ``scale`` is that of the
        scores; a layer with another one is prepared for apart.
        """
        ...

    def run(
        self,
        prepared: Any,
        q: Tensor,
        key_buffer: Tensor,
        value_buffer: Tensor,
        *,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            prepared: what `prepare` made of the launch.
            q: ``[N, H, D]`` of the shape's dtype, any strides, rows stacked part after part; query
                head h reads KV head ``h // (H/Hkv)``.
            key_buffer: ``[num_slots, Hkv, D]``, the layer's pool; packed rows are
                ``[num_slots, 1, 656]`` uint8.
            value_buffer: ``[num_slots, Hkv, Dv]``; for plain MLA rows the view
                ``key_buffer[..., :kv_lora_rank]``; ignored for packed rows.
            logit_cap: scores become ``cap · tanh(score / cap)``; 0 = none.

        Returns:
            ``out [N, H, Dv]``, float32 or q's dtype, and natural-log ``lse [N, H]`` float32. A row that
            sees no key has lse -inf, and what its output holds is meaningless: `merge` never shows it.
        """
        ...


def no_rows(
    q: Tensor, shape: AttentionShape, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """What `Kernel.run` returns of a launch without query rows; ``dtype`` is that of outputs."""
    out = q.new_empty((0, shape.query_heads, shape.value_width), dtype=dtype)
    return out, q.new_empty((0, shape.query_heads), dtype=torch.float32)


def _words(values: Any) -> str:
    return ", ".join(sorted(str(value) for value in values))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
