"""What the router is asked about SGLang's runner, and which of its backends run plain batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

kernels = pytest.importorskip("tessera_sglang.kernels", exc_type=ImportError)

from tessera_sglang.attention.kernels.base import Phase, RowFormat  # noqa: E402 # after the skip
from tessera_sglang.attention.router import RouteError  # noqa: E402
from tessera_sglang.attention.shelf import Shelf  # noqa: E402

Facts, compat = kernels.StockFacts, kernels.compat


# --- which of SGLang's backends ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        (Facts("cpu", "torch_native", latent=True), None),
        (Facts("cpu", "torch_native", latent=False), None),
        (Facts("cuda", "fa3", latent=False), ("fa3", "fa3")),
        (Facts("cuda", "fa3", latent=True), ("fa3", "flashmla")),
        (Facts("cuda", "fa3", latent=True, flashmla="pages"), ("fa3", "fa3")),
        (Facts("cuda", "triton", latent=True, flashmla="8.0"), ("triton", "triton")),
    ],
)
def test_plain_batches_run_on_the_best_that_sglang_has(
    facts: Any, names: tuple[str, str] | None
) -> None:
    stock = kernels.stock_names(facts)
    assert stock.names == names
    assert stock.reason
    if facts.flashmla is not None:
        assert facts.flashmla in stock.reason


# --- what a runner says --------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """What is read of a RadixAttention."""

    def __init__(self, heads: int, kv_heads: int, key: int, value: int, cap: float = 0.0) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num = heads, kv_heads
        self.qk_head_dim, self.v_head_dim, self.logit_cap = key, value, cap


class MlaPool:
    def __init__(self, **fields: Any) -> None:
        self.kv_lora_rank, self.qk_rope_head_dim = 512, 64
        self.dtype, self.dsa_kv_cache_store_fp8 = torch.bfloat16, False
        self.__dict__.update(fields)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compat, "RadixAttention", Layer)
    monkeypatch.setattr(compat, "MLATokenToKVPool", MlaPool)
    monkeypatch.setattr(compat, "compute_capability", lambda device: None)

    def build(pool: Any, *layers: Layer) -> Any:
        return SimpleNamespace(
            token_to_kv_pool=pool,
            dtype=torch.bfloat16,
            device="cpu",
            page_size=64,
            model=torch.nn.ModuleList(layers),
        )

    return build


def test_an_mla_model_is_read_by_its_absorbed_layers(runner: Any) -> None:
    absorbed, expanded = Layer(16, 1, 576, 512), Layer(16, 16, 192, 128)
    found = kernels.situation_of(runner(MlaPool(), absorbed, expanded, absorbed))
    assert str(found.shape) == (
        "MLA 16/1 heads, 576/512 channels, bfloat16 plain rows, pages of 64"
    )
    assert (found.device, found.compute, found.row_dtype) == ("cpu", None, None)


def test_a_model_with_grouped_heads_is_read_by_its_pool(runner: Any) -> None:
    pool = SimpleNamespace(head_num=2, head_dim=64, v_head_dim=64, dtype=torch.bfloat16)
    found = kernels.situation_of(runner(pool, Layer(8, 2, 64, 64), Layer(8, 2, 64, 64, cap=30.0)))
    assert (found.shape.query_heads, found.shape.kv_heads, found.shape.latent) == (8, 2, False)
    assert found.shape.logit_cap == 30.0


def test_rows_are_packed_or_of_another_dtype(runner: Any) -> None:
    layer = Layer(16, 1, 576, 512)
    packed = MlaPool(dsa_kv_cache_store_fp8=True, dtype=torch.float8_e4m3fn)
    found = kernels.situation_of(runner(packed, layer))
    assert (found.shape.rows, found.row_dtype) == (RowFormat.FP8_PACKED, None)
    mixed = kernels.situation_of(runner(MlaPool(dtype=torch.float32), layer))
    assert (mixed.shape.rows, mixed.row_dtype) == (RowFormat.PLAIN, torch.float32)


@pytest.mark.parametrize("layers", [[], [(16, 1), (8, 1)]])
def test_layers_that_differ_are_refused_with_what_was_found(
    runner: Any, layers: list[tuple[int, int]]
) -> None:
    built = runner(MlaPool(), *(Layer(heads, kv, 576, 512) for heads, kv in layers))
    with pytest.raises(kernels.GeometryError, match="Choose another --attention-backend") as caught:
        kernels.situation_of(built)
    assert str(sorted({heads for heads, _ in layers}) or "no") in str(caught.value)


def test_a_router_is_kept_on_its_runner_by_whoever_serves_with_it(runner: Any) -> None:
    built = runner(MlaPool(), Layer(16, 1, 576, 512))
    router = kernels.make_router(built, "auto")
    assert {route.name for route in router.routes.values()} == {"torch"}
    assert kernels.router_of(built) is None, "SGLang's own backend may serve after all"
    kernels.keep_router(built, router)
    assert kernels.router_of(built) is router


# --- what there is -------------------------------------------------------------------------------


def test_whatever_is_broken_here_has_a_reason_and_pytorch_is_there() -> None:
    shelf = Shelf(kernels.offers())
    assert shelf.names == ("flashmla", "flashinfer", "fa3", "tilelang", "triton", "torch")
    for name in shelf.names:
        found = shelf.get(name)
        assert found if isinstance(found, str) else found.capabilities.name == name
    assert not isinstance(shelf.get("torch"), str)


@pytest.mark.parametrize("wanted", ["auto", "torch"])
def test_what_runs_anywhere_needs_no_check(wanted: str) -> None:
    kernels.check_wanted(wanted, "cpu")


@pytest.mark.parametrize("wanted", ["flashmla", "flashinfer", "tilelang"])
def test_a_kernel_for_gpus_is_refused_without_one(wanted: str) -> None:
    with pytest.raises(RouteError, match=f'kernel "{wanted}" can not serve on cpu') as caught:
        kernels.check_wanted(wanted, "cpu")
    assert str(caught.value).endswith('use "auto" or "torch"')


def test_every_phase_is_routed() -> None:
    assert {phase.value for phase in Phase} == {"prefill", "decode", "verify"}
