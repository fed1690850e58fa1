"""V4's figures: published ones to the digit, shares of V3.2, and that the document says the same."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from tessera_sglang.memory_pool.geometry import Geometry, LayerKind, Tier
from tessera_sglang.memory_pool.known_models import KNOWN
from tessera_sglang.memory_pool.ledger import build
from tessera_sglang.memory_pool.model_geometry import read_model
from tessera_sglang.memory_pool.rows import IndexFormat, KvFormat

M = 1 << 20
DOCUMENT = (Path(__file__).parents[2] / "docs" / "deepseek-v4.md").read_text(encoding="utf-8")
FLASH, PRO, V32 = "deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v3.2"


def geometry(name: str, kv: KvFormat | None = None, index: IndexFormat | None = None) -> Geometry:
    return read_model(KNOWN[name].config, name).geometry(kv, index)


@pytest.mark.parametrize("name", [FLASH, PRO])
def test_per_token_and_layer(name: str) -> None:
    kinds = {kind.kind: kind for kind in build(read_model(KNOWN[name].config, name), (M,)).kinds}
    assert kinds["CSA"].content_bytes_per_token == 160
    assert kinds["HCA"].content_bytes_per_token == Fraction(9, 2)
    assert int(kinds["HCA"].content_bytes_per_token) == (448 + 64 * 2) // 128 == 4
    window = geometry(name).layers[0].plane("window")
    assert (window.content_bytes, window.row_bytes, window.rows) == (576, 584, 128)


def test_layer_maps() -> None:
    flash, pro = ([layer.kind for layer in geometry(name).layers] for name in (FLASH, PRO))
    csa, hca = LayerKind.CSA, LayerKind.HCA
    assert flash == [LayerKind.SWA] * 2 + [csa, hca] * 20 + [csa]
    assert pro == [hca] * 2 + [csa, hca] * 29 + [csa]
    for name in (FLASH, PRO):
        assert geometry(name).page_tokens == geometry(name).block_tokens == 128
        assert all("window" in {p.name for p in one.arena} for one in geometry(name).layers)


Account = tuple[str, Fraction, Fraction, Fraction]  # name, and bytes per token of Flash, Pro, V3.2


def accounts() -> Iterator[Account]:
    flash, pro = geometry(FLASH), geometry(PRO)
    served = geometry(V32, KvFormat.FP8_PACKED, IndexFormat.FP8)
    v32 = served.bytes_per_token
    yield (
        "as served: packed FP8, FP4 indexer against packed FP8, FP8 indexer",
        flash.bytes_per_token,
        pro.bytes_per_token,
        v32,
    )
    with_slots = [one.bytes_per_token + Fraction(one.slot_bytes, M) for one in (flash, pro)]
    yield ("the same with the request's arena slot", *with_slots, v32)
    contents = [one.content_bytes_per_token for one in (flash, pro, served)]
    yield ("content only, without scales and padding", *contents)
    yield (
        "HCA at 4 B, content, against V3.2 as served",
        contents[0] - 10,
        contents[1] - Fraction(31, 2),
        v32,
    )
    bf16 = KvFormat.BF16, IndexFormat.BF16
    yield (
        "everything in BF16",
        *(geometry(name, *bf16).bytes_per_token for name in (FLASH, PRO, V32)),
    )


@pytest.mark.parametrize("account", list(accounts()), ids=lambda account: account[0])
def test_the_share_of_v32_at_a_million_tokens(account: Account) -> None:
    """Published: 7 and 10 %. Each account is near that, and stands in the document as it is here."""
    name, flash, pro, v32 = account
    shares = [100 * one / v32 for one in (flash, pro)]
    assert 7 <= shares[0] < 8.1
    assert 10 <= shares[1] < 11.5
    line = (
        f"| {name} | {float(flash):,.2f} | {float(pro):,.2f} | {int(v32):,} "
        f"| {float(shares[0]):.2f} % | {float(shares[1]):.2f} % |"
    )
    assert line in DOCUMENT, line


def test_as_served_both_round_to_what_is_published() -> None:
    _, flash, pro, v32 = next(accounts())
    assert (round(100 * flash / v32), round(100 * pro / v32)) == (7, 10)
    for name in (FLASH, PRO):
        known = KNOWN[name]
        found = build(read_model(known.config, name), (M,), known=known).comparisons
        (share,) = [one for one in found if one.printed.of == "fp8-packed/v3.2"]
        assert share.agrees
        assert share.exact == 100 * (flash if name == FLASH else pro) / v32


def saved_lines() -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "window rows of the last 128 tokens, every layer | saved with the page", ("window",)
    yield "CSA overlap, series and gate of the last 4 tokens | saved with the page", ("overlap",)
    yield "indexer overlap, the same | saved with the page", ("index_overlap",)
    yield "**saved in all** | ", ("window", "overlap", "index_overlap")
    everything = ("window", "overlap", "index_overlap", "tail", "index_tail")
    yield "a slot in all, buffers included | ", everything


@pytest.mark.parametrize("line", list(saved_lines()), ids=lambda line: line[0])
def test_the_document_lists_the_state_with_its_bytes(line: tuple[str, tuple[str, ...]]) -> None:
    text, planes = line
    sizes = [
        sum(p.slot_bytes for _, p in geometry(name).planes(Tier.ARENA) if p.name in planes)
        for name in (FLASH, PRO)
    ]
    written = f"| {text} | {sizes[0]:,} B | {sizes[1]:,} B |".replace("|  |", "| |")
    assert written in DOCUMENT, written


def test_the_listed_state_is_all_there_is() -> None:
    """No plane of a slot is missing from the list, and what is saved is what the pool saves."""
    for name in (FLASH, PRO):
        found = {(plane.name, plane.transient) for _, plane in geometry(name).planes(Tier.ARENA)}
        kept = {(plane, False) for plane in ("window", "overlap", "index_overlap")}
        assert found == kept | {("tail", True), ("index_tail", True)}
        assert f"{geometry(name).boundary_bytes:,} B" in DOCUMENT
        assert f"{geometry(name).slot_bytes:,} B" in DOCUMENT
        assert f"{geometry(name).page_bytes:,} B" in DOCUMENT


def test_the_document_lists_every_plane_with_its_bytes() -> None:
    for kind in (LayerKind.CSA, LayerKind.HCA):
        one = next(one for one in geometry(PRO).layers if one.kind is kind)
        for plane in one.paged:
            rows, row_bytes = geometry(PRO).page_shape(plane)
            assert f"{rows * row_bytes:,} a page" in DOCUMENT
        for plane in one.arena:
            assert f"{plane.rows} | {plane.row_bytes:,} a row, {plane.slot_bytes:,} |" in DOCUMENT
