"""FlashMLA called by itself on flat contexts: what everything is compared with."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.world import World
from tessera_sglang.attention.kernels.flashmla_abi import Abi, recognise_abi


def flashmla(world: World) -> Callable[[], Tensor]:
    """Dense decode of a plain batch, by the library and nothing else: one call, metadata ready.

    Raises:
        KernelUnavailableError, ImportError: the library is not there, or is one that nobody knows.
    """
    module: Any = import_module("flash_mla")
    abi = recognise_abi(module)
    page, shape = world.shape.page_tokens, world.shape
    pages = len(world.keys) // page
    cache = world.keys[: pages * page].view(pages, page, 1, shape.key_width)
    table = (world.rows[:, ::page] // page).to(torch.int32).contiguous()
    lengths = torch.from_numpy(world.batch.seq_tokens).to(world.keys.device, torch.int32)
    q = world.q[:, None].contiguous()  # [b, 1, H, D]
    extra: dict[str, Any] = {}
    if abi is Abi.EAGER:
        metadata = module.get_mla_metadata(lengths, shape.query_heads, 1)
    else:
        metadata = module.get_mla_metadata()
        extra["is_fp8_kvcache"] = False
    if abi is Abi.LAZY_LEGACY:
        extra["use_legacy"] = True

    def call() -> Tensor:
        out, _ = module.flash_mla_with_kvcache(
            q,
            cache,
            table,
            lengths,
            shape.value_width,
            metadata[0],
            metadata[1],
            softmax_scale=world.scale,
            causal=False,
            **extra,
        )
        result: Tensor = out[:, 0]
        return result

    return call
