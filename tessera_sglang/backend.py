"""``--attention-backend tessera``: SGLang's attention interface over parts and kernels.

Reads the keys and values where SGLang's own pools keep them: the compressed rows of an MLA model
(never expanded), the K and V of any other. Batches in which nobody reads spans go to the backend that
SGLang would have used, constructed inside this one, wherever it has one for the model and the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessera_sglang.attention.execute import Executor, Pass, Relocation, stacked_rows
from tessera_sglang.attention.kernels.base import Phase
from tessera_sglang.attention.plan import PlanCache
from tessera_sglang.attention.router import Router

from .batches import phase_of, queries_of, readers_in
from .compat import (
    AttentionBackend,
    ForwardBatch,
    KVWriteLoc,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SharedReadEnds,
)
from .graphs import SpanGraphs
from .stock import StockBackend, adopt
from .survey import Survey


class UnservableError(RuntimeError):
    """The model or its pool is not one that the backend can serve."""


class TesseraBackend(AttentionBackend):  # type: ignore[misc] # untyped base
    """One part per plain request, more where it reads spans; see :mod:`attention.plan`."""

    needs_cpu_seq_lens = True  # plans are built on the host

    def __init__(
        self,
        runner: Any,
        survey: Survey,
        router: Router,
        stock: StockBackend | None = None,
        graphs: SpanGraphs | None = None,
    ) -> None:
        """Serve a runner's model.

        Args:
            runner: SGLang's ``ModelRunner``.
            survey: what the model lets us do.
            router: which kernels run its parts.
            stock: what runs plain batches; None: the router's kernels run those too.
            graphs: which decode batches with spans are captured; None: none is.
        """
        super().__init__()
        self.token_to_kv_pool = self.pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.mla = isinstance(self.pool, MLATokenToKVPool)
        _check_pool(self.pool)
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.router, self.stock, self.graphs = router, stock, graphs
        shape = router.situation.shape
        relocation = None
        if survey.rotation is not None:
            relocation = Relocation(survey.rotation, survey.rope_start).to(runner.device)
        self.executor = Executor(shape, relocation)
        self._plans = PlanCache(stacked_rows=stacked_rows(shape, runner.device))
        self._pass: Pass | None = None  # None: a plain batch, in the hands of `stock`
        if stock is not None:
            adopt(self, stock.backend)
        if graphs is not None:
            graphs.bind(self.executor, router.kernel(Phase.DECODE))

    def __getattr__(self, name: str) -> Any:
        stock = self.__dict__.get("stock")
        if stock is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(stock.backend, name)

    @property
    def forward_metadata(self) -> Any:
        """Of the stock backend, which SGLang's graph runners keep and restore."""
        return None if self.stock is None else self.stock.backend.forward_metadata

    @forward_metadata.setter
    def forward_metadata(self, value: Any) -> None:
        if self.stock is not None:
            self.stock.backend.forward_metadata = value

    def plain_backend_name(self, forward_batch: ForwardBatch) -> str | None:
        """SGLang's backend that serves the batch in hand; None if our kernels do."""
        if self._pass is not None or self.stock is None:
            return None
        return self.stock.name(forward_batch.forward_mode)

    # --- once per forward pass -------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Build the plan and look up where every row is stored."""
        self._pass = None
        phase = phase_of(forward_batch.forward_mode)
        if self.stock is not None and not readers_in(forward_batch.rids):
            self.stock.backend.init_forward_metadata(forward_batch)
            self._count_stock(forward_batch, phase)
            return
        lengths: list[int] = forward_batch.seq_lens_cpu.tolist()
        decode = forward_batch.forward_mode.is_decode_or_idle()
        tokens = [1] * len(lengths) if decode else forward_batch.extend_seq_lens_cpu
        plan = self._plans.get(queries_of(forward_batch.rids, tokens, lengths))
        kernel = self.router.kernel(phase)
        rows = forward_batch.req_pool_indices
        self._pass = self.executor.begin(plan, kernel, self.req_to_token, rows)
        if lengths:
            self.router.count(phase, self._pass.launches)

    def _count_stock(self, forward_batch: ForwardBatch, phase: Phase) -> None:
        assert self.stock is not None
        self.router.count_named(f"sglang:{self.stock.name(forward_batch.forward_mode)}", phase)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Before a CUDA graph is captured or replayed."""
        self._pass = None
        step = self.graphs.step(forward_batch, in_capture) if self.graphs is not None else None
        if step is not None:
            step.load(forward_batch, self.req_to_token)
            if not in_capture:
                self.router.count(Phase.DECODE, 2)
            return
        assert self.stock is not None, "graphs are captured where SGLang's backend serves"
        self.stock.backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if not in_capture:
            self._count_stock(forward_batch, phase_of(forward_batch.forward_mode))

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """What is captured before the first layer."""
        step = self.graphs.current if self.graphs is not None else None
        if step is not None:
            self._pass = step.begin(forward_batch, self.req_to_token)
        else:
            assert self.stock is not None
            self.stock.backend.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Shared buffers of the stock backend; ours are made with each graph."""
        assert self.stock is not None, "graphs are captured where SGLang's backend serves"
        self.stock.backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the requests that pad a captured batch."""
        if self.stock is None:
            return 1
        return int(self.stock.backend.get_cuda_graph_seq_len_fill_value())

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Where SGLang may write its row tables again: in decode behind the metadata, which copies."""
        if not fm.is_decode():
            return SharedReadEnds.UNKNOWN
        ends = [SharedReadEnds.IN_REPLAY]
        if self.stock is not None:
            ends.append(self.stock.backend.shared_read_ends(fm))
        return SharedReadEnds.max_of(ends)

    def resolve_prefill_shared_read_ends(
        self, forward_batch: ForwardBatch, **kwargs: Any
    ) -> SharedReadEnds:
        """Likewise for prefill: what the stock backend says of a plain batch, else the pass's end."""
        if self.stock is None or readers_in(forward_batch.rids):
            return SharedReadEnds.UNKNOWN
        found: SharedReadEnds = self.stock.backend.resolve_prefill_shared_read_ends(
            forward_batch, **kwargs
        )
        return found

    def support_triton(self) -> bool:
        """Whether SGLang may prepare a batch with Triton: on a CPU it can not."""
        return self.stock is not None

    # --- every layer -----------------------------------------------------------------------------

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attention of one layer, ours or SGLang's."""
        if self.stock is None or self._pass is not None:
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self.stock.backend.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

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
        assert self._pass is not None, "init_forward_metadata was not called"
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, H, D]
        out = self._pass.attend(heads, keys, values, scale=layer.scaling, logit_cap=layer.logit_cap)
        return out.to(q.dtype).reshape(out.shape[0], -1)

    forward_decode = forward_extend  # the plan knows the difference


def _check_pool(pool: Any) -> None:
    """Refuse a pool whose rows are not plain tensors of the model's own dtype, token after token."""
    if type(pool) not in (MLATokenToKVPool, MHATokenToKVPool):
        raise UnservableError(
            f"the KV pool is a {type(pool).__name__}, which Tessera's kernels do not read; "
            "they read MLATokenToKVPool and MHATokenToKVPool. Drop the flag that selects it, "
            "or choose another --attention-backend"
        )
    layout = getattr(pool, "kv_cache_layout", "nhd")  # an MLA row has one head: no layout to choose
    if layout != "nhd":
        raise UnservableError(
            f"the KV pool is laid out as {layout!r}, and Tessera's kernels read 'nhd'; unset "
            "SGLANG_USE_HND_KVCACHE (or SGLANG_AITER_KV_CACHE_LAYOUT), or choose another "
            "--attention-backend"
        )
    if pool.store_dtype != pool.dtype:
        raise UnservableError(
            f"the KV pool stores {pool.dtype} packed; drop --kv-cache-dtype, "
            "or choose another --attention-backend"
        )
