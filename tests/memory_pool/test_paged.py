"""The paged tier: one owner per page, bytes where the geometry puts them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from geometries import CPU, compressed, packed_mla, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_sglang.memory_pool.geometry import (
    Dtype,
    Geometry,
    LayerGeometry,
    LayerKind,
    Plane,
    Region,
    Tier,
)
from tessera_sglang.memory_pool.handles import RegionTable, StaleHandle
from tessera_sglang.memory_pool.paged import PagedTier, identity_ranges
from tessera_sglang.memory_pool.rows import KvFormat, window_layer


def tier_of(geometry: Geometry, pages: int) -> PagedTier:
    return PagedTier(geometry, pages=pages, table=RegionTable(), device=CPU)


def allocated(tier: PagedTier, pages: int) -> np.ndarray:
    found = tier.allocate(pages)
    assert found is not None
    return found


# --- pages ---------------------------------------------------------------------------------------


def test_the_reserved_page_is_never_handed_out() -> None:
    """Case 19: padding writes to page 0, so nobody may own it."""
    tier = tier_of(plain(4), 5)
    assert sorted(allocated(tier, 5)) == [1, 2, 3, 4, 5]
    assert tier.allocate(1) is None
    for misuse in (tier.free, tier.check_owned):
        with pytest.raises(AssertionError, match="handed out"):
            misuse(np.array([0]))
    with pytest.raises(AssertionError, match="handed out"):
        tier.free_tokens(np.arange(4))
    tier.check_invariants()


def test_what_can_not_be_had_changes_nothing() -> None:
    tier = tier_of(plain(4), 5)
    taken = allocated(tier, 3)
    assert tier.allocate(3) is None
    assert tier.available == 2
    tier.free(taken)
    assert tier.available == tier.size == 5
    tier.check_invariants()


@pytest.mark.parametrize("misuse", [[2], [1, 1], [6], [-1], [3, 1, 3]])
def test_a_page_is_freed_once_by_who_owns_it(misuse: list[int]) -> None:
    tier = tier_of(plain(4), 5)
    tier.free(allocated(tier, 5)[1:2])
    with pytest.raises(AssertionError):
        tier.free(np.array(misuse))


def test_pages_that_come_back_go_out_first_and_in_order() -> None:
    """Ranks that replay the same calls use the same pages (case 10)."""
    tier = tier_of(plain(4), 8)
    assert allocated(tier, 4).tolist() == [1, 2, 3, 4]
    tier.free(np.array([3, 2]))
    assert allocated(tier, 3).tolist() == [3, 2, 5]


def test_a_page_goes_with_its_last_token_and_once() -> None:
    """Case 9: pages of 8, freed in fours: [0, 12), then [12, 16) of two pages."""
    tier = tier_of(plain(8), 4)
    first = int(allocated(tier, 2)[0]) * 8
    assert tier.free_tokens(np.arange(first, first + 12)).tolist() == [1]
    tier.check_invariants()
    assert tier.available == 3
    assert tier.free_tokens(np.arange(first + 12, first + 16)).tolist() == [2]
    tier.check_invariants()
    assert tier.available == 4


def test_a_token_is_freed_once() -> None:
    tier = tier_of(plain(8), 4)
    tokens = allocated(tier, 1)[0] * 8 + np.arange(8)
    tier.free_tokens(tokens[:4])
    with pytest.raises(AssertionError, match="freed a token twice"):
        tier.free_tokens(tokens[3:5])
    with pytest.raises(AssertionError, match="named a token twice"):
        tier.free_tokens(tokens[[5, 5]])
    with pytest.raises(AssertionError, match="tokens were freed before"):
        tier.free(np.array([1]))


def test_a_page_that_comes_back_has_all_its_tokens() -> None:
    tier = tier_of(plain(8), 1)
    tokens = allocated(tier, 1)[0] * 8 + np.arange(8)
    for _ in range(3):
        assert len(tier.free_tokens(tokens[:5])) == 0
        assert len(tier.free_tokens(tokens[5:])) == 1
        assert allocated(tier, 1).tolist() == [1]


def test_a_flush_takes_everything_back() -> None:
    table = RegionTable()
    tier = PagedTier(plain(8), pages=4, table=table, device=CPU)
    pages = allocated(tier, 3)
    tier.free_tokens(np.arange(8, 12))
    handle = tier.handle(0, "kv", int(pages[1]))
    tier.clear()
    tier.check_invariants()
    assert tier.available == 4
    allocated(tier, 4)
    with pytest.raises(StaleHandle):
        table.resolve(handle)


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9)), max_size=40)


@given(steps)
@settings(max_examples=200, deadline=None)
def test_every_page_has_one_owner(operations: list[tuple[int, int, int]]) -> None:
    """Against a model that maps each owned page to the tokens it has left."""
    tier, owned = tier_of(plain(4, layers=1), 8), dict[int, set[int]]()
    for kind, at, count in operations:
        whole = [page for page, tokens in owned.items() if len(tokens) == 4]
        if kind <= 1:
            pages = tier.allocate(count)
            assert (pages is None) == (count > 8 - len(owned))
            for page in pages if pages is not None else ():
                assert page not in owned
                owned[int(page)] = set(range(4))
        elif kind == 2:
            gone = whole[at : at + count]
            tier.free(np.array(gone, dtype=np.int64))
            for page in gone:
                del owned[page]
        else:
            left = [(page, token) for page in owned for token in owned[page]][at : at + count]
            released = tier.free_tokens(np.array([p * 4 + t for p, t in left], dtype=np.int64))
            for page, token in left:
                owned[page].remove(token)
            empty = sorted(page for page, tokens in owned.items() if not tokens)
            assert released.tolist() == empty
            for page in empty:
                del owned[page]
        tier.check_invariants()
        assert tier.available == 8 - len(owned)
        tier.check_owned(np.array(list(owned), dtype=np.int64))


# --- bytes ---------------------------------------------------------------------------------------


def test_packed_rows_keep_every_byte() -> None:
    """Case 17: rows of 656 bytes, written by region and read as they lie."""
    tier = tier_of(packed_mla(), 2)
    row = torch.arange(656).remainder(251).to(torch.uint8)
    raw = tier.tensor(1, "latent")
    raw[2, 63] = row
    assert torch.equal(raw[2, 63], row)
    latent, scale, rope = (tier.view(1, "latent", name) for name in ("latent", "scale", "rope"))
    assert (latent.dtype, tuple(latent.shape)) == (torch.float8_e4m3fn, (3, 64, 512))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (3, 64, 4))
    assert (rope.dtype, tuple(rope.shape)) == (torch.bfloat16, (3, 64, 64))
    parts = [part[2, 63].contiguous().view(torch.uint8) for part in (latent, scale, rope)]
    assert torch.equal(torch.cat(parts), row)
    rope[2, 63] = 1.5
    assert torch.equal(raw[2, 63, 528:].view(torch.bfloat16), torch.full((64,), 1.5).bfloat16())
    assert torch.equal(raw[2, 63, :528], row[:528]), "a view writes its own region only"
    assert raw[2, :63].count_nonzero() == raw[1].count_nonzero() == 0


def test_identity_is_what_does_not_depend_on_position() -> None:
    """Case 17: [0, 528) of a packed row; its rope lies in [528, 656)."""
    (_, plane), *_ = packed_mla().planes(Tier.PAGED)
    assert identity_ranges(plane) == ((0, 528),)
    entry = window_layer(content=448, rope=64, window=8, kv=KvFormat.FP8_PACKED, replicas=1)
    assert identity_ranges(entry.planes[0]) == ((0, 448), (576, 583)), "padding is no identity"


@pytest.mark.parametrize(
    ("byte", "equal"),
    [(0, False), (511, False), (512, False), (527, False), (528, True), (655, True)],
)
def test_pages_are_equal_by_their_identity_bytes(byte: int, equal: bool) -> None:
    """Case 17."""
    tier = tier_of(packed_mla(), 6)
    pages = allocated(tier, 6)
    for layer in range(2):
        rows = torch.randint(0, 256, (64, 656), dtype=torch.uint8)
        tier.tensor(layer, "latent")[1:] = rows
    tier.tensor(1, "latent")[5, 63, byte] += 1
    assert tier.equal_pages(pages[:3], pages[3:]).tolist() == [True, equal, True]
    assert tier.equal_pages(pages[:0], pages[:0]).tolist() == []


def test_equal_pages_compares_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(plain(4), 12)
    pages = allocated(tier, 12)
    tier.view(1, "kv", "content")[9] = float("nan")
    tier.view(1, "kv", "content")[3] = float("nan")
    tier.view(0, "kv", "content")[11] = -0.0
    monkeypatch.setattr("tessera_sglang.memory_pool.storage._COMPARE_BYTES", 128)
    same = tier.equal_pages(pages[:6], pages[6:])
    assert same.tolist() == [True, True, True, True, False, True], "bytes, not numbers"


def test_a_fork_copies_the_first_tokens_in_all_layers() -> None:
    tier = tier_of(plain(4), 3)
    source, target, _ = (int(page) for page in allocated(tier, 3))
    for layer in range(2):
        tier.view(layer, "kv", "content").copy_(torch.arange(16.0).view(4, 4, 1) + 100 * layer)
    tier.copy_rows(source, target, 3)
    for layer in range(2):
        content = tier.view(layer, "kv", "content")[..., 0] - 100 * layer
        assert content.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 11], [12, 13, 14, 15]]


def test_a_fork_does_not_split_a_compression_group() -> None:
    tier = tier_of(compressed(), 2)
    source, target = (int(page) for page in allocated(tier, 2))
    tier.tensor(0, "entries").fill_(7)
    tier.tensor(0, "entries")[target] = 0
    with pytest.raises(ValueError, match="'entries' is shared by 8"):
        tier.copy_rows(source, target, 4)
    assert tier.tensor(0, "entries")[target].count_nonzero() == 0, "half a fork"
    tier.copy_rows(source, target, 8)
    assert (tier.tensor(0, "entries")[target] == 7).all()
    with pytest.raises(ValueError, match="9 tokens of a page of 8"):
        tier.copy_rows(source, target, 9)


def test_a_handle_names_the_bytes_of_a_page_in_one_plane() -> None:
    table = RegionTable()
    tier = PagedTier(packed_mla(), pages=3, table=table, device=CPU)
    page = int(allocated(tier, 2)[1])
    handle = tier.handle(1, "latent", page)
    assert (handle.offset, handle.length) == (page * 64 * 656, 64 * 656)
    table.resolve(handle).fill_(9)
    assert (tier.tensor(1, "latent")[page] == 9).all()
    assert tier.tensor(1, "latent").count_nonzero() == 64 * 656
    tier.free(np.array([page]))
    allocated(tier, 1)
    with pytest.raises(StaleHandle):
        table.resolve(handle)
    with pytest.raises(KeyError, match=r"layer 1 has no plane 'index' in this tier; it has latent"):
        tier.handle(1, "index", page)


def test_fp4_stays_bytes() -> None:
    plane = Plane("index", Tier.PAGED, 1, (Region("key", 128, Dtype.FP4_E2M1),))
    layer = packed_mla(1).layers[0]
    geometry = Geometry("sparse", (type(layer)(layer.kind, (*layer.planes, plane)),), 64)
    tier = tier_of(geometry, 1)
    assert tier.view(0, "index", "key").dtype == torch.uint8
    assert math.prod(tier.view(0, "index", "key").shape) == 2 * 64 * 64
    tier.check_invariants()


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_byte_of_a_row_tells_pages_apart(row_bytes: int) -> None:
    """Whatever words a row is compared in."""
    plane = Plane("kv", Tier.PAGED, 1, (Region("content", row_bytes, Dtype.FP8_E4M3),))
    geometry = Geometry("bytes", (LayerGeometry(LayerKind.MQA, (plane,)),) * 2, 4)
    tier = tier_of(geometry, 2)
    one, other = allocated(tier, 1), allocated(tier, 1)
    for layer in range(2):
        for row in range(4):
            for byte in range(row_bytes):
                cell = tier.tensor(layer, "kv")[other, row, byte]
                tier.tensor(layer, "kv")[other, row, byte] = cell ^ 128
                assert tier.equal_pages(one, other).tolist() == [False]
                tier.tensor(layer, "kv")[other, row, byte] = cell
    assert tier.equal_pages(one, other).tolist() == [True]
