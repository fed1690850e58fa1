"""Tessera's TileLang kernel, compiled to C: the same source as on a GPU, except for where tiles are and
for the two row reductions. Needs a C compiler."""

from __future__ import annotations

import math
import shutil
from functools import cache

import pytest
import torch
from work import Pool, check, make_pool, make_work

from tessera_sglang.attention.kernels.base import AttentionShape, Phase
from tessera_sglang.attention.kernels.tilelang_decode import (
    TileLangKernel,
    merge_splits,
    padded_heads,
    split_bounds,
    split_count,
)
from tessera_sglang.attention.merge import merge

LENGTHS = (1, 63, 64, 65, 127, 129, 0, 300)
STACKED = ((3, 65), (1, 129), (4, 300), (2, 0), (0, 63), (1, 1), (5, 3))


@cache
def kernel() -> TileLangKernel:
    pytest.importorskip("tilelang")
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return TileLangKernel("c")


def tiny(heads: int) -> AttentionShape:
    return AttentionShape(heads, 1, 48, 32, True, 64, torch.float32)


def pool_of(parts: tuple[tuple[int, int], ...], shape: AttentionShape) -> Pool:
    return make_pool(
        [keys for _, keys in parts],
        kv_heads=1,
        key_width=shape.key_width,
        value_width=shape.value_width,
        latent=True,
        dtype=shape.dtype,
    )


def run_parts(
    parts: tuple[tuple[int, int], ...],
    shape: AttentionShape,
    *,
    causal: bool = False,
    capacity: int | None = None,
) -> None:
    torch.manual_seed(0)
    pool = pool_of(parts, shape)
    described = [(rows, slots) for (rows, _), slots in zip(parts, pool.slots, strict=True)]
    work = make_work(described, causal, capacity=capacity)
    q = torch.randn(work.rows, shape.query_heads, shape.key_width)
    check(kernel(), shape, work, q, pool, scale=0.2)


@pytest.mark.parametrize("heads", [4, 16, 40])
def test_decode(heads: int) -> None:
    run_parts(tuple((1, length) for length in LENGTHS), tiny(heads))


@pytest.mark.parametrize("causal", [False, True])
def test_stacked_rows(causal: bool) -> None:
    run_parts(STACKED, tiny(8), causal=causal)
    run_parts(STACKED, tiny(16), causal=causal)


def test_several_splits_of_one_part() -> None:
    run_parts(((1, 1000),), tiny(8))
    run_parts(((4, 700),), tiny(8), causal=True)


def test_static_work() -> None:
    run_parts(((2, 65), (2, 0), (2, 130)), tiny(8), capacity=192)


def test_nothing_to_see_and_nothing_to_do() -> None:
    run_parts(((1, 0), (2, 0)), tiny(8))
    run_parts(((0, 5),), tiny(8))


def test_deepseek_widths() -> None:
    shape = AttentionShape(16, 1, 576, 512, True, 64, torch.float32)
    run_parts(((1, 129), (2, 65)), shape)


def test_what_it_can_run() -> None:
    shape = AttentionShape(16, 1, 576, 512, True, 64, torch.bfloat16)
    on_gpu = TileLangKernel().capabilities
    assert on_gpu.refusal(shape, Phase.VERIFY, "cuda", (8, 0)) is None
    assert on_gpu.refusal(shape, Phase.PREFILL, "cuda", (9, 0)) == "has no prefill kernel"
    assert "8.0" in str(on_gpu.refusal(shape, Phase.DECODE, "cuda", (7, 5)))
    assert on_gpu.refusal(shape, Phase.DECODE, "cpu") == "runs on cuda, not on cpu"
    grouped = AttentionShape(16, 4, 128, 128, False, 64, torch.bfloat16)
    assert on_gpu.refusal(grouped, Phase.DECODE, "cuda", (9, 0)) == "reads MLA rows only"


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits_cover_every_key_once(splits: int) -> None:
    tokens = torch.tensor([0, 1, 31, 32, 33, 1000], dtype=torch.int32)
    starts = torch.tensor([0, 7, 8, 100, 200, 300], dtype=torch.int32)
    bounds = split_bounds(starts, tokens, splits)
    assert bounds.shape == (6, splits + 1)
    assert bounds.dtype == torch.int32
    assert torch.equal(bounds[:, 0], starts)
    assert torch.equal(bounds[:, -1], starts + tokens)
    assert bool((bounds.diff(dim=1) >= 0).all())


def test_how_many_splits() -> None:
    assert split_count(blocks=1, most_keys=100_000, bytes_a_split=1, cores=132) == 32
    assert split_count(blocks=100, most_keys=100_000, bytes_a_split=1, cores=132) == 3
    assert split_count(blocks=1, most_keys=128, bytes_a_split=1, cores=132) == 1
    assert split_count(blocks=1, most_keys=0, bytes_a_split=1 << 40, cores=132) == 1
    assert split_count(blocks=1000, most_keys=5000, bytes_a_split=1, cores=132) == 1
    assert [padded_heads(heads) for heads in (1, 16, 17, 128)] == [16, 16, 32, 128]


@pytest.mark.parametrize("splits", [1, 4])
def test_splits_merge_as_parts_do(splits: int) -> None:
    torch.manual_seed(0)
    partial, lse = torch.randn(3, splits, 16, 8), torch.randn(3, splits, 16) * 5
    lse[1, 0] = -1e30
    lse[2] = -1e28
    seen = lse.masked_fill(lse < -1e20, -math.inf)
    out, got = merge_splits(partial, lse)
    wanted, wanted_lse = merge(list(partial.unbind(1)), list(seen.unbind(1)))
    torch.testing.assert_close(got, wanted_lse)
    shown = ~wanted_lse.isneginf()
    torch.testing.assert_close(out[shown], wanted[shown])
