"""Small geometries that the pool's tests share."""

from __future__ import annotations

import torch

from tessera_sglang.memory_pool.geometry import (
    Dtype,
    Geometry,
    LayerGeometry,
    LayerKind,
    Plane,
    Region,
    Tier,
)
from tessera_sglang.memory_pool.rows import KvFormat, mla_layer

CPU = torch.device("cpu")


def plain(page_tokens: int, layers: int = 2) -> Geometry:
    """One float32 channel per token: nothing but pages."""
    plane = Plane("kv", Tier.PAGED, 1, (Region("content", 1, Dtype.FP32),))
    return Geometry("plain", (LayerGeometry(LayerKind.MQA, (plane,)),) * layers, page_tokens)


def windowed(page_tokens: int, window: int, layers: int = 2) -> Geometry:
    """The same with a sliding window, and a group in the making, in a request's slot."""
    paged = Plane("kv", Tier.PAGED, 1, (Region("content", 1, Dtype.FP32),))
    kept = Plane("window", Tier.ARENA, 1, (Region("content", 1, Dtype.FP32),), rows=window)
    tail = Plane("tail", Tier.ARENA, 1, (Region("gate", 2, Dtype.FP32),), rows=4, transient=True)
    full = LayerGeometry(LayerKind.MQA, (paged,))
    hybrid = LayerGeometry(LayerKind.HCA, (paged, kept, tail))
    return Geometry("windowed", (full, *(hybrid,) * (layers - 1)), page_tokens)


def packed_mla(layers: int = 2) -> Geometry:
    """DeepSeek-V3's packed FP8 rows of 656 bytes, in pages of 64 tokens."""
    layer = mla_layer(latent=512, rope=64, kv=KvFormat.FP8_PACKED)
    return Geometry("packed", (layer,) * layers, 64)


def compressed() -> Geometry:
    """Rows shared by 4 tokens and by 8, in pages of 8."""
    region = (Region("content", 2, Dtype.BF16),)
    layers = tuple(
        LayerGeometry(kind, (Plane("entries", Tier.PAGED, tokens, region),))
        for kind, tokens in ((LayerKind.CSA, 4), (LayerKind.HCA, 8))
    )
    return Geometry("compressed", layers, 8)
