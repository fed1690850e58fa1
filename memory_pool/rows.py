"""The rows that attention keeps: what one layer of each kind caches, in the formats kernels read.

Widths come from the model, formats from the kernels. Sources, all in SGLang 0.5.23:

- packed FP8 MLA, 512 E4M3 + a scale per 128 of them + BF16 rope = 656 B: ``calculate_mla_kv_cache_dim``
  in ``mem_cache/kv_cache_configurator.py``, and FlashMLA's sparse decode;
- DeepSeek-V4 entries, 448 E4M3 + 64 BF16 rope + a UE8M0 scale per 64 and a byte of padding = 584 B:
  ``KVLayout.V4`` in ``kernels/ops/attention/dsv4/kv_layout.py``. It lays the scales of a page behind
  all its entries, here they stand in each row; the bytes are the same;
- indexer keys, 128 E4M3 + a FP32 scale = 132 B, or 128 FP4 + a UE8M0 scale per 32 = 68 B:
  ``mem_cache/index_key_cache.py`` and ``get_dsv4_indexer_bytes_per_token``;
- compressor state in FP32: ``SGLANG_DSV4_COMPRESS_STATE_DTYPE``.

What a compressor carries from one token to the next is read from ``DeepseekV4CSACache`` and
``DeepseekV4HCACache`` of transformers' ``models/deepseek_v4``.
"""

from __future__ import annotations

from enum import Enum

from .geometry import Dtype, LayerGeometry, LayerKind, Plane, Region, Tier

MLA_SCALE_ELEMENTS = 128  # latents under one FP32 scale
V4_SCALE_ELEMENTS = 64  # content elements under one UE8M0 scale
V4_SCALES_ALIGN_BYTES = 8  # seven scales and a byte of padding
FP8_INDEX_SCALE_ELEMENTS = 128
FP4_INDEX_SCALE_ELEMENTS = 32


class KvFormat(Enum):
    """How latents, entries, keys and values are stored. Values are what the command line takes."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_PACKED = "fp8-packed"  # FP8 with scales, rope in BF16; latents and V4 entries only
    FP8 = "fp8"  # everything in FP8, no scales


class IndexFormat(Enum):
    """How the keys of a sparse layer's indexer are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


_WHOLE = {
    KvFormat.BF16: Dtype.BF16,
    KvFormat.FP16: Dtype.FP16,
    KvFormat.FP32: Dtype.FP32,
    KvFormat.FP8: Dtype.FP8_E4M3,
}


def grouped_layer(
    *,
    heads: int,
    kv_heads: int,
    key: int,
    value: int,
    kv: KvFormat,
    window: int = 0,
    tensor_parallel: int = 1,
) -> LayerGeometry:
    """Keys and values per head: MHA, GQA, MQA, or a sliding window of ``window`` tokens.

    ``heads`` and ``kv_heads`` are the model's, ``key`` and ``value`` widths of one head. Ranks share
    the KV heads out; where there are more ranks than heads each has one, and some have the same.
    Raises ValueError where neither number divides the other, and for packed FP8, which only latents
    and entries have.
    """
    if kv is KvFormat.FP8_PACKED:
        raise ValueError(f"keys and values have no {kv.value} format; use bf16, fp16, fp32 or fp8")
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        raise ValueError(
            f"{kv_heads} KV heads can not be dealt out to {tensor_parallel} tensor-parallel ranks: "
            "one number must divide the other"
        )
    share = max(kv_heads // tensor_parallel, 1)
    tier, rows = (Tier.ARENA, window) if window else (Tier.PAGED, 0)
    planes = tuple(
        Plane(name, tier, 1, (Region(name, share * width, _WHOLE[kv]),), rows=rows)
        for name, width in (("key", key), ("value", value))
    )
    kind = LayerKind.SWA if window else _head_kind(heads, kv_heads)
    return LayerGeometry(kind, planes, replicas=max(tensor_parallel // kv_heads, 1))


def mla_layer(
    *,
    latent: int,
    rope: int,
    kv: KvFormat,
    index_width: int = 0,
    index: IndexFormat = IndexFormat.FP8,
    replicas: int = 1,
) -> LayerGeometry:
    """One latent row a token, and the indexer's key where the layer is sparse (DeepSeek-V3.2)."""
    regions: tuple[Region, ...]
    if kv is KvFormat.FP8_PACKED:
        regions = (
            Region("latent", latent, Dtype.FP8_E4M3),
            Region(
                "scale", _scales("latent", latent, MLA_SCALE_ELEMENTS), Dtype.FP32, metadata=True
            ),
            Region("rope", rope, Dtype.BF16),
        )
    else:
        regions = (Region("latent", latent, _WHOLE[kv]), Region("rope", rope, _WHOLE[kv]))
    planes = [Plane("latent", Tier.PAGED, 1, regions)]
    if index_width:
        planes.append(Plane("index", Tier.PAGED, 1, index_regions(index_width, index)))
    return LayerGeometry(LayerKind.MLA, tuple(planes), replicas)


def index_regions(width: int, index: IndexFormat) -> tuple[Region, ...]:
    """An indexer key of ``width`` elements, and its scales."""
    if index in (IndexFormat.FP32, IndexFormat.BF16):
        return (Region("key", width, Dtype[index.name]),)
    if index is IndexFormat.FP8:
        scales = _scales("index key", width, FP8_INDEX_SCALE_ELEMENTS)
        return (
            Region("key", width, Dtype.FP8_E4M3),
            Region("scale", scales, Dtype.FP32, metadata=True),
        )
    scales = _scales("index key", width, FP4_INDEX_SCALE_ELEMENTS)
    return (
        Region("key", width, Dtype.FP4_E2M1),
        Region("scale", scales, Dtype.UE8M0, metadata=True),
    )


def window_layer(
    *, content: int, rope: int, window: int, kv: KvFormat, replicas: int
) -> LayerGeometry:
    """A hybrid's layer without compression: the last ``window`` tokens, keys and values in one."""
    return LayerGeometry(LayerKind.SWA, (_window(content, rope, window, kv),), replicas)


def hca_layer(
    *, content: int, rope: int, window: int, stride: int, kv: KvFormat, replicas: int
) -> LayerGeometry:
    """Heavily compressed attention: an entry per ``stride`` tokens, groups that do not overlap.

    A group in the making keeps series and gate of each of its tokens until it is complete.
    """
    planes = (
        _entries(content, rope, stride, kv),
        _window(content, rope, window, kv),
        _state("tail", content + rope, rows=stride, series=1, transient=True),
    )
    return LayerGeometry(LayerKind.HCA, planes, replicas)


def csa_layer(
    *,
    content: int,
    rope: int,
    window: int,
    stride: int,
    index_width: int,
    kv: KvFormat,
    index: IndexFormat,
    replicas: int,
) -> LayerGeometry:
    """Compressed sparse attention: an entry and an indexer key per ``stride`` tokens.

    Groups overlap: an entry mixes the second series of its own tokens with the first series of the
    group before. So the first series of the last complete group (``overlap``) is needed to go on from
    a block boundary; both series of the group in the making (``tail``) are not. The indexer
    compresses its keys in the same way.
    """
    width = content + rope
    planes = (
        _entries(content, rope, stride, kv),
        Plane("index", Tier.PAGED, stride, index_regions(index_width, index)),
        _window(content, rope, window, kv),
        _state("overlap", width, rows=stride, series=1),
        _state("tail", width, rows=stride, series=2, transient=True),
        _state("index_overlap", index_width, rows=stride, series=1),
        _state("index_tail", index_width, rows=stride, series=2, transient=True),
    )
    return LayerGeometry(LayerKind.CSA, planes, replicas)


def _entries(content: int, rope: int, stride: int, kv: KvFormat) -> Plane:
    regions, padding = _v4_row(content, rope, kv)
    return Plane("entries", Tier.PAGED, stride, regions, padding_bytes=padding)


def _window(content: int, rope: int, window: int, kv: KvFormat) -> Plane:
    regions, padding = _v4_row(content, rope, kv)
    return Plane("window", Tier.ARENA, 1, regions, rows=window, padding_bytes=padding)


def _v4_row(content: int, rope: int, kv: KvFormat) -> tuple[tuple[Region, ...], int]:
    """Regions and padding of an entry, which serves as key and as value."""
    if kv is not KvFormat.FP8_PACKED:
        return (Region("content", content, _WHOLE[kv]), Region("rope", rope, _WHOLE[kv])), 0
    scales = _scales("content", content, V4_SCALE_ELEMENTS)
    regions = (
        Region("content", content, Dtype.FP8_E4M3),
        Region("rope", rope, Dtype.BF16),
        Region("scale", scales, Dtype.UE8M0, metadata=True),
    )
    return regions, -scales % V4_SCALES_ALIGN_BYTES


def _state(name: str, width: int, *, rows: int, series: int, transient: bool = False) -> Plane:
    regions = (
        Region("series", series * width, Dtype.FP32),
        Region("gate", series * width, Dtype.FP32),
    )
    return Plane(name, Tier.ARENA, 1, regions, rows=rows, transient=transient)


def _scales(what: str, elements: int, per_scale: int) -> int:
    if elements % per_scale:
        raise ValueError(
            f"{what} of {elements} elements does not divide into scales of {per_scale}"
        )
    return elements // per_scale


def _head_kind(heads: int, kv_heads: int) -> LayerKind:
    if kv_heads == heads:
        return LayerKind.MHA
    return LayerKind.MQA if kv_heads == 1 else LayerKind.GQA
