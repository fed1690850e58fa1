"""The few numbers of a model that decide what it caches, and the geometry that follows.

One record per way of attending: :class:`GroupedModel` (keys and values per head), :class:`MlaModel`
(a latent and rotary channels), :class:`HybridModel` (DeepSeek-V4). They are read from a config by
:func:`memory_pool.model_geometry.read_model`, or written by hand.

Each has ``geometry(kv, index, page_tokens=…, tensor_parallel=…)``, which is that of one rank. ``kv``
and ``index`` None stand for the model's own formats, ``page_tokens`` None for the smallest page that
splits nothing and has 64 tokens. It raises ValueError where they do not go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .geometry import Geometry, LayerGeometry, default_page_tokens
from .rows import (
    IndexFormat,
    KvFormat,
    csa_layer,
    grouped_layer,
    hca_layer,
    mla_layer,
    window_layer,
)


class HybridKind(Enum):
    """What a DeepSeek-V4 layer reads besides its window; values are transformers' ``layer_types``."""

    WINDOW = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclass(frozen=True, slots=True)
class GroupedModel:
    """Keys and values per head in every layer; some layers may keep a sliding window only."""

    name: str
    heads: int
    kv_heads: int
    head_width: int
    windows: tuple[int, ...]  # per layer: tokens of its sliding window, 0 for the whole context

    def geometry(
        self,
        kv: KvFormat | None = None,
        index: IndexFormat | None = None,
        *,
        page_tokens: int | None = None,
        tensor_parallel: int = 1,
    ) -> Geometry:
        """One rank's cache; stored in BF16 unless told otherwise."""
        if index is not None:
            raise ValueError(f"{self.name} has no indexer to keep in {index.value}")
        layers = [
            grouped_layer(
                heads=self.heads,
                kv_heads=self.kv_heads,
                key=self.head_width,
                value=self.head_width,
                kv=kv or KvFormat.BF16,
                window=window,
                tensor_parallel=tensor_parallel,
            )
            for window in self.windows
        ]
        return _cut(self.name, layers, page_tokens)

    def expanded(self) -> Geometry:
        """For comparison only: every query head with keys and values of its own, BF16."""
        whole = GroupedModel(self.name, self.heads, self.heads, self.head_width, self.windows)
        return whole.geometry()


@dataclass(frozen=True, slots=True)
class MlaModel:
    """A latent and rotary channels in every layer, the same on every rank."""

    name: str
    layers: int
    heads: int
    latent: int
    rope: int
    nope: int  # width of a head's unrotated key, once expanded
    value: int  # width of a head's value, once expanded
    index_width: int = 0  # of the sparse indexer's key; 0 where attention is dense

    def geometry(
        self,
        kv: KvFormat | None = None,
        index: IndexFormat | None = None,
        *,
        page_tokens: int | None = None,
        tensor_parallel: int = 1,
    ) -> Geometry:
        """One rank's cache; BF16, and FP8 indexer keys, unless told otherwise."""
        if index is not None and not self.index_width:
            raise ValueError(f"{self.name} has no indexer to keep in {index.value}")
        layer = mla_layer(
            latent=self.latent,
            rope=self.rope,
            kv=kv or KvFormat.BF16,
            index_width=self.index_width,
            index=index or IndexFormat.FP8,
            replicas=tensor_parallel,
        )
        return _cut(self.name, [layer] * self.layers, page_tokens)

    def expanded(self, *, key: int | None = None) -> Geometry:
        """For comparison only: keys and values per head in BF16, never stored.

        A key is ``nope + rope`` wide unless ``key`` says otherwise; published tables often give keys
        the width of values.
        """
        layer = grouped_layer(
            heads=self.heads,
            kv_heads=self.heads,
            key=key or self.nope + self.rope,
            value=self.value,
            kv=KvFormat.BF16,
        )
        return _cut(self.name, [layer] * self.layers, None)


@dataclass(frozen=True, slots=True)
class HybridModel:
    """DeepSeek-V4: every layer has a window, most have compressed entries, keys are values."""

    name: str
    kinds: tuple[HybridKind, ...]  # per layer
    content: int
    rope: int
    window: int
    csa_tokens: int
    hca_tokens: int
    index_width: int

    def geometry(
        self,
        kv: KvFormat | None = None,
        index: IndexFormat | None = None,
        *,
        page_tokens: int | None = None,
        tensor_parallel: int = 1,
    ) -> Geometry:
        """One rank's cache; packed FP8 entries and FP4 indexer keys unless told otherwise."""
        kv = kv or KvFormat.FP8_PACKED
        layers = {
            HybridKind.WINDOW: window_layer(
                content=self.content,
                rope=self.rope,
                window=self.window,
                kv=kv,
                replicas=tensor_parallel,
            ),
            HybridKind.CSA: csa_layer(
                content=self.content,
                rope=self.rope,
                window=self.window,
                stride=self.csa_tokens,
                index_width=self.index_width,
                kv=kv,
                index=index or IndexFormat.FP4,
                replicas=tensor_parallel,
            ),
            HybridKind.HCA: hca_layer(
                content=self.content,
                rope=self.rope,
                window=self.window,
                stride=self.hca_tokens,
                kv=kv,
                replicas=tensor_parallel,
            ),
        }
        return _cut(self.name, [layers[kind] for kind in self.kinds], page_tokens)


AnyModel = GroupedModel | MlaModel | HybridModel


def _cut(name: str, layers: Sequence[LayerGeometry], page_tokens: int | None) -> Geometry:
    if page_tokens is None:
        page_tokens = default_page_tokens(layers)
    return Geometry(name, tuple(layers), page_tokens)
