"""The ledger: published figures to the digit, both accounts, and what memory really holds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from tessera_sglang.memory_pool.formats import Comparison
from tessera_sglang.memory_pool.geometry import Tier
from tessera_sglang.memory_pool.known_models import KNOWN, Unit
from tessera_sglang.memory_pool.ledger import FormatLine, Ledger, build
from tessera_sglang.memory_pool.model_geometry import read_model
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.memory_pool.rows import IndexFormat, KvFormat

K, M, MIB, GIB = 1 << 10, 1 << 20, 1 << 20, 1 << 30
CONTEXTS = (8 * K, 128 * K, M)


def ledger(name: str, contexts: tuple[int, ...] = CONTEXTS, **settings: object) -> Ledger:
    known = KNOWN[name]
    return build(read_model(known.config, name), contexts, known=known, **settings)  # type: ignore[arg-type]


def formats(name: str, *contexts: int) -> dict[str, FormatLine]:
    return {line.key: line for line in ledger(name, contexts).formats}


def comparisons(name: str) -> dict[tuple[str, Unit], Comparison]:
    return {(c.printed.of, c.printed.unit): c for c in ledger(name).comparisons}


def corrections(found: Ledger) -> dict[str, tuple[Fraction, ...]]:
    return {line.name: line.context_bytes for line in found.corrections}


# --- published figures ---------------------------------------------------------------------------


def test_deepseek_v2_at_4096_tokens() -> None:
    lines = formats("deepseek-v2", 4096)
    assert lines["bf16"].bytes_per_token == Fraction(135, 2) * K  # 67.5 KiB
    assert lines["bf16"].context_bytes == (270 * MIB,)
    assert lines["expanded"].bytes_per_layer == 80 * K
    assert lines["expanded"].context_bytes == (Fraction(75, 4) * GIB,)  # 18.75 GiB
    assert lines["expanded"].bytes_per_token / lines["bf16"].bytes_per_token == Fraction(640, 9)
    assert f"{640 / 9:.1f}" == "71.1"
    assert all(line.agrees for line in ledger("deepseek-v2").comparisons)


def test_deepseek_v3_at_128k() -> None:
    lines = formats("deepseek-v3", 128 * K)
    exact = {
        key: (float(line.context_bytes[0] / GIB), float(line.times_smaller))
        for key, line in lines.items()
    }
    assert exact["mha"] == (488.0, 1.0)
    assert exact["bf16"] == (8.578125, pytest.approx(56.889, abs=5e-4))
    assert exact["fp8-packed"] == (4.884765625, pytest.approx(99.902, abs=5e-4))
    assert exact["fp8"] == (4.2890625, pytest.approx(113.778, abs=5e-4))


def test_printed_figures_for_deepseek_v3_beside_exact_ones() -> None:
    found = comparisons("deepseek-v3")
    shown = {key: (c.printed.figure, c.rounded, c.agrees) for key, c in found.items()}
    assert shown == {
        ("bf16", Unit.KB): ("70.272", "70.272", True),
        ("mha", Unit.GIB): ("488.0", "488.0", True),
        ("bf16", Unit.GIB): ("8.68", "8.58", False),
        ("mha/bf16", Unit.TIMES): ("56.2", "56.9", False),
        ("fp8-packed", Unit.GIB): ("4.84", "4.88", False),
    }


def test_printed_figures_for_deepseek_v4_beside_exact_ones() -> None:
    found = comparisons("deepseek-v4-pro")
    assert comparisons("deepseek-v4-flash")["fp8-packed/v3.2", Unit.PERCENT].rounded == "7"
    shown = {key: (c.printed.figure, c.rounded, c.agrees) for key, c in found.items()}
    assert shown == {
        ("CSA", Unit.BYTE): ("160", "160", True),
        ("HCA", Unit.BYTE): ("4", "4.5", False),  # half a byte is no rounding: it was cut
        ("window", Unit.BYTE): ("576", "576", True),
        ("fp8-packed/v3.2", Unit.PERCENT): ("10", "10", True),
        ("bf16", Unit.GIB): ("9.62", "9.62", True),
        ("fp8-packed/gqa8", Unit.PERCENT): ("2", "2", True),
    }
    assert found["HCA", Unit.BYTE].exact == Fraction(9, 2)


@pytest.mark.parametrize("name", ["llama-3.1-405b", "qwen2.5-72b", "deepseek-v4-flash"])
def test_other_printed_figures(name: str) -> None:
    wrong = [c.printed.of for c in ledger(name).comparisons if not c.agrees]
    assert wrong == (["HCA"] if name == "deepseek-v4-flash" else [])


# --- both accounts -------------------------------------------------------------------------------


def test_kinds_of_deepseek_v4_flash() -> None:
    found = ledger("deepseek-v4-flash", (M,))
    assert [
        (k.kind, k.layers, k.content_bytes_per_token, k.bytes_per_token, k.slot_bytes)
        for k in found.kinds
    ] == [
        ("SWA", 2, 0, 0, 128 * 584),
        ("CSA", 21, 160, 163, 136_192),
        ("HCA", 20, Fraction(9, 2), Fraction(73, 16), 599_040),
    ]
    assert [k.context_bytes for k in found.kinds] == [
        (0,),
        (21 * 163 * M,),
        (20 * 584 * M // 128,),
    ]


def test_page_of_deepseek_v4_pro() -> None:
    page = ledger("deepseek-v4-pro").page
    assert (page.page_tokens, page.block_tokens) == (128, 128)
    assert page.content_bytes == 128 * (30 * 160) + 31 * 576
    assert page.scale_bytes == 30 * 32 * (7 + 4) + 31 * 7
    assert page.padding_bytes == 30 * 32 + 31
    assert page.page_bytes == page.content_bytes + page.scale_bytes + page.padding_bytes == 644_024
    assert page.metadata_share == 1 - Fraction(page.content_bytes, page.page_bytes)
    assert page.host_bytes == 128 * 8 + 16
    # SGLang pads 32 × 584 to 33 × 576 and 584 to 2 × 576
    assert page.sglang_page_bytes == 644_024 + 30 * 320 + 31 * 568


def test_no_page_of_sglangs_where_it_has_none() -> None:
    assert ledger("deepseek-v3").page.sglang_page_bytes is None
    assert ledger("deepseek-v4-pro", kv=KvFormat.BF16).page.sglang_page_bytes is None


def test_rows_are_written_out() -> None:
    found = ledger("deepseek-v4-pro", index=IndexFormat.FP8)
    rows = {(line.kind, line.plane): line for line in found.planes}
    entries = rows["CSA", "entries"]
    assert entries.row == "content 448 FP8_E4M3 + rope 64 BF16 + scale 7 UE8M0 + padding 1 B"
    assert (entries.rows, entries.tokens, entries.bytes_per_token) == (32, 4, 146)
    assert rows["CSA", "index"].row == "key 128 FP8_E4M3 + scale 1 FP32"
    assert (rows["HCA", "window"].tier, rows["HCA", "window"].rows) == ("arena", 128)


# --- what memory holds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        (name, kv)
        for name, known in KNOWN.items()
        for kv in KvFormat
        if kv is not KvFormat.FP8_PACKED
        or "num_key_value_heads" not in known.config
        or "v4" in name
    ],
)
def test_pools_allocate_what_the_ledger_says(name: str, kv: KvFormat) -> None:
    model = read_model(KNOWN[name].config, name)
    found = ledger(name, (3 * 128,), kv=kv)
    geometry = model.geometry(kv)
    pages = geometry.pages(3 * 128)
    pool = TwoTierPool(geometry, pages=pages, slots=1, device="meta")
    assert pool.paged.nbytes == (pages + 1) * found.page.page_bytes  # one page is reserved
    assert pool.arena.nbytes == 2 * found.slot_bytes  # and one slot
    one_rank = corrections(found)["one rank"][0]
    assert pool.nbytes - found.page.page_bytes - found.slot_bytes == one_rank


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("tokens", [1, 1000, 8 * K])
def test_corrections_add_up_to_the_tensors(name: str, tokens: int) -> None:
    found = corrections(ledger(name, (tokens,)))
    geometry = read_model(KNOWN[name].config, name).geometry()
    pages = geometry.pages(tokens)
    tensors = [
        torch.empty((pages, *geometry.page_shape(plane)), dtype=torch.uint8, device="meta")
        for _, plane in geometry.planes(Tier.PAGED)
    ] + [
        torch.empty((plane.rows, plane.row_bytes), dtype=torch.uint8, device="meta")
        for _, plane in geometry.planes(Tier.ARENA)
    ]
    steps = (
        "content",
        "scales",
        "row padding",
        "last page, not filled",
        "arena slot of the request",
    )
    assert sum(found[step][0] for step in steps) == found["one rank"][0]
    assert found["one rank"][0] == sum(tensor.nbytes for tensor in tensors)
    assert found["row table, per rank"] == (4 * tokens,)
    assert found["index, on the host"] == (pages * (geometry.page_tokens * 8 + 16),)


@pytest.mark.parametrize(
    ("name", "ranks", "copies"),
    [
        ("deepseek-v3", 8, Fraction(7, 8)),
        ("deepseek-v4-flash", 4, Fraction(3, 4)),
        ("llama-3.1-8b", 8, Fraction(0)),
        ("llama-3.1-8b", 16, Fraction(1, 2)),
    ],
)
def test_replicas_over_tensor_parallel_ranks(name: str, ranks: int, copies: Fraction) -> None:
    found = corrections(ledger(name, (8 * K,), tensor_parallel=ranks))
    everything = found[f"all {ranks} ranks"][0]
    assert everything == ranks * found["one rank"][0]
    assert found["of these, copies"][0] == copies * everything
    alone = corrections(ledger(name, (8 * K,)))
    assert everything * (1 - copies) == alone["one rank"][0]
    assert "of these, copies" not in alone


def test_formats_are_of_the_whole_model_whatever_the_ranks() -> None:
    assert ledger("llama-3.1-8b", tensor_parallel=8).formats == ledger("llama-3.1-8b").formats


def test_widths_that_a_format_does_not_fit_leave_it_out() -> None:
    tiny = read_model({**KNOWN["deepseek-v3"].config, "kv_lora_rank": 64}, "tiny")
    assert [line.key for line in build(tiny, (K,)).formats] == ["mha", "expanded", "bf16", "fp8"]
    small = read_model({**KNOWN["deepseek-v4-pro"].config, "head_dim": 96}, "small")
    with pytest.raises(
        ValueError, match="content of 32 elements does not divide into scales of 64"
    ):
        build(small, (K,))
    lines = build(small, (K,), kv=KvFormat.BF16, index=IndexFormat.BF16).formats
    assert [line.key for line in lines] == ["gqa8", "v3.2", "bf16"]


def test_a_model_of_windows_only_costs_nothing_per_token() -> None:
    config = {**KNOWN["llama-2-7b"].config, "model_type": "mistral", "sliding_window": 4096}
    found = build(read_model(config, "windows"), (M,))
    assert [line.times_smaller for line in found.formats] == [0, 0, 0]
    assert found.slot_bytes == 32 * 2 * 4096 * 8192 == corrections(found)["one rank"][0]
    assert found.page.page_bytes == 0


def test_everything_is_exact() -> None:
    for name in KNOWN:
        found = ledger(name, (999_999,))
        for line in found.formats:
            assert line.context_bytes == (line.bytes_per_token * 999_999,)
        assert sum(line.context_bytes[0] for line in found.kinds) == math.prod(
            (read_model(KNOWN[name].config, name).geometry().bytes_per_token, 999_999)
        )
