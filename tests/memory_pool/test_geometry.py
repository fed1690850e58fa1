"""Rows, planes and pages: sizes are exact, alignment is checked, nothing splits a group (case 17)."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera_sglang.memory_pool.geometry import (
    Dtype,
    Geometry,
    LayerGeometry,
    LayerKind,
    Plane,
    Region,
    Tier,
    block_tokens,
    default_page_tokens,
)
from tessera_sglang.memory_pool.rows import (
    IndexFormat,
    KvFormat,
    csa_layer,
    grouped_layer,
    hca_layer,
    index_regions,
    mla_layer,
    window_layer,
)

MLA = mla_layer(latent=512, rope=64, kv=KvFormat.BF16)
PACKED = mla_layer(latent=512, rope=64, kv=KvFormat.FP8_PACKED)


def paged(tokens: int, elements: int = 8, dtype: Dtype = Dtype.BF16, name: str = "kv") -> Plane:
    return Plane(name, Tier.PAGED, tokens, (Region("content", elements, dtype),))


def hybrid(*strides: int) -> tuple[LayerGeometry, ...]:
    return tuple(LayerGeometry(LayerKind.HCA, (paged(stride),)) for stride in strides)


def csa(kv: KvFormat = KvFormat.FP8_PACKED, index: IndexFormat = IndexFormat.FP4) -> LayerGeometry:
    return csa_layer(
        content=448, rope=64, window=128, stride=4, index_width=128, kv=kv, index=index, replicas=1
    )


def hca(kv: KvFormat = KvFormat.FP8_PACKED) -> LayerGeometry:
    return hca_layer(content=448, rope=64, window=128, stride=128, kv=kv, replicas=1)


# --- dtypes and regions --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", Dtype)
def test_a_region_has_the_bytes_of_the_tensor_that_stores_it(dtype: Dtype) -> None:
    region = Region("r", 128, dtype)
    tensor = torch.empty(region.storage_elements, dtype=dtype.torch_dtype)
    assert tensor.nbytes == region.bytes == 128 * dtype.bits // 8
    assert tensor.itemsize == dtype.storage_bytes


def test_a_region_of_half_a_byte_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'index': 3 elements of FP4_E2M1 are 12 bits"):
        Region("index", 3, Dtype.FP4_E2M1)
    with pytest.raises(ValueError, match="'empty'"):
        Region("empty", 0, Dtype.BF16)


# --- rows ----------------------------------------------------------------------------------------


def test_packed_fp8_row_of_mla() -> None:
    (row,) = PACKED.planes
    assert [(r.name, row.offset(r.name), r.bytes) for r in row.regions] == [
        ("latent", 0, 512),
        ("scale", 512, 16),
        ("rope", 528, 128),
    ]
    assert (row.row_bytes, row.content_bytes) == (656, 640)


@pytest.mark.parametrize(
    ("kv", "row_bytes"),
    [
        (KvFormat.BF16, 1152),
        (KvFormat.FP16, 1152),
        (KvFormat.FP32, 2304),
        (KvFormat.FP8_PACKED, 656),
        (KvFormat.FP8, 576),
    ],
)
def test_mla_rows(kv: KvFormat, row_bytes: int) -> None:
    layer = mla_layer(latent=512, rope=64, kv=kv)
    assert layer.bytes_per_token == row_bytes
    assert layer.slot_bytes == 0


def test_sparse_mla_keeps_an_indexer_key_beside_the_latent() -> None:
    layer = mla_layer(latent=512, rope=64, kv=KvFormat.FP8_PACKED, index_width=128)
    assert layer.plane("index").row_bytes == 132
    assert layer.bytes_per_token == 656 + 132


@pytest.mark.parametrize(
    ("index", "content", "stored"),
    [(IndexFormat.BF16, 256, 256), (IndexFormat.FP8, 128, 132), (IndexFormat.FP4, 64, 68)],
)
def test_indexer_keys(index: IndexFormat, content: int, stored: int) -> None:
    regions = index_regions(128, index)
    assert sum(r.bytes for r in regions if not r.metadata) == content
    assert sum(r.bytes for r in regions) == stored


def test_v4_table_in_both_accounts() -> None:
    window = window_layer(content=448, rope=64, window=128, kv=KvFormat.FP8_PACKED, replicas=1)
    assert csa().content_bytes_per_token == 160  # (448 + 64·2 + 128/2) / 4
    assert csa().bytes_per_token == 163  # (584 + 68) / 4: with scales and padding
    assert csa(index=IndexFormat.FP8).bytes_per_token == 179
    assert hca().content_bytes_per_token == Fraction(9, 2)  # printed as 4: integer division
    assert (448 + 64 * 2) // 128 == 4
    assert hca().bytes_per_token == Fraction(584, 128)
    assert window.plane("window").content_bytes == 576
    assert window.plane("window").row_bytes == 584
    assert window.bytes_per_token == 0


def test_v4_entries_in_other_formats() -> None:
    bf16 = csa(KvFormat.BF16, IndexFormat.BF16)
    assert (bf16.bytes_per_token, hca(KvFormat.BF16).bytes_per_token) == (320, 8)
    assert hca(KvFormat.FP8).plane("entries").row_bytes == 512


def test_what_a_csa_request_carries() -> None:
    slot = {p.name: (p.rows, p.row_bytes, p.transient) for p in csa().arena}
    assert slot == {
        "window": (128, 584, False),
        "overlap": (4, 2 * 512 * 4, False),  # first series and gate, FP32
        "tail": (4, 2 * 1024 * 4, True),  # both series
        "index_overlap": (4, 2 * 128 * 4, False),
        "index_tail": (4, 2 * 256 * 4, True),
    }
    assert {p.name: (p.rows, p.row_bytes) for p in hca().arena} == {
        "window": (128, 584),
        "tail": (128, 2 * 512 * 4),
    }


def test_rows_that_no_dtype_could_view_are_refused() -> None:
    regions = (Region("latent", 3, Dtype.FP8_E4M3), Region("scale", 1, Dtype.FP32))
    with pytest.raises(ValueError, match=r"'scale' of FP32 at byte 3 .* not aligned to 4"):
        Plane("latent", Tier.PAGED, 1, regions)
    with pytest.raises(ValueError, match="row of 6 is not aligned to 4"):
        Plane("scales", Tier.PAGED, 1, (Region("scale", 1, Dtype.FP32),), padding_bytes=2)


@pytest.mark.parametrize("plane", [*csa().planes, *hca().planes, *PACKED.planes, *MLA.planes])
def test_every_region_can_be_viewed_where_it_lies(plane: Plane) -> None:
    rows = torch.arange(3 * plane.row_bytes, dtype=torch.int64).to(torch.uint8)
    rows = rows.view(3, plane.row_bytes)
    for region in plane.regions:
        start = plane.offset(region.name)
        part = rows[:, start : start + region.bytes].view(region.dtype.torch_dtype)
        assert part.shape == (3, region.storage_elements)
    assert plane.offset(plane.regions[-1].name) + plane.regions[-1].bytes + plane.padding_bytes == (
        plane.row_bytes
    )


# --- planes and layers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": 0}, "positive number of tokens"),
        ({"padding_bytes": -1}, "no negative padding"),
        ({"regions": ()}, "needs a region"),
        ({"rows": 4}, "4 rows per slot in the paged tier"),
        ({"tier": Tier.ARENA}, "0 rows per slot in the arena tier"),
        ({"transient": True}, "only an arena plane"),
        ({"regions": (Region("a", 2, Dtype.BF16),) * 2}, "a named more than once"),
    ],
)
def test_a_plane_that_makes_no_sense_is_refused(change: dict[str, object], complaint: str) -> None:
    sound = {"tier": Tier.PAGED, "tokens": 1, "regions": (Region("r", 2, Dtype.BF16),)}
    with pytest.raises(ValueError, match=complaint):
        Plane("p", **{**sound, **change})  # type: ignore[arg-type]


def test_layers_name_their_planes_once_and_know_them() -> None:
    with pytest.raises(ValueError, match="kv named more than once"):
        LayerGeometry(LayerKind.MLA, (paged(1), paged(1)))
    with pytest.raises(ValueError, match="at least one replica"):
        LayerGeometry(LayerKind.MLA, (paged(1),), replicas=0)
    with pytest.raises(KeyError, match="has no plane 'value'; it has latent"):
        MLA.plane("value")
    with pytest.raises(KeyError, match="has no region 'scale'; it has latent, rope"):
        MLA.planes[0].offset("scale")


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "share", "replicas"),
    [(8, 1, 8, 1), (8, 4, 2, 1), (8, 8, 1, 1), (8, 16, 1, 2), (1, 4, 1, 4)],
)
def test_heads_are_dealt_out_over_ranks(
    kv_heads: int, ranks: int, share: int, replicas: int
) -> None:
    layer = grouped_layer(
        heads=32, kv_heads=kv_heads, key=128, value=128, kv=KvFormat.BF16, tensor_parallel=ranks
    )
    assert [plane.row_bytes for plane in layer.planes] == [share * 256] * 2
    assert layer.replicas == replicas
    assert layer.kind is (LayerKind.MQA if kv_heads == 1 else LayerKind.GQA)


def test_heads_that_can_not_be_dealt_out() -> None:
    with pytest.raises(ValueError, match="3 KV heads can not be dealt out to 2"):
        grouped_layer(heads=9, kv_heads=3, key=64, value=64, kv=KvFormat.BF16, tensor_parallel=2)
    with pytest.raises(ValueError, match="no fp8-packed format"):
        grouped_layer(heads=9, kv_heads=3, key=64, value=64, kv=KvFormat.FP8_PACKED)


def test_a_sliding_window_lives_in_the_arena() -> None:
    layer = grouped_layer(heads=4, kv_heads=4, key=8, value=8, kv=KvFormat.FP8, window=16)
    assert (layer.kind, layer.bytes_per_token) == (LayerKind.SWA, 0)
    assert layer.slot_bytes == 2 * 16 * 4 * 8


# --- blocks and pages ----------------------------------------------------------------------------


def test_block_is_what_splits_nothing() -> None:
    assert block_tokens([MLA]) == 64
    assert block_tokens(hybrid(4, 128)) == 128
    assert block_tokens(hybrid(4, 6)) == 12
    assert block_tokens([MLA, *hybrid(48)]) == 192
    assert block_tokens([grouped_layer(heads=4, kv_heads=2, key=8, value=8, kv=KvFormat.BF16)]) == 1


def test_default_page_is_a_whole_number_of_blocks() -> None:
    assert default_page_tokens(hybrid(1)) == 64
    assert default_page_tokens(hybrid(4, 128)) == 128
    assert default_page_tokens(hybrid(4, 6)) == 72


@pytest.mark.parametrize("page_tokens", [0, 1, 64, 192])
def test_a_page_that_splits_a_group_is_refused(page_tokens: int) -> None:
    wanted = rf"page of {page_tokens} tokens is no multiple of its block of 128 .*use 128"
    with pytest.raises(ValueError, match=wanted):
        Geometry("v4", (csa(), hca()), page_tokens)


def test_a_page_that_flashmla_can_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"page of 16 .*block of 64 .*FlashMLA reads 64"):
        Geometry("mla", (MLA,), 16)
    with pytest.raises(ValueError, match="at least one layer"):
        Geometry("none", (), 64)


def test_a_block_of_v4_is_32_entries_of_csa_and_one_of_hca() -> None:
    geometry = Geometry("v4", (csa(), hca()), 128)
    assert geometry.page_shape(csa().plane("entries")) == (32, 584)
    assert geometry.page_shape(csa().plane("index")) == (32, 68)
    assert geometry.page_shape(hca().plane("entries")) == (1, 584)
    assert geometry.page_bytes == 32 * 584 + 32 * 68 + 584
    assert [(layer, plane.name) for layer, plane in geometry.planes(Tier.PAGED)] == [
        (0, "entries"),
        (0, "index"),
        (1, "entries"),
    ]


def test_metadata_share_of_a_page() -> None:
    assert Geometry("mla", (MLA,), 64).metadata_share == 0
    assert Geometry("mla", (PACKED,), 64).metadata_share == Fraction(16, 656)
    only_windows = grouped_layer(heads=4, kv_heads=4, key=8, value=8, kv=KvFormat.BF16, window=16)
    assert Geometry("swa", (only_windows,), 64).metadata_share == 0


def test_a_boundary_needs_no_group_in_the_making() -> None:
    geometry = Geometry("v4", (csa(), hca()), 128)
    tails = 4 * 8192 + 4 * 2048 + 128 * 4096
    assert geometry.slot_bytes - geometry.boundary_bytes == tails
    assert geometry.boundary_bytes == 2 * 128 * 584 + 4 * 4096 + 4 * 1024


def test_pages_of_a_context() -> None:
    geometry = Geometry("mla", (MLA,), 64)
    assert [geometry.pages(n) for n in (0, 1, 64, 65, 4096)] == [0, 1, 1, 2, 64]


# --- properties ----------------------------------------------------------------------------------

planes = st.builds(
    paged,
    tokens=st.sampled_from([1, 2, 4, 6, 128]),
    elements=st.integers(1, 40).map(lambda n: 8 * n),
    dtype=st.sampled_from(list(Dtype)),
)


@given(st.lists(planes, min_size=1, max_size=6), st.integers(1, 3))
def test_a_page_costs_its_tokens_exactly(found: list[Plane], blocks: int) -> None:
    layers = tuple(LayerGeometry(LayerKind.GQA, (plane,)) for plane in found)
    geometry = Geometry("any", layers, block_tokens(layers) * blocks)
    assert geometry.page_bytes == geometry.bytes_per_token * geometry.page_tokens
    allocated = [
        torch.empty(geometry.page_shape(plane), dtype=torch.uint8)
        for _, plane in geometry.planes(Tier.PAGED)
    ]
    assert geometry.page_bytes == sum(tensor.nbytes for tensor in allocated)


@given(st.lists(planes, min_size=1, max_size=6))
def test_no_smaller_page_would_do(found: list[Plane]) -> None:
    layers = tuple(LayerGeometry(LayerKind.GQA, (plane,)) for plane in found)
    smallest = block_tokens(layers)
    fits = [n for n in range(1, smallest + 1) if all(n % p.tokens == 0 for p in found)]
    assert fits == [smallest]


# --- against SGLang ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kv_layout() -> ModuleType:
    """SGLang's table of V4 layouts, loaded by its path: importing the package takes ten seconds."""
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or sglang.origin is None:
        pytest.skip("SGLang is not installed")
    path = Path(sglang.origin).parent / "kernels/ops/attention/dsv4/kv_layout.py"
    spec = importlib.util.spec_from_file_location("kv_layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_v4_entries_are_sglangs(kv_layout: ModuleType) -> None:
    v4, uniform = kv_layout.KVLayout.V4, kv_layout.KVLayout.UNIFORM_FP8
    entries = hca().plane("entries")
    assert entries.row_bytes == v4.bytes_per_token
    assert entries.content_bytes == v4.data_bytes
    assert entries.region("scale").elements == 448 // v4.tile_size
    assert hca(KvFormat.FP8).plane("entries").row_bytes == uniform.bytes_per_token
