"""Every format that a model can be cached in, beside what it is compared with, and printed figures.

A format has a key ("bf16", "fp8-packed"), a label and a geometry. The first one is the baseline: what
attention without compression would keep; DeepSeek-V4 is compared with its predecessor as well. What is
only compared with is never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from .geometry import Geometry, LayerKind
from .known_models import KNOWN, Printed, Unit
from .model_geometry import read_model
from .models import AnyModel, GroupedModel, HybridModel, MlaModel
from .rows import (
    FP8_INDEX_SCALE_ELEMENTS,
    MLA_SCALE_ELEMENTS,
    V4_SCALE_ELEMENTS,
    IndexFormat,
    KvFormat,
    grouped_layer,
)

PREDECESSOR = "deepseek-v3.2"

Formats = Mapping[str, tuple[str, Geometry]]  # label and geometry by key, baseline first


@dataclass(frozen=True, slots=True)
class Comparison:
    """A printed figure beside the exact one."""

    printed: Printed
    exact: Fraction  # in the printed figure's unit
    rounded: str  # to the decimals that were printed; at least one where it differs
    agrees: bool


def formats_of(model: AnyModel) -> Formats:
    """Every format of a model, whole on one rank. Those that its widths do not fit are left out."""
    if isinstance(model, MlaModel):
        return dict(_mla_formats(model))
    if isinstance(model, HybridModel):
        return dict(_hybrid_formats(model))
    return dict(_grouped_formats(model))


def _grouped_formats(model: GroupedModel) -> Iterator[tuple[str, tuple[str, Geometry]]]:
    yield "mha", (f"MHA, {model.heads} heads of {model.head_width}, BF16", model.expanded())
    heads = f"{model.kv_heads} KV heads of {model.head_width}"
    yield "bf16", (f"{heads}, BF16", model.geometry(KvFormat.BF16))
    yield "fp8", (f"{heads}, FP8", model.geometry(KvFormat.FP8))


def _mla_formats(model: MlaModel) -> Iterator[tuple[str, tuple[str, Geometry]]]:
    mha = f"MHA, {model.heads} heads of {model.value}, BF16"
    yield "mha", (mha, model.expanded(key=model.value))
    wide = f"expanded, keys {model.nope + model.rope}, values {model.value}, BF16"
    yield "expanded", (wide, model.expanded())
    indexed = " + indexer FP8" if model.index_width else ""
    yield "bf16", ("MLA, BF16" + indexed, model.geometry(KvFormat.BF16))
    if model.latent % MLA_SCALE_ELEMENTS == 0:
        yield "fp8-packed", ("MLA, packed FP8" + indexed, model.geometry(KvFormat.FP8_PACKED))
    yield "fp8", ("MLA, plain FP8" + indexed, model.geometry(KvFormat.FP8))


def _hybrid_formats(model: HybridModel) -> Iterator[tuple[str, tuple[str, Geometry]]]:
    layer = grouped_layer(heads=64, kv_heads=8, key=128, value=128, kv=KvFormat.BF16)
    baseline = Geometry(model.name, (layer,) * len(model.kinds), page_tokens=64)
    yield "gqa8", ("GQA, 8 KV heads of 128, BF16", baseline)
    yield "v3.2", ("DeepSeek-V3.2, MLA packed FP8, indexer FP8, its 61 layers", _predecessor())
    bf16, fp8, fp4 = IndexFormat.BF16, IndexFormat.FP8, IndexFormat.FP4
    yield "bf16", ("BF16, indexer BF16", model.geometry(KvFormat.BF16, bf16))
    if model.content % V4_SCALE_ELEMENTS or model.index_width % FP8_INDEX_SCALE_ELEMENTS:
        return
    packed = KvFormat.FP8_PACKED
    yield "fp8-packed", ("packed FP8, indexer FP4", model.geometry(packed, fp4))
    yield "fp8-packed+fp8", ("packed FP8, indexer FP8", model.geometry(packed, fp8))
    yield "fp8", ("plain FP8, indexer FP4", model.geometry(KvFormat.FP8, fp4))


def _predecessor() -> Geometry:
    """What published shares of DeepSeek-V4 are taken of: V3.2 as it is served, 656 + 132 B a layer."""
    model = read_model(KNOWN[PREDECESSOR].config, PREDECESSOR)
    return model.geometry(KvFormat.FP8_PACKED, IndexFormat.FP8)


def compare(model: AnyModel, formats: Formats, printed: Iterable[Printed]) -> Iterator[Comparison]:
    """Each printed figure beside the exact one. A figure agrees when it is the exact one, rounded."""
    for figure in printed:
        exact = _exact(model, formats, figure)
        decimals = len(figure.figure.partition(".")[2])
        agrees = Fraction(figure.figure) == _round(exact, decimals)
        shown = decimals if agrees else max(decimals, 1)
        yield Comparison(figure, exact, f"{float(_round(exact, shown)):.{shown}f}", agrees)


def _round(value: Fraction, decimals: int) -> Fraction:
    """Half upwards, so that 4.5 printed as 4 is not taken for rounding."""
    scale: int = 10**decimals
    return Fraction(math.floor(value * scale + Fraction(1, 2)), scale)


def _exact(model: AnyModel, formats: Formats, figure: Printed) -> Fraction:
    """The figure's exact value, in its unit."""
    if figure.of == "window" or figure.of in LayerKind.__members__:
        return _of_a_layer(model.geometry(), figure.of) / figure.unit.size
    dividend, _, divisor = figure.of.partition("/")
    size = formats[dividend][1].bytes_per_token
    if not divisor:
        return size * figure.tokens / figure.unit.size
    quotient = size / formats[divisor][1].bytes_per_token
    return quotient * 100 if figure.unit is Unit.PERCENT else quotient


def _of_a_layer(geometry: Geometry, of: str) -> Fraction:
    """Content per token of a kind of layer, or of a row of its window."""
    if of == "window":
        return Fraction(geometry.layers[0].plane("window").content_bytes)
    layer = next(layer for layer in geometry.layers if layer.kind is LayerKind[of])
    return layer.content_bytes_per_token
