"""FlashInfer: prefill, decode and verification over pages, on Ampere and newer.

MLA rows run `BatchMLAPagedAttentionWrapper`, keys and values of their own
`BatchPrefillWithPagedKVCacheWrapper`. Both take parts with any number of rows as they are, and mask
causally from the end. Kernels are compiled by nvcc when first planned, unless FlashInfer's package of
prebuilt ones is installed.

What is relied on, and where it is said (flashinfer-python 0.7.2):

* ``mla/_batch_mla/_wrapper.py``: metadata in CSR form, on the host or the device; "packed" queries
  ``[N, H, 576]`` and rows ``[pages, page, 576]``; ``lse_mode="basee"`` with
  ``return_lse_base_on_e=True`` for natural logarithms (the native base is 2, ``mla.cuh``).
* ``mla/_batch_mla/_backends/_fa_common.py``: a causal plan with a number of heads that does not divide
  a tile of 64 or 128 rows can lose a key and is refused by the library; heads are padded to a power of
  two instead. A plan of more than 16,384 tiles (of 64 or 128 rows times heads) is refused too: that is
  a batch of 16,384 tokens with 128 heads.
* ``prefill.py``: ``[pages, page, Hkv, D]`` ("NHD"), ``run(…, lse_base="ln")``, the logit cap at plan.

* ``scheduler.cuh``: a plan is written to pinned memory of the wrapper and brought to the device by a
  ``cudaMemcpyAsync`` that nobody waits for, and that PyTorch's allocator of pinned memory does not know.

A plan lies in the workspace of its wrapper. So every `prepare` has a wrapper of its own, which retires
when what `prepare` returned is dropped; the large scratch buffer is shared, since launches of a stream
run one after the other. A retired wrapper's pinned memory may still be read: it is neither written nor
given back before an event behind that copy has passed. What `prepare` returned must be dropped on the
stream that it ran on.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import AttentionShape, Capabilities, Phase, Work
from .library import import_library, require
from .paging import blind_rows, in_pages, page_plan

_REMEDY = "pip install flashinfer-python==0.7.2"
_SCRATCH_BYTES = 128 << 20  # what FlashInfer's documentation recommends
_MLA_WIDTHS = frozenset({(576, 512)})
_GROUPED_WIDTHS = frozenset({(64, 64), (128, 128), (256, 256)})


class _FlashInferCapabilities(Capabilities):
    """Widths and logit caps differ between its two kernels."""

    def refusal(
        self,
        shape: AttentionShape,
        phase: Phase,
        device: str,
        compute: tuple[int, int] | None = None,
    ) -> str | None:
        """See `Capabilities.refusal`."""
        refusal = Capabilities.refusal(self, shape, phase, device, compute)
        if refusal is not None:
            return refusal
        widths = _MLA_WIDTHS if shape.latent else _GROUPED_WIDTHS
        if (shape.key_width, shape.value_width) not in widths:
            kind = "MLA rows" if shape.latent else "keys and values"
            return f"takes no {kind} of {shape.key_width}/{shape.value_width} channels"
        if shape.latent and shape.logit_cap > 0.0:
            return "does not cap logits of MLA rows"
        return None


@dataclass(frozen=True, eq=False)  # without slots: it is referred to weakly
class Prepared:
    """A planned launch. While it lives, nobody else plans on its wrapper."""

    work: Work
    shape: AttentionShape
    wrapper: Any  # None: no row sees anything
    heads: int  # that were planned
    blind: Tensor | None  # [n] int64 stacked rows that see nothing; None: there are none


class _Retired:
    """Wrappers of one kind whose plans nobody runs any more, and events behind their copies."""

    def __init__(self) -> None:
        self._wrappers: deque[tuple[Any, Any]] = deque()  # oldest plan first

    def retire_with(self, prepared: Prepared) -> None:
        """Take the wrapper once ``prepared`` is dropped; right after it was planned."""
        event = torch.get_device_module(prepared.work.query_indptr.device).Event()
        event.record()
        held = prepared.wrapper, event
        weakref.finalize(prepared, self._wrappers.append, held).atexit = False

    def take(self) -> Any:
        """A wrapper to plan on again, None if there is none. Waits for its last copy at most."""
        if not self._wrappers:
            return None
        wrapper, event = self._wrappers.popleft()
        if not event.query():
            event.synchronize()
        return wrapper

    def let_go(self) -> None:
        """Drop those whose copies are through."""
        while self._wrappers and self._wrappers[0][1].query():
            self._wrappers.popleft()


class FlashInferKernel:
    """See `Kernel`. ``run`` returns outputs in q's dtype. Not thread-safe, one stream."""

    capabilities: Capabilities = _FlashInferCapabilities(
        name="flashinfer",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        phases=frozenset(Phase),
        page_tokens=None,
        widths=_MLA_WIDTHS | _GROUPED_WIDTHS,
        latent=True,
        grouped=True,
        causal=True,
        logit_cap=True,
        lse_base="2",
        graph_safe=False,  # a plan is made on the host, from lengths on the host
        reads="pages",
        compute=((8, 0), (99, 9)),
    )

    def __init__(self) -> None:
        """Import ``flashinfer``.

        Raises:
            KernelUnavailableError: it is missing or broken.
        """
        self._paged = import_library("flashinfer.prefill", _REMEDY)
        self._mla = import_library("flashinfer.mla", _REMEDY)
        for module, name in (
            (self._paged, "BatchPrefillWithPagedKVCacheWrapper"),
            (self._mla, "BatchMLAPagedAttentionWrapper"),
            (self._mla, "MLAPlanMetadata"),
        ):
            require(module, name, _REMEDY)
        self._scratch: dict[torch.device, Tensor] = {}
        self._retired_mla: defaultdict[torch.device, _Retired] = defaultdict(_Retired)
        self._retired_grouped: defaultdict[torch.device, _Retired] = defaultdict(_Retired)

    def prepare(self, work: Work, shape: AttentionShape, *, scale: float) -> Prepared:
        """See `Kernel.prepare`. Plans on the host."""
        assert not work.static, "a plan is made of lengths on the host"
        device = work.query_indptr.device
        blind = blind_rows(work)
        if len(blind) == work.rows:
            return Prepared(work, shape, None, shape.query_heads, None)
        plan = self._plan_mla if shape.latent else self._plan_grouped
        hidden = torch.from_numpy(blind).to(device) if len(blind) else None
        return plan(work, shape, scale, device, hidden)

    def _plan_mla(
        self,
        work: Work,
        shape: AttentionShape,
        scale: float,
        device: torch.device,
        blind: Tensor | None,
    ) -> Prepared:
        plan = page_plan(work)
        heads = planned_heads(shape.query_heads) if work.causal else shape.query_heads
        # Planning replaces everything that a wrapper owns, so that there is nothing to reuse.
        retired = self._retired_mla[device]
        retired.let_go()
        wrapper = self._mla.BatchMLAPagedAttentionWrapper(self._scratch_of(device))
        wrapper.plan(
            metadata=self._mla.MLAPlanMetadata.csr(
                plan.query_indptr, plan.page_indptr, work.pages, plan.key_tokens
            ),
            num_heads=heads,
            head_dim_ckv=shape.value_width,
            head_dim_kpe=shape.key_width - shape.value_width,
            page_size=work.page_tokens,
            causal=work.causal,
            sm_scale=scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            query_layout="packed",
            kv_cache_layout="packed",
            lse_mode="basee",
        )
        prepared = Prepared(work, shape, wrapper, heads, blind)
        retired.retire_with(prepared)
        return prepared

    def _plan_grouped(
        self,
        work: Work,
        shape: AttentionShape,
        scale: float,
        device: torch.device,
        blind: Tensor | None,
    ) -> Prepared:
        plan = page_plan(work)
        retired = self._retired_grouped[device]
        wrapper = retired.take() or self._paged.BatchPrefillWithPagedKVCacheWrapper(
            self._scratch_of(device), "NHD"
        )
        wrapper.plan(
            plan.query_indptr,
            plan.page_indptr,
            work.pages,
            plan.last_page_tokens,
            shape.query_heads,
            shape.kv_heads,
            shape.key_width,
            work.page_tokens,
            head_dim_vo=shape.value_width,
            causal=work.causal,
            sm_scale=scale,
            logits_soft_cap=shape.logit_cap,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        prepared = Prepared(work, shape, wrapper, shape.query_heads, blind)
        retired.retire_with(prepared)
        return prepared

    def run(
        self,
        prepared: Prepared,
        q: Tensor,
        key_buffer: Tensor,
        value_buffer: Tensor,
        *,
        logit_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.run`. ``logit_cap`` is that of the shape."""
        shape, page = prepared.shape, prepared.work.page_tokens
        assert q.shape == (prepared.work.rows, shape.query_heads, shape.key_width), q.shape
        assert logit_cap == shape.logit_cap, "the cap is part of the plan"
        if prepared.wrapper is None:
            out = q.new_zeros((*q.shape[:2], shape.value_width))
            return out, q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
        q = q.contiguous()
        if shape.latent:
            extra = prepared.heads - shape.query_heads
            out, lse = prepared.wrapper.run(
                query=torch.nn.functional.pad(q, (0, 0, 0, extra)) if extra else q,
                kv_cache=in_pages(key_buffer, page).squeeze(2),
                return_lse=True,
                return_lse_base_on_e=True,
            )
            if extra:
                out, lse = out[:, : shape.query_heads], lse[:, : shape.query_heads]
        else:
            pools = in_pages(key_buffer, page), in_pages(value_buffer, page)
            out, lse = prepared.wrapper.run(q, pools, return_lse=True, lse_base="ln")
        if prepared.blind is not None:
            lse = lse.index_fill(0, prepared.blind, -math.inf)
        return out, lse

    def _scratch_of(self, device: torch.device) -> Tensor:
        found = self._scratch.get(device)
        if found is None:
            # FlashInfer wants counters in it to start at zero.
            found = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8, device=device)
            self._scratch[device] = found
        return found


def planned_heads(heads: int) -> int:
    """Query heads of a causal MLA plan: the next power of two, which divides every tile of rows."""
    return 1 << (heads - 1).bit_length()
