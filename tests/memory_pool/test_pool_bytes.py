"""The ledger against memory: what a geometry says a page and a slot cost is what tensors take.

Figures of a page, of a request's slot and of the part of it that is saved are worked out by hand beside
each model, from published widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tessera_sglang.memory_pool.geometry import Geometry, Tier
from tessera_sglang.memory_pool.models import GroupedModel, HybridKind, HybridModel, MlaModel
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.memory_pool.rows import IndexFormat, KvFormat

WINDOW, CSA, HCA = HybridKind.WINDOW, HybridKind.CSA, HybridKind.HCA


def mla(name: str, layers: int, heads: int = 128, index_width: int = 0) -> MlaModel:
    return MlaModel(
        name, layers, heads, latent=512, rope=64, nope=128, value=128, index_width=index_width
    )


def v4(name: str, *kinds: HybridKind) -> HybridModel:
    return HybridModel(
        name, kinds, content=448, rope=64, window=128, csa_tokens=4, hca_tokens=128, index_width=128
    )


LLAMA_2 = GroupedModel("Llama-2-7B, MHA", 32, 32, 128, (0,) * 32)
LLAMA_3 = GroupedModel("Llama-3-8B, GQA", 32, 8, 128, (0,) * 32)
SMOLLM = GroupedModel("SmolLM2-135M, GQA", 9, 3, 64, (0,) * 30)
STARCODER = GroupedModel("StarCoder, MQA", 48, 1, 128, (0,) * 40)
GPT_OSS = GroupedModel("gpt-oss-20b, GQA with windows", 64, 8, 64, (128, 0) * 12)
WINDOWS_ONLY = GroupedModel("windows only", 8, 2, 64, (256,) * 4)
V2, V3, V32 = mla("DeepSeek-V2", 60), mla("DeepSeek-V3", 61), mla("DeepSeek-V3.2", 61, 128, 128)
KIMI = mla("Kimi-K2", 61, 64)
FLASH = v4("DeepSeek-V4-Flash", WINDOW, WINDOW, *(CSA, HCA) * 20, CSA)
PRO = v4("DeepSeek-V4-Pro", HCA, HCA, *(CSA, HCA) * 29, CSA)

# 32 rows of an entry and of an indexer key in a page of 128, and one row of an entry
CSA_FP4, CSA_FP8, HCA_PAGE = 32 * (584 + 68), 32 * (584 + 132), 584
# window of 128 entries; float32 series and gate of what a compressor carries
RING = 128 * 584
OVERLAP, TAIL = 4 * 2 * 4 * (512 + 128), 2 * 4 * 2 * 4 * (512 + 128)
HCA_TAIL = 128 * 2 * 4 * 512


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    page_bytes: int
    slot_bytes: int = 0
    boundary_bytes: int = 0


CASES = [
    Case(LLAMA_2.geometry(), 32 * 64 * 2 * 32 * 128 * 2),
    Case(LLAMA_2.geometry(KvFormat.FP8), 32 * 64 * 2 * 32 * 128),
    Case(LLAMA_3.geometry(), 32 * 64 * 2 * 8 * 128 * 2),
    Case(LLAMA_3.geometry(page_tokens=16), 32 * 16 * 2 * 8 * 128 * 2),
    Case(LLAMA_3.geometry(page_tokens=1), 32 * 2 * 8 * 128 * 2),
    Case(LLAMA_3.geometry(tensor_parallel=2), 32 * 64 * 2 * 4 * 128 * 2),
    Case(LLAMA_3.geometry(tensor_parallel=16), 32 * 64 * 2 * 1 * 128 * 2),
    Case(SMOLLM.geometry(KvFormat.FP32), 30 * 64 * 2 * 3 * 64 * 4),
    Case(STARCODER.geometry(KvFormat.FP16), 40 * 64 * 2 * 128 * 2),
    Case(GPT_OSS.geometry(), 12 * 64 * 2048, 12 * 128 * 2048, 12 * 128 * 2048),
    Case(WINDOWS_ONLY.geometry(), 0, 4 * 256 * 512, 4 * 256 * 512),
    Case(V2.geometry(), 60 * 64 * 1152),
    Case(V3.geometry(), 61 * 64 * 1152),
    Case(V3.geometry(KvFormat.FP8_PACKED), 61 * 64 * 656),
    Case(V3.geometry(KvFormat.FP8), 61 * 64 * 576),
    Case(V3.geometry(tensor_parallel=8), 61 * 64 * 1152),
    Case(KIMI.geometry(KvFormat.FP8_PACKED), 61 * 64 * 656),
    Case(V32.geometry(), 61 * 64 * (1152 + 132)),
    Case(V32.geometry(KvFormat.FP8_PACKED, IndexFormat.FP8), 61 * 64 * (656 + 132)),
    Case(V32.geometry(KvFormat.FP8_PACKED, IndexFormat.BF16), 61 * 64 * (656 + 256)),
    Case(
        FLASH.geometry(),
        21 * CSA_FP4 + 20 * HCA_PAGE,
        43 * RING + 21 * (OVERLAP + TAIL) + 20 * HCA_TAIL,
        43 * RING + 21 * OVERLAP,
    ),
    Case(
        PRO.geometry(),
        30 * CSA_FP4 + 31 * HCA_PAGE,
        61 * RING + 30 * (OVERLAP + TAIL) + 31 * HCA_TAIL,
        61 * RING + 30 * OVERLAP,
    ),
    Case(
        PRO.geometry(index=IndexFormat.FP8),
        30 * CSA_FP8 + 31 * HCA_PAGE,
        61 * RING + 30 * (OVERLAP + TAIL) + 31 * HCA_TAIL,
        61 * RING + 30 * OVERLAP,
    ),
    Case(
        PRO.geometry(KvFormat.BF16, page_tokens=256),
        30 * 64 * (1024 + 68) + 31 * 2 * 1024,
        61 * 128 * 1024 + 30 * (OVERLAP + TAIL) + 31 * HCA_TAIL,
        61 * 128 * 1024 + 30 * OVERLAP,
    ),
]


def named(case: Case) -> str:
    return f"{case.geometry.name}, {case.page_bytes} B"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_ledger_is_what_tensors_take(case: Case) -> None:
    """Pages, slots and tails, plane by plane and in sum; a handle spans what it says."""
    geometry = case.geometry
    assert geometry.page_bytes == case.page_bytes
    assert (geometry.slot_bytes, geometry.boundary_bytes) == (case.slot_bytes, case.boundary_bytes)

    pages, slots, running = 2, 3, 1
    pool = TwoTierPool(geometry, pages=pages, slots=slots, running=running)
    transient_bytes = case.slot_bytes - case.boundary_bytes
    assert pool.paged.nbytes == (pages + 1) * case.page_bytes
    assert pool.arena.nbytes == (slots + 1) * case.boundary_bytes + (running + 1) * transient_bytes
    pool.check_invariants()

    total = 0
    drawn, slot = pool.paged.allocate(1), pool.arena.allocate(1)
    assert drawn is not None
    assert slot is not None
    for layer, plane in geometry.planes(Tier.PAGED):
        tensor = pool.paged.tensor(layer, plane.name)
        rows, row_bytes = geometry.page_shape(plane)
        assert tensor.shape == (pages + 1, rows, row_bytes)
        assert pool.table.resolve(pool.paged.handle(layer, plane.name, int(drawn[0]))).nbytes == (
            rows * row_bytes
        )
        total += tensor.nbytes
    for layer, plane in geometry.planes(Tier.ARENA):
        tensor = pool.arena.tensor(layer, plane.name)
        units = running if plane.transient else slots
        assert tensor.shape == ((units + 1) * plane.rows, plane.row_bytes)
        handle = pool.arena.handle(layer, plane.name, int(slot[0]))
        assert pool.table.resolve(handle).nbytes == plane.slot_bytes
        total += tensor.nbytes
    assert total == pool.nbytes == pool.table.nbytes
    assert len(pool.table) == sum(len(layer.planes) for layer in geometry.layers)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_regions_are_seen_in_their_own_dtype(case: Case) -> None:
    """Every region of every kind of row, with its bytes, and without a copy."""
    pool = TwoTierPool(case.geometry, pages=1, slots=1)
    seen = set()
    for tier, store in ((Tier.PAGED, pool.paged), (Tier.ARENA, pool.arena)):
        for layer, plane in case.geometry.planes(tier):
            if plane in seen:
                continue
            seen.add(plane)
            for region in plane.regions:
                view = store.view(layer, plane.name, region.name)
                assert view.dtype == region.dtype.torch_dtype
                assert view.shape[-1] == region.storage_elements
                assert view.numel() * view.element_size() == 2 * region.bytes * (
                    case.geometry.page_shape(plane)[0] if tier is Tier.PAGED else plane.rows
                )
                start = store.tensor(layer, plane.name).data_ptr() + plane.offset(region.name)
                assert view.data_ptr() == start


def test_a_pure_latent_model_has_no_arena() -> None:
    for model in (V2, V3, V32, KIMI):
        pool = TwoTierPool(model.geometry(KvFormat.FP8_PACKED), pages=1, slots=64)
        assert (pool.arena.nbytes, pool.arena.size) == (0, 0)
        assert pool.nbytes == pool.paged.nbytes


def test_most_of_a_hybrids_state_is_never_saved() -> None:
    """What the separate tails are for: over three quarters of a V4-Pro slot."""
    geometry = PRO.geometry()
    assert geometry.boundary_bytes < geometry.slot_bytes / 4


def test_memory_is_one_allocation_per_kind_of_plane() -> None:
    """A page is moved in all layers at once, and each layer's part of it is contiguous."""
    pool = TwoTierPool(PRO.geometry(), pages=2, slots=1)
    entries = [pool.paged.tensor(layer, "entries") for layer in (2, 4, 6)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in entries}) == 1
    assert all(tensor.is_contiguous() for tensor in entries)
    assert not torch.cat(entries).any(), "masked padding must be finite"
