"""SGLang's backends inside ours: what MLA layers are told, and which ways of prefilling are open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

stock = pytest.importorskip("tessera_sglang.stock", exc_type=ImportError)

from sglang.srt.model_executor.model_runner_components import misc_utils  # noqa: E402
from sglang.srt.models.deepseek_common.attention_forward_methods import (  # noqa: E402
    forward_methods,
)

from tessera_sglang import compat, wiring  # noqa: E402
from tessera_sglang.backend import TesseraBackend  # noqa: E402
from tessera_sglang.compat import ForwardMode  # noqa: E402
from tessera_sglang.config import BACKEND  # noqa: E402

Method = forward_methods.AttnForwardMethod

# --- the chunked prefix cache --------------------------------------------------------------------


class Schedule:
    """The published setting that SGLang's gate reads and writes."""

    def __init__(self, disabled: bool = False) -> None:
        self.disable_chunked_prefix_cache = disabled

    def override(self, source: str, **fields: bool) -> None:
        vars(self).update(fields)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's own gate behind our hook: whether a server may prefill over a prefix in chunks."""

    def run(
        default: str,
        *,
        backend: str = BACKEND,
        sparse: bool = False,
        mla: bool = True,
        disabled: bool = False,
    ) -> bool:
        allowed = list(SHIPPED)
        schedule = Schedule(disabled)
        for module, name, value in (
            (stock, "PREFIX_CHUNK_BACKENDS", allowed),
            (misc_utils, "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", allowed),
            (stock, "attention_backends", lambda: (backend, backend)),
            (misc_utils, "attention_backends", lambda: (backend, backend)),
            (misc_utils, "get_schedule", lambda: schedule),
            (misc_utils, "get_context", lambda: schedule),
            (stock, "get_server_args", lambda: "arguments"),
            (stock, "picks_keys", lambda arguments: sparse),
            (stock, "default_backend_of", lambda arguments: default),
        ):
            monkeypatch.setattr(module, name, value)
        original = misc_utils.maybe_disable_chunked_prefix_cache
        original = getattr(original, "__wrapped__", original)
        for _ in range(2):  # every runner of a process asks
            stock.keep_prefix_chunks(use_mla_backend=mla, is_draft_worker=False)
            original(use_mla_backend=mla, is_draft_worker=False)
        assert allowed.count(BACKEND) <= 1
        return not schedule.disable_chunked_prefix_cache

    return run


SHIPPED = tuple(name for name in stock.PREFIX_CHUNK_BACKENDS if name != BACKEND)


@pytest.mark.parametrize("default", ["fa3", "flashinfer", "triton", "torch_native", "aiter"])
@pytest.mark.parametrize("disabled", [False, True])
def test_prefixes_are_read_in_chunks_exactly_where_the_inner_backend_would(
    gate: Any, default: str, disabled: bool
) -> None:
    inside = gate(default, disabled=disabled)
    assert inside is gate(default, backend=default, disabled=disabled)
    assert inside is (default in ("fa3", "flashinfer") and not disabled)


def test_a_model_that_picks_its_keys_is_not_read_in_chunks(gate: Any) -> None:
    assert not gate("fa3", sparse=True)
    assert not gate("dsa", backend="dsa")


def test_other_backends_and_models_are_left_alone(gate: Any) -> None:
    assert not gate("fa3", backend="triton")
    assert not gate("fa3", mla=False)


def test_the_hook_stands_before_the_gate_that_the_runner_asks() -> None:
    (hook,) = (hook for hook in wiring.HOOKS if hook.function is stock.keep_prefix_chunks)
    assert hook.kind is compat.HookType.BEFORE
    assert hook.target == f"{misc_utils.__name__}.maybe_disable_chunked_prefix_cache"
    assert SHIPPED, "SGLang's own list"
    assert misc_utils.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS is (
        compat.PREFIX_CHUNK_BACKENDS
    )


# --- how an MLA layer computes a batch -----------------------------------------------------------


def mla_layer() -> Any:
    return SimpleNamespace(
        chunked_prefix_cache_threshold=8192,
        disable_chunked_prefix_cache=False,
        flashinfer_mla_disable_ragged=False,
        qk_rope_head_dim=64,
        current_attention_backend=BACKEND,
    )


def prefill(prefix: int, mode: Any = ForwardMode.EXTEND) -> Any:
    return SimpleNamespace(
        forward_mode=mode,
        extend_prefix_lens_cpu=[prefix],
        seq_lens_cpu=[prefix + 100],
        get_max_chunk_capacity=lambda: 1 << 17,
    )


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our backend around FlashAttention 3 and FlashMLA, in the forward pass in hand."""
    backend = object.__new__(TesseraBackend)
    backend._pass = None
    backend.stock = stock.StockBackend(SimpleNamespace(), "fa3", "flashmla")
    monkeypatch.setattr(stock, "current_backend", lambda: backend)
    monkeypatch.setattr(stock, "verifies_as_decode", lambda: False)
    handlers = compat.AttentionBackendRegistry
    # Not in deterministic mode, which is asked of a published configuration.
    flat = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    module = __import__(handlers.__module__, fromlist=["get_exec"])
    monkeypatch.setattr(module, "get_exec", lambda: flat)
    monkeypatch.setattr(module, "is_cp_active", lambda batch: False)
    return backend


@pytest.mark.parametrize(
    ("prefix", "method"),
    [(0, Method.MHA_ONE_SHOT), (8191, Method.MLA), (8192, Method.MHA_ONE_SHOT),
     (1 << 17, Method.MHA_CHUNKED_KV)],
)  # fmt: skip
def test_a_plain_prefill_is_computed_as_the_inner_backend_would(
    ours: Any, prefix: int, method: Any
) -> None:
    layer = mla_layer()
    assert stock.forward_method(layer, prefill(prefix)) is method
    assert layer.current_attention_backend == "fa3"


@pytest.mark.parametrize("prefix", [0, 8192, 1 << 17])
def test_a_prefill_with_spans_is_absorbed(ours: Any, prefix: int) -> None:
    ours._pass = object()
    layer = mla_layer()
    assert stock.forward_method(layer, prefill(prefix)) is Method.MLA
    assert layer.current_attention_backend == BACKEND


def test_expanded_prefills_prepare_on_the_inner_backend(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SGLang's layers ask of "the backend" around attention itself."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    monkeypatch.setattr(forward_mha, "get_attn_backend", lambda: ours)
    planned: list[Any] = []
    inner = SimpleNamespace(init_mha_chunk_metadata=planned.append, pack_all_prefix_chunks=True)
    ours.stock.backend = inner
    found = forward_mha.resolve_attn_backend(prefill(8192))
    assert found.pack_all_prefix_chunks
    assert not hasattr(found, "prepare_prefill_qkv"), "the inner one has no such hook"
    found.init_mha_chunk_metadata("batch")
    assert planned == ["batch"]

    ours.stock.backend = hybrid_of(inner, SimpleNamespace(), as_decode=False)
    assert forward_mha.resolve_attn_backend(prefill(8192)) is inner


def hybrid_of(prefill: Any, decode: Any, *, as_decode: bool) -> Any:
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    hybrid = object.__new__(HybridAttnBackend)
    hybrid.prefill_backend, hybrid.decode_backend = prefill, decode
    hybrid.spec_attn_is_decode = as_decode
    return hybrid


@pytest.mark.parametrize(
    ("mode", "as_decode", "name"),
    [
        (ForwardMode.EXTEND, False, "fa3"),
        (ForwardMode.DECODE, False, "flashmla"),
        (ForwardMode.IDLE, False, "flashmla"),
        (ForwardMode.TARGET_VERIFY, False, "fa3"),
        (ForwardMode.TARGET_VERIFY, True, "flashmla"),
        (ForwardMode.EXTEND, True, "fa3"),
    ],
)
def test_a_phase_is_named_after_what_sglangs_hybrid_backend_runs_it_on(
    monkeypatch: pytest.MonkeyPatch, mode: Any, as_decode: bool, name: str
) -> None:
    hybrid = hybrid_of("fa3", "flashmla", as_decode=as_decode)
    monkeypatch.setattr(stock, "verifies_as_decode", lambda: as_decode)
    named = stock.StockBackend(hybrid, "fa3", "flashmla").name(mode)
    assert named == hybrid._select_backend(mode) == name
