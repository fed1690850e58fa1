"""What the router is asked, and which of SGLang's backends run plain batches.

Kernel libraries are imported when the router asks for them, so that one that is broken, or takes long,
costs nobody who does not use it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from tessera_sglang.attention.execute import Executor
from tessera_sglang.attention.kernels.base import (
    AttentionShape,
    Kernel,
    Phase,
    RowFormat,
)
from tessera_sglang.attention.kernels.library import import_library
from tessera_sglang.attention.plan import BatchQueries, build_plan
from tessera_sglang.attention.preferences import Situation
from tessera_sglang.attention.router import AUTO, Router, require
from tessera_sglang.attention.shelf import Offer, Shelf

from . import compat

_ROOM = "tessera_sglang.attention.kernels"


class GeometryError(RuntimeError):
    """The model's layers are not ones that one kernel can serve."""


# --- kernels -------------------------------------------------------------------------------------


def offers() -> list[Offer]:
    """Every kernel that this version has an adapter for."""
    return [
        Offer("flashmla", _flashmla),
        Offer("flashinfer", _flashinfer),
        Offer("fa3", _fa3),
        Offer("tilelang", _tilelang),
        Offer("triton", _triton),
        Offer("torch", _torch),
    ]


def _adapter(module: str) -> Any:
    return import_module(f"{_ROOM}.{module}")


def _flashmla() -> Kernel:
    kernel: Kernel = _adapter("flashmla").FlashMLAKernel()
    return kernel


def _flashinfer() -> Kernel:
    kernel: Kernel = _adapter("flashinfer").FlashInferKernel()
    return kernel


def _tilelang() -> Kernel:
    kernel: Kernel = _adapter("tilelang_decode").TileLangKernel()
    return kernel


def _triton() -> Kernel:
    launch = import_module("sglang.kernels.ops.attention.decode_attention").decode_attention_fwd
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    kernel: Kernel = _adapter("triton_decode").TritonKernel(launch, interpreted=interpreted)
    return kernel


def _fa3() -> Kernel:
    import_library("sgl_kernel.flash_attn", "pip install sglang-kernel")
    module = import_module("sglang.kernels.ops.attention.flash_attention_v3")
    kernel: Kernel = _adapter("fa3").FA3Kernel(module.flash_attn_with_kvcache)
    return kernel


def _torch() -> Kernel:
    kernel: Kernel = _adapter("torch_kernel").TorchKernel()
    return kernel


# --- the router of a server ----------------------------------------------------------------------


def check_wanted(wanted: str, device: str) -> None:
    """Refuse a kernel by name where it is missing or made for another device; no model is needed.

    Raises:
        RouteError: says which, what was found, and the remedy.
    """
    if wanted != AUTO:
        require(wanted, device, compat.compute_capability(device), Shelf(offers()))


def make_router(runner: Any, wanted: str) -> Router:
    """The router of a loaded model, logged and ready to serve.

    Raises:
        RouteError: the kernel that is wanted can not serve the model here.
        GeometryError: no kernel can.
    """
    router = Router(wanted, situation_of(runner), offers())
    router.log()
    warm_up(router, runner.device)
    return router


def warm_up(router: Router, device: Any) -> None:
    """Schedule an empty launch on every kernel, so that those that compile do so before they serve.

    Raises:
        KernelUnavailableError: one does not compile here.
    """
    shape = router.situation.shape
    plan = build_plan(BatchQueries.of([1], [1], [None]))
    slots = torch.zeros((1, 1), dtype=torch.int64, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for kernel in {id(route.kernel): route.kernel for route in router.routes.values()}.values():
        Executor(shape, None).begin(plan, kernel, slots, row).prepare(1.0)


def keep_router(runner: Any, router: Router) -> None:
    """Our backend serves the runner's model: `router_of` finds what it counts."""
    runner.tessera_router = router


def router_of(runner: Any) -> Router | None:
    """The router of a runner; None where SGLang's own backend serves the model."""
    found: Router | None = getattr(runner, "tessera_router", None)
    return found


def situation_of(runner: Any) -> Situation:
    """Geometry of a loaded model and its pool, and where they are."""
    pool, dtype = runner.token_to_kv_pool, runner.dtype
    device = torch.device(runner.device).type
    latent = isinstance(pool, compat.MLATokenToKVPool)
    if latent:
        key, value, kv_heads = pool.kv_lora_rank + pool.qk_rope_head_dim, pool.kv_lora_rank, 1
        packed = pool.dsa_kv_cache_store_fp8
    else:
        key, value, kv_heads = pool.head_dim, pool.v_head_dim, pool.head_num
        packed = False
    # An MLA block also has a layer for expanded heads, which our backend never calls.
    layers = [
        layer
        for layer in runner.model.modules()
        if isinstance(layer, compat.RadixAttention)
        and (layer.qk_head_dim, layer.v_head_dim, layer.tp_k_head_num) == (key, value, kv_heads)
    ]
    heads = {layer.tp_q_head_num for layer in layers}
    if len(heads) != 1:
        raise GeometryError(
            f"layers that match the KV pool ({kv_heads} heads, {key}/{value} channels) have "
            f"{sorted(heads) or 'no'} query heads; a kernel is chosen for one number of them. "
            "Choose another --attention-backend"
        )
    shape = AttentionShape(
        query_heads=heads.pop(),
        kv_heads=kv_heads,
        key_width=key,
        value_width=value,
        latent=latent,
        page_tokens=runner.page_size,
        dtype=dtype,
        rows=RowFormat.FP8_PACKED if packed else RowFormat.PLAIN,
        logit_cap=max(float(layer.logit_cap or 0.0) for layer in layers),
    )
    mixed = not packed and pool.dtype != dtype
    return Situation(
        shape, device, compat.compute_capability(device), pool.dtype if mixed else None
    )


# --- plain batches -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StockFacts:
    """What decides which of SGLang's backends run batches without spans."""

    device: str
    default: str  # what SGLang takes by itself
    latent: bool
    flashmla: str | None = None  # why FlashMLA's dense decode can not run here; None: it can


@dataclass(frozen=True, slots=True)
class Stock:
    """Names of SGLang's backends for plain batches, or why Tessera's own kernels run those too."""

    names: tuple[str, str] | None  # of prefill and decode
    reason: str


def stock_names(facts: StockFacts) -> Stock:
    """SGLang's best backends for plain batches."""
    if facts.device == "cpu":
        # torch_native has no MLA, and computes attention of a cached prefix's queries once more.
        return Stock(None, "on a CPU SGLang's own backend is the slower one, or there is none")
    if not facts.latent or facts.device != "cuda":
        return Stock((facts.default, facts.default), f"SGLang's default on {facts.device}")
    if facts.flashmla is not None:
        why = f"SGLang's default; flashmla decode: {facts.flashmla}"
        return Stock((facts.default, facts.default), why)
    return Stock((facts.default, "flashmla"), "SGLang's default, and FlashMLA's dense decode")


def stock_of(runner: Any, router: Router) -> Stock:
    """What runs plain batches of a loaded model."""
    shape, device = router.situation.shape, router.situation.device
    flashmla: str | None = None
    if shape.latent and device == "cuda":
        flashmla = router.refusal("flashmla", Phase.DECODE)
        if flashmla is None and not compat.has_flashinfer():  # SGLang's backend is built on it
            flashmla = "SGLang's backend for it needs FlashInfer"
    return stock_names(
        StockFacts(
            device=device,
            default=compat.default_backend_name(runner),
            latent=shape.latent,
            flashmla=flashmla,
        )
    )
