"""The kernels that may be here, each loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from tessera_sglang.attention.kernels.base import AttentionShape, Kernel, Phase
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel
from tessera_sglang.attention.shelf import Offer

_ROOM = "tessera_sglang.attention.kernels"
_SGLANG = "sglang.kernels.ops.attention"
LIBRARIES = ("sgl-flash-mla", "flashinfer-python", "sglang-kernel", "tilelang", "triton", "sglang")


def offers() -> list[Offer]:
    """Kernels by name, the one that others are compared with first."""
    return [
        Offer("flashmla", _flashmla),
        Offer("flashinfer", _flashinfer),
        Offer("fa3", _fa3),
        Offer("tilelang", _tilelang),
        Offer("triton", _triton),
        Offer("torch", TorchKernel),
    ]


def refusal(kernel: Kernel, shape: AttentionShape, phase: Phase, device: str) -> str | None:
    """Why a kernel does not run this here; None: it does."""
    compute = torch.cuda.get_device_capability() if device == "cuda" else None
    return kernel.capabilities.refusal(shape, phase, device, compute)


def versions() -> dict[str, str]:
    """Of the libraries that kernels come from."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def _flashmla() -> Kernel:
    kernel: Kernel = import_module(f"{_ROOM}.flashmla").FlashMLAKernel()
    return kernel


def _flashinfer() -> Kernel:
    kernel: Kernel = import_module(f"{_ROOM}.flashinfer").FlashInferKernel()
    return kernel


def _fa3() -> Kernel:
    attend = import_module(f"{_SGLANG}.flash_attention_v3").flash_attn_with_kvcache
    kernel: Kernel = import_module(f"{_ROOM}.fa3").FA3Kernel(attend)
    return kernel


def _tilelang() -> Kernel:
    kernel: Kernel = import_module(f"{_ROOM}.tilelang_decode").TileLangKernel()
    return kernel


def _triton() -> Kernel:
    launch = import_module(f"{_SGLANG}.decode_attention").decode_attention_fwd
    kernel: Kernel = import_module(f"{_ROOM}.triton_decode").TritonKernel(launch)
    return kernel
