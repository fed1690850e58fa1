"""What a model's cache costs, line by line: the figures behind ``tessera-sglang layout``.

Everything is derived from :class:`memory_pool.geometry.Geometry` in exact arithmetic; rounding is left
to whoever prints. Two accounts are kept apart:

- *content*: the model's own numbers, which is what published tables of DeepSeek-V4 count;
- *stored*: rows as pools allocate them, with scales and padding. Equal to ``nbytes`` of the tensors.

Contexts are in tokens, everything else in bytes unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .formats import Comparison, Formats, compare, formats_of
from .geometry import Geometry, LayerGeometry, Plane, Region, Tier
from .keys import TOKEN_BYTES
from .known_models import KnownModel
from .models import AnyModel, HybridModel
from .rows import IndexFormat, KvFormat

PAGE_KEY_BYTES = 16  # of the index, beside the token ids of the page
ROW_TABLE_BYTES = 4  # SGLang's req_to_token: an int32 per token of a request's row
SGLANG_V4_PAGE_ALIGN_BYTES = 576  # KVLayout.V4.page_align: SGLang pads every page of V4 entries


@dataclass(frozen=True, slots=True)
class PlaneLine:
    """One tensor of one kind of layer."""

    kind: str
    layers: int
    plane: str
    tier: str
    tokens: int  # that share a row
    rows: int  # in one page, or in one request's slot
    row: str  # regions in order, as text
    content_bytes: int  # of a row
    row_bytes: int
    bytes_per_token: Fraction


@dataclass(frozen=True, slots=True)
class KindLine:
    """All layers that are alike. Per token: of one layer. In a context: of all of them, paged."""

    kind: str
    layers: int
    content_bytes_per_token: Fraction
    bytes_per_token: Fraction
    slot_bytes: int  # arena of one request, one layer
    context_bytes: tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class FormatLine:
    """The whole model in one format: one copy, paged, stored."""

    key: str
    label: str
    bytes_per_token: Fraction  # all layers
    bytes_per_layer: Fraction | None  # per token, where every layer costs the same
    context_bytes: tuple[Fraction, ...]
    times_smaller: Fraction  # than the first line


@dataclass(frozen=True, slots=True)
class PageLine:
    """One page over all layers of one rank."""

    page_tokens: int
    block_tokens: int
    content_bytes: int
    scale_bytes: int
    padding_bytes: int
    page_bytes: int
    metadata_share: Fraction
    host_bytes: int  # token ids and key that the index keeps for it
    sglang_page_bytes: int | None  # the same page in SGLang's own V4 pool; None for other models


@dataclass(frozen=True, slots=True)
class Correction:
    """One step from content to what memory holds, for each context."""

    name: str
    context_bytes: tuple[Fraction, ...]
    total: bool = False  # a sum of the lines above, not a step


@dataclass(frozen=True, slots=True)
class Ledger:
    """Everything that is known of one model's cache."""

    model: str
    source: str
    layers: int
    tensor_parallel: int
    contexts: tuple[int, ...]
    page: PageLine
    slot_bytes: int
    boundary_bytes: int  # of the slot, what a block boundary needs
    planes: tuple[PlaneLine, ...]
    kinds: tuple[KindLine, ...]
    formats: tuple[FormatLine, ...]
    corrections: tuple[Correction, ...]
    comparisons: tuple[Comparison, ...]


def build(
    model: AnyModel,
    contexts: Sequence[int],
    *,
    kv: KvFormat | None = None,
    index: IndexFormat | None = None,
    page_tokens: int | None = None,
    tensor_parallel: int = 1,
    known: KnownModel | None = None,
) -> Ledger:
    """The ledger of a model at the given context lengths.

    Formats, page and ranks as for ``model.geometry``, whose ValueErrors it raises. ``known`` adds the
    source and the printed figures.
    """
    geometry = model.geometry(kv, index, page_tokens=page_tokens, tensor_parallel=tensor_parallel)
    formats = formats_of(model)
    return Ledger(
        model=model.name,
        source=known.source if known else "",
        layers=len(geometry.layers),
        tensor_parallel=tensor_parallel,
        contexts=tuple(contexts),
        page=_page(model, geometry),
        slot_bytes=geometry.slot_bytes,
        boundary_bytes=geometry.boundary_bytes,
        planes=tuple(_planes(geometry)),
        kinds=tuple(_kinds(geometry, contexts)),
        formats=tuple(_format_lines(formats, contexts)),
        corrections=tuple(_corrections(geometry, contexts, tensor_parallel)),
        comparisons=tuple(compare(model, formats, known.printed if known else ())),
    )


def _groups(geometry: Geometry) -> Iterator[tuple[LayerGeometry, int]]:
    """Every kind of layer once, with how many there are, in order of first appearance."""
    counts: dict[LayerGeometry, int] = {}
    for layer in geometry.layers:
        counts[layer] = counts.get(layer, 0) + 1
    yield from counts.items()


def _planes(geometry: Geometry) -> Iterator[PlaneLine]:
    for layer, count in _groups(geometry):
        for plane in layer.planes:
            paged = plane.tier is Tier.PAGED
            yield PlaneLine(
                kind=layer.kind.value,
                layers=count,
                plane=plane.name,
                tier=plane.tier.value,
                tokens=plane.tokens,
                rows=geometry.page_shape(plane)[0] if paged else plane.rows,
                row=_row(plane),
                content_bytes=plane.content_bytes,
                row_bytes=plane.row_bytes,
                bytes_per_token=plane.bytes_per_token,
            )


def _row(plane: Plane) -> str:
    parts = [f"{r.name} {r.elements} {r.dtype.name}" for r in plane.regions]
    if plane.padding_bytes:
        parts.append(f"padding {plane.padding_bytes} B")
    return " + ".join(parts)


def _kinds(geometry: Geometry, contexts: Sequence[int]) -> Iterator[KindLine]:
    for layer, count in _groups(geometry):
        yield KindLine(
            kind=layer.kind.value,
            layers=count,
            content_bytes_per_token=layer.content_bytes_per_token,
            bytes_per_token=layer.bytes_per_token,
            slot_bytes=layer.slot_bytes,
            context_bytes=tuple(layer.bytes_per_token * count * n for n in contexts),
        )


def _format_lines(formats: Formats, contexts: Sequence[int]) -> Iterator[FormatLine]:
    baseline = next(iter(formats.values()))[1].bytes_per_token
    for key, (label, geometry) in formats.items():
        total = geometry.bytes_per_token
        of_a_layer = {layer.bytes_per_token for layer in geometry.layers}
        yield FormatLine(
            key=key,
            label=label,
            bytes_per_token=total,
            bytes_per_layer=of_a_layer.pop() if len(of_a_layer) == 1 else None,
            context_bytes=tuple(total * tokens for tokens in contexts),
            times_smaller=baseline / total if total else Fraction(0),
        )


def _page(model: AnyModel, geometry: Geometry) -> PageLine:
    planes = [plane for _, plane in geometry.planes(Tier.PAGED)]
    rows = [geometry.page_shape(plane)[0] for plane in planes]
    scales = sum(n * _metadata(plane.regions) for n, plane in zip(rows, planes, strict=True))
    padding = sum(n * plane.padding_bytes for n, plane in zip(rows, planes, strict=True))
    return PageLine(
        page_tokens=geometry.page_tokens,
        block_tokens=geometry.block_tokens,
        content_bytes=geometry.page_bytes - scales - padding,
        scale_bytes=scales,
        padding_bytes=padding,
        page_bytes=geometry.page_bytes,
        metadata_share=geometry.metadata_share,
        host_bytes=geometry.page_tokens * TOKEN_BYTES + PAGE_KEY_BYTES,
        sglang_page_bytes=_sglang_page(model, geometry),
    )


def _metadata(regions: Iterable[Region]) -> int:
    return sum(region.bytes for region in regions if region.metadata)


def _sglang_page(model: AnyModel, geometry: Geometry) -> int | None:
    """The page in SGLang's own V4 pool, which pads entries and leaves indexer keys as they are."""
    entries = [plane for _, plane in geometry.planes(Tier.PAGED) if plane.name == "entries"]
    if not isinstance(model, HybridModel) or not all(plane.padding_bytes for plane in entries):
        return None
    added = 0
    for plane in entries:
        rows, stride = geometry.page_shape(plane)
        added += -rows * stride % SGLANG_V4_PAGE_ALIGN_BYTES
    return geometry.page_bytes + added


def _corrections(geometry: Geometry, contexts: Sequence[int], ranks: int) -> Iterator[Correction]:
    """From content to memory, step by step."""
    planes = [plane for _, plane in geometry.planes(Tier.PAGED)]
    scales = sum((Fraction(_metadata(p.regions), p.tokens) for p in planes), Fraction(0))
    padding = sum((Fraction(p.padding_bytes, p.tokens) for p in planes), Fraction(0))

    def per_token(name: str, size: Fraction) -> Correction:
        return Correction(name, tuple(size * n for n in contexts))

    yield per_token("content", geometry.content_bytes_per_token)
    yield per_token("scales", scales)
    yield per_token("row padding", padding)
    paged = [geometry.pages(n) * geometry.page_bytes for n in contexts]
    unfilled = tuple(
        size - geometry.bytes_per_token * n for size, n in zip(paged, contexts, strict=True)
    )
    yield Correction("last page, not filled", unfilled)
    slot = geometry.slot_bytes
    yield Correction("arena slot of the request", tuple(Fraction(slot) for _ in contexts))
    rank = tuple(Fraction(size + slot) for size in paged)
    yield Correction("one rank", rank, total=True)
    if ranks > 1:
        yield Correction(f"all {ranks} ranks", tuple(size * ranks for size in rank), total=True)
        yield Correction("of these, copies", tuple(_copies(geometry, n, ranks) for n in contexts))
    yield per_token("row table, per rank", Fraction(ROW_TABLE_BYTES))
    host = geometry.page_tokens * TOKEN_BYTES + PAGE_KEY_BYTES
    yield Correction(
        "index, on the host", tuple(Fraction(geometry.pages(n) * host) for n in contexts)
    )


def _copies(geometry: Geometry, tokens: int, ranks: int) -> Fraction:
    """What all ranks hold of a context beyond one copy of it."""
    copies = Fraction(0)
    for layer in geometry.layers:
        paged = layer.bytes_per_token * geometry.pages(tokens) * geometry.page_tokens
        copies += (paged + layer.slot_bytes) * (ranks - Fraction(ranks, layer.replicas))
    return copies
