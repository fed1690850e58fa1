"""``--attention-backend tessera``: SGLang's attention interface over parts and kernels.

Reads the keys and values where SGLang's own pools keep them: the compressed rows of an MLA model
(never expanded), the K and V of any other. A request without spans is one part per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera_sglang.attention.kernels.torch_kernel import TorchKernel
from tessera_sglang.attention.merge import merge_into
from tessera_sglang.attention.plan import Plan, RequestQueries, build_plan

from .compat import (
    AttentionBackend,
    AttentionBackendRegistry,
    ForwardBatch,
    KVWriteLoc,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ScheduleBatch,
    absorbed_mla,
)
from .config import BACKEND
from .reader import Reader, ReaderId, layout_of, reader_of
from .survey import Survey


class UnservableError(RuntimeError):
    """The model or its pool is not one that the backend can serve."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What every layer of one forward pass shares."""

    plan: Plan
    slots: tuple[Tensor, ...]  # per part, int64 [keys]: where its row positions are stored
    turns: tuple[tuple[Tensor, Tensor] | None, ...]  # per part, cos and sin of its rotation


class TesseraBackend(AttentionBackend):  # type: ignore[misc] # untyped base
    """PyTorch kernel on any device; one part per request, more where it reads spans."""

    def __init__(self, runner: Any, survey: Survey) -> None:
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.mla = isinstance(self.pool, MLATokenToKVPool)
        _check_pool(self.pool)
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self._rope_start = survey.rope_start
        self._rotation = survey.rotation.to(runner.device) if survey.rotation else None
        self.kernel = TorchKernel()
        self._batch: _Batch | None = None

    # --- once per forward pass -------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Build the plan and look up where every row is stored."""
        lengths: list[int] = forward_batch.seq_lens_cpu.tolist()
        extend = not forward_batch.forward_mode.is_decode_or_idle()
        queries = forward_batch.extend_seq_lens_cpu if extend else [1] * len(lengths)
        layouts = [layout_of(rid) for rid in forward_batch.rids or [None] * len(lengths)]
        requests: list[RequestQueries] = []
        start = 0
        for tokens, length, layout in zip(queries, lengths, layouts, strict=True):
            requests.append(RequestQueries(start, tokens, length, layout))
            start += tokens
        plan = build_plan(requests)
        longest = max(lengths, default=0)
        rows = self.req_to_token[forward_batch.req_pool_indices, :longest].long()
        self._batch = _Batch(
            plan,
            slots=tuple(rows[p.request, p.key_start : p.key_end] for p in plan.parts),
            turns=tuple(self._turn(p.rotation) for p in plan.parts),
        )

    def _turn(self, rotation: int) -> tuple[Tensor, Tensor] | None:
        if not rotation:
            return None
        assert self._rotation is not None, "a reader was admitted on a model without relocation"
        return self._rotation.cos_sin(rotation)

    def support_triton(self) -> bool:
        """The backend itself launches no Triton kernel."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Never captured: see :mod:`startup`."""
        return 1

    # --- every layer -----------------------------------------------------------------------------

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Store the new tokens' keys and values and attend. q [T, H*D]; [T, H*Dv] in q's dtype."""
        unknown = {name for name, value in kwargs.items() if value is not None}
        if unknown:
            raise UnservableError(
                f"layer {layer.layer_id} passes {sorted(unknown)}, which is unknown"
            )
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys = self.pool.get_key_buffer(layer.layer_id)  # [slots, Hkv, D]
        if self.mla:
            values = keys[..., : layer.v_head_dim]
        else:
            values = self.pool.get_value_buffer(layer.layer_id)  # [slots, Hkv, Dv]
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, H, D]
        out = self._attend(heads, keys, values, layer)
        return out.to(q.dtype).reshape(out.shape[0], -1)

    forward_decode = forward_extend  # the plan knows the difference

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: Any) -> Tensor:
        batch = self._batch
        assert batch is not None, "init_forward_metadata was not called"
        out = q.new_zeros((q.shape[0], q.shape[1], values.shape[-1]), dtype=torch.float32)
        merged = batch.plan.shared_queries  # only these have a log-sum-exp to keep
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if merged else None
        for part, slots, turn in zip(batch.plan.parts, batch.slots, batch.turns, strict=True):
            rows = slice(part.query_start, part.query_end)
            part_q = q[rows]
            if turn is not None:
                assert self._rotation is not None
                part_q = self._rotation.rotate_by(part_q, *turn, start=self._rope_start)
            part_out, part_lse = self.kernel.attend(
                part_q,
                keys,
                values,
                slots,
                scale=layer.scaling,
                causal_from=part.causal_from,
                logit_cap=layer.logit_cap,
            )
            if part.merge:
                assert lse is not None
                merge_into(out, lse, part_out, part_lse, rows)
            else:
                out[rows] = part_out
                if lse is not None:
                    lse[rows] = part_lse
        return out


def _check_pool(pool: Any) -> None:
    """Refuse a pool whose rows are not plain tensors of the model's own dtype."""
    if type(pool) not in (MLATokenToKVPool, MHATokenToKVPool):
        raise UnservableError(
            f"the KV pool is a {type(pool).__name__}, which Tessera's PyTorch kernel does not read; "
            "it reads MLATokenToKVPool and MHATokenToKVPool. Drop the flag that selects it, "
            "or choose another --attention-backend"
        )
    if pool.store_dtype != pool.dtype:
        raise UnservableError(
            f"the KV pool stores {pool.dtype} packed; drop --kv-cache-dtype, "
            "or choose another --attention-backend"
        )


def register_forward_method() -> None:
    """MLA layers take the absorbed path under our backend, in prefill and in decode."""
    AttentionBackendRegistry.register(BACKEND, absorbed_mla)


def mark_readers(
    forward_batch: ForwardBatch, cls: Any, batch: ScheduleBatch, *args: Any, **kwargs: Any
) -> ForwardBatch:
    """Hook after ``ForwardBatch.init_new``: the layouts of the readers, and prompt positions for them.

    A row position says where KV is stored; the rotary phase of a reader's tokens is that of the
    prompt. In decode the two agree, since the row is exactly as long as the prompt.
    """
    readers = [reader_of(req) for req in batch.reqs]
    if not any(readers):
        return forward_batch
    forward_batch.rids = [
        ReaderId(req.rid, reader.layout) if reader is not None else req.rid
        for req, reader in zip(batch.reqs, readers, strict=True)
    ]
    if not forward_batch.forward_mode.is_decode_or_idle():
        forward_batch.positions = _prompt_positions(forward_batch, readers)
    return forward_batch


def _prompt_positions(forward_batch: ForwardBatch, readers: list[Reader | None]) -> Tensor:
    positions: Tensor = forward_batch.positions.clone()
    start = 0
    for reader, before, tokens in zip(
        readers,
        forward_batch.extend_prefix_lens_cpu,
        forward_batch.extend_seq_lens_cpu,
        strict=True,
    ):
        if reader is not None:
            layout = reader.layout
            assert before >= layout.shared_tokens, "a reader was scheduled without its spans"
            own = torch.from_numpy(layout.prompt_positions(before, before + tokens))
            positions[start : start + tokens] = own.to(positions)
        start += tokens
    return positions
