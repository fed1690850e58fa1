"""The PyTorch kernel against the oracle. It always runs *before* the oracle, so that recycled
memory can not hold the answer, and over pools whose unused slots are NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tessera_sglang.attention.kernels import torch_flash
from tessera_sglang.attention.kernels.base import AttentionShape, Phase
from tessera_sglang.attention.kernels.torch_kernel import Blocks, TorchKernel
from tessera_sglang.attention.merge import merge, merge_into
from tessera_sglang.attention.reference import attend_reference
from tessera_sglang.attention.rope import Pairing, RelativeRotation, yarn_inv_freq

DEFAULT = TorchKernel()
TINY = TorchKernel(Blocks(keys=32, scores=1024, gathered=4096, diagonal=8))
LENGTHS = [1, 63, 64, 65, 127, 128, 129]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Pool:
    """One layer's buffers and the slots of one row, in row order."""

    keys: Tensor  # [num_slots, Hkv, D]
    values: Tensor  # [num_slots, Hkv, Dv]
    slots: Tensor  # [S] int64


def gqa_pool(length: int, kv_heads: int, dim: int, dtype: torch.dtype, v_dim: int = 0) -> Pool:
    keys = torch.full((length + 64, kv_heads, dim), math.nan, dtype=dtype)
    values = torch.full((length + 64, kv_heads, v_dim or dim), math.nan, dtype=dtype)
    slots = torch.randperm(length + 64)[:length]
    keys[slots] = torch.randn(length, kv_heads, dim).to(dtype)
    values[slots] = torch.randn(length, kv_heads, v_dim or dim).to(dtype)
    return Pool(keys, values, slots)


def mla_pool(length: int, rank: int, rope: int, dtype: torch.dtype) -> Pool:
    pool = gqa_pool(length, 1, rank + rope, dtype)
    return Pool(pool.keys, pool.keys[..., :rank], pool.slots)


def visible(rows: int, keys: int, causal_from: int | None) -> Tensor:
    if causal_from is None:
        return torch.ones(rows, keys, dtype=torch.bool)
    return torch.arange(keys)[None] <= causal_from + torch.arange(rows)[:, None]


def check(
    kernel: TorchKernel,
    q: Tensor,
    pool: Pool,
    causal_from: int | None,
    logit_cap: float = 0.0,
    scale: float = 0.2,
) -> None:
    copies = q.clone(), pool.keys.clone(), pool.slots.clone()
    out, lse = kernel.attend(
        q,
        pool.keys,
        pool.values,
        pool.slots,
        scale=scale,
        causal_from=causal_from,
        logit_cap=logit_cap,
    )
    for tensor, copy in zip((q, pool.keys, pool.slots), copies, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())
    assert out.dtype == lse.dtype == torch.float32
    assert out.is_contiguous()
    assert lse.is_contiguous()
    keys, values = pool.keys[pool.slots], pool.values[pool.slots]
    mask = visible(q.shape[0], len(pool.slots), causal_from)
    expected, expected_lse = attend_reference(q, keys, values, mask, scale, logit_cap)
    # Inputs are exact in every dtype and accumulation is float32: bfloat16 earns no slack.
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-5, atol=2e-5)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    if bool(expected.any()):
        cosine = torch.cosine_similarity(out.flatten().double(), expected.flatten().double(), dim=0)
        assert float(cosine) > 1 - 1e-7


@pytest.mark.parametrize("kernel", [DEFAULT, TINY], ids=["default", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", LENGTHS)
def test_mla_prefill_extend_and_decode(
    kernel: TorchKernel, dtype: torch.dtype, length: int
) -> None:
    torch.manual_seed(length)
    pool = mla_pool(length, 64, 16, dtype)
    for rows in sorted({1, min(length, 17), length}):
        check(kernel, torch.randn(rows, 4, 80).to(dtype), pool, length - rows)
        check(kernel, torch.randn(rows, 4, 80).to(dtype), pool, None)


@pytest.mark.parametrize("kernel", [DEFAULT, TINY], ids=["default", "tiny"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("length", LENGTHS)
def test_grouped_heads(kernel: TorchKernel, group: int, length: int) -> None:
    torch.manual_seed(length)
    pool = gqa_pool(length, 2, 32, torch.float32, v_dim=24)
    for rows in sorted({1, min(length, 33), length}):
        check(kernel, torch.randn(rows, 2 * group, 32), pool, length - rows)
        check(kernel, torch.randn(rows, 2 * group, 32), pool, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deepseek_dimensions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = mla_pool(300, 512, 64, dtype)
    for rows, causal_from in ((1, 299), (70, 230), (9, None)):
        check(DEFAULT, torch.randn(rows, 16, 576).to(dtype), pool, causal_from, scale=0.05)


def test_a_context_of_several_blocks() -> None:
    torch.manual_seed(0)
    pool = mla_pool(1500, 64, 16, torch.float32)
    for rows, causal_from in ((1500, 0), (700, 800), (1, 1499), (3, None)):
        check(DEFAULT, torch.randn(rows, 2, 80), pool, causal_from)


def test_values_may_be_any_slice_of_the_keys_or_unrelated() -> None:
    torch.manual_seed(0)
    keys = torch.randn(200, 2, 48)
    slots = torch.randperm(200)[:90]
    values = (keys[..., 16:], keys[..., 40:48], keys, keys[..., :32].clone(), keys[:, :, ::2])
    for view in values:
        check(DEFAULT, torch.randn(20, 4, 48), Pool(keys, view, slots), 70)
    q = torch.randn(20, 4, 48)
    shifted = Pool(keys[:-1], keys[1:], slots.clamp(max=198))  # same storage, other rows
    check(DEFAULT, q, shifted, 70)


def test_strided_queries_and_buffers() -> None:
    torch.manual_seed(0)
    packed = torch.randn(40, 3, 4, 32)  # q, k, v interleaved, as a fused projection leaves them
    wide = torch.randn(100, 2, 64)
    pool = Pool(wide[..., ::2], wide[..., 1::2], torch.arange(99, 19, -1))
    for q in (packed[:, 1], packed[:, 0].transpose(0, 1)[:, :40].transpose(0, 1), packed[::2, 2]):
        check(DEFAULT, q, pool, 80 - q.shape[0])
    check(DEFAULT, packed[:1, 0].expand(5, 4, 32), pool, None)


@pytest.mark.parametrize("kernel", [DEFAULT, TINY], ids=["default", "tiny"])
@pytest.mark.parametrize("causal_from", [-200, -100, -99, -40, -1, 0, 3, 59, 60, 130])
def test_any_causal_start(kernel: TorchKernel, causal_from: int) -> None:
    """Before the first key, in the middle of the keys, past them: clipped, never out of range."""
    torch.manual_seed(0)
    pool = gqa_pool(60, 2, 16, torch.float32)
    check(kernel, torch.randn(100, 4, 16), pool, causal_from)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("causal_from", [None, 0, 7, -3])
def test_nothing_to_see_and_nobody_to_see_it(rows: int, causal_from: int | None) -> None:
    q, pool = torch.randn(rows, 4, 16), gqa_pool(0, 2, 16, torch.bfloat16)
    out, lse = DEFAULT.attend(
        q, pool.keys, pool.values, pool.slots, scale=1.0, causal_from=causal_from
    )
    assert torch.equal(out, torch.zeros(rows, 4, 16))
    assert torch.equal(lse, torch.full((rows, 4), -math.inf))
    if rows == 0:
        full = gqa_pool(9, 2, 16, torch.bfloat16)
        check(DEFAULT, q, full, causal_from)


@pytest.mark.parametrize("kernel", [DEFAULT, TINY], ids=["default", "tiny"])
@pytest.mark.parametrize("where", ["keys", "values", "both"])
@pytest.mark.parametrize("broken", [0, 20, 39, 59])
def test_a_broken_key_shows_to_those_who_see_it_only(
    kernel: TorchKernel, where: str, broken: int
) -> None:
    """Row i sees keys 0..20+i. A key that is hidden from a row may hold anything."""
    torch.manual_seed(0)
    q, pool = torch.randn(40, 4, 16), gqa_pool(60, 2, 16, torch.float32)
    clean, _ = kernel.attend(q, pool.keys, pool.values, pool.slots, scale=0.2, causal_from=20)
    if where != "values":
        pool.keys[pool.slots[broken]] = math.nan
    if where != "keys":
        pool.values[pool.slots[broken]] = math.nan
    out, _ = kernel.attend(q, pool.keys, pool.values, pool.slots, scale=0.2, causal_from=20)
    sees = max(broken - 20, 0)
    assert bool(out[sees:].isnan().all())
    torch.testing.assert_close(out[:sees], clean[:sees])


@pytest.mark.parametrize("kernel", [DEFAULT, TINY], ids=["default", "tiny"])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logit_cap(kernel: TorchKernel, cap: float) -> None:
    torch.manual_seed(0)
    pool = gqa_pool(100, 2, 16, torch.float32)
    for rows in (1, 50):
        check(kernel, torch.randn(rows, 4, 16) * 8, pool, 100 - rows, logit_cap=cap)


@pytest.mark.parametrize("kernel", [DEFAULT, TINY], ids=["default", "tiny"])
def test_scores_far_past_the_range_of_exp(kernel: TorchKernel) -> None:
    torch.manual_seed(0)
    pool = gqa_pool(200, 1, 16, torch.float32)
    q = torch.randn(50, 2, 16).round() * 64  # scores up to ±2000, exact enough to compare
    out, lse = kernel.attend(q, pool.keys, pool.values, pool.slots, scale=1.0, causal_from=150)
    keys, values = pool.keys[pool.slots], pool.values[pool.slots]
    expected, expected_lse = attend_reference(q, keys, values, visible(50, 200, 150), 1.0)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("cuts", [[0, 100], [0, 1, 64, 100], [0, 50, 50, 100]])
def test_a_context_in_parts_is_the_whole(cuts: list[int]) -> None:
    """Keys 0..99 seen wholly and in parts, 100..139 causally, by 40 rows."""
    torch.manual_seed(0)
    q, pool = torch.randn(40, 4, 80), mla_pool(140, 64, 16, torch.float32)

    def part(
        run: slice, causal_from: int | None, rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        return DEFAULT.attend(
            q[rows],
            pool.keys,
            pool.values,
            pool.slots[run],
            scale=0.2,
            causal_from=causal_from,
        )

    whole = part(slice(None), 100)
    own = part(slice(100, 140), 0)
    spans = [part(slice(a, b), None) for a, b in pairwise(cuts)]
    out, lse = merge([own[0], *(s[0] for s in spans)], [own[1], *(s[1] for s in spans)])
    torch.testing.assert_close(out, whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole[1], rtol=1e-6, atol=1e-6)

    # The same, the first cut being visible to the last rows only.
    out, lse = own[0].clone(), own[1].clone()
    for a, b in pairwise(cuts):
        merge_into(out, lse, *part(slice(a, b), None, slice(25, 40)), slice(25, 40))
    torch.testing.assert_close(out[25:], whole[0][25:], rtol=1e-5, atol=1e-6)
    assert torch.equal(out[:25], own[0][:25])


@pytest.mark.parametrize("pairing", list(Pairing))
@pytest.mark.parametrize("start", [64, 0])  # MLA: the last channels; GQA: the first
def test_a_stored_body_serves_any_offset(pairing: Pairing, start: int) -> None:
    """Turned queries over stored keys = queries as they are over keys moved by the offset."""
    torch.manual_seed(0)
    rotation = RelativeRotation.from_inv_freq(yarn_inv_freq(10_000.0, 16, 40.0, 4096), pairing)
    q, pool = torch.randn(10, 4, 80), mla_pool(128, 64, 16, torch.float32)
    for offset in (0, 128, 640, 5, -60, 1_000_000):
        turned = rotation.rotate(q, -offset, start=start)
        got = DEFAULT.attend(
            turned, pool.keys, pool.values, pool.slots, scale=0.2, causal_from=None
        )
        moved = rotation.rotate(pool.keys[pool.slots], offset, start=start)
        values = pool.values[pool.slots]
        expected = attend_reference(q, moved, values, visible(10, 128, None), 0.2)
        torch.testing.assert_close(got[0], expected[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(got[1], expected[1], rtol=2e-5, atol=2e-5)


def test_capabilities() -> None:
    can = DEFAULT.capabilities
    assert can.name == "torch"
    mla = AttentionShape(16, 1, 576, 512, True, 64, torch.bfloat16)
    for phase in Phase:
        assert can.refusal(mla, phase, "cpu") is None
    assert can.refusal(mla, Phase.DECODE, "meta") is not None
    fp8 = replace(mla, dtype=torch.float8_e4m3fn)
    assert "float8_e4m3fn" in str(can.refusal(fp8, Phase.DECODE, "cpu"))
    assert can.lse_base == "e"


def test_the_fast_way_for_grouped_heads_is_taken_and_left_where_it_must_be() -> None:
    pool = gqa_pool(200, 2, 32, torch.bfloat16)
    q = torch.randn(40, 4, 32)
    assert torch_flash.suits(q, pool.keys, pool.values, 0.0)
    assert not torch_flash.suits(q[:1], pool.keys, pool.values, 0.0)
    assert not torch_flash.suits(q, pool.keys, pool.values, 30.0)
    assert not torch_flash.suits(q, pool.keys, pool.values[..., :16], 0.0)
    pool.values[pool.slots[7]] = math.nan  # all rows see it
    found = torch_flash.attend(q, pool.keys, pool.values, pool.slots, scale=1.0, causal_from=160)
    assert found is not None
    assert bool(found[0].isnan().all())
    pool.values[pool.slots[170]] = math.nan  # the first rows do not
    found = torch_flash.attend(q, pool.keys, pool.values, pool.slots, scale=1.0, causal_from=160)
    assert found is None


@pytest.mark.parametrize("queries", [1, 1 << 20])
@pytest.mark.parametrize("gathered", [1, 1 << 24])
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_the_fast_way_by_heads_and_by_keys(
    monkeypatch: pytest.MonkeyPatch, queries: int, gathered: int, kv_heads: int
) -> None:
    monkeypatch.setattr(torch_flash, "_QUERIES", queries)
    monkeypatch.setattr(torch_flash, "_GATHERED", gathered)
    torch.manual_seed(kv_heads)
    for dtype in (torch.float32, torch.bfloat16):
        pool = gqa_pool(200, kv_heads, 32, dtype)
        for rows, causal_from in ((40, 160), (200, 0), (40, None), (40, 190)):
            check(DEFAULT, torch.randn(rows, 6, 32).to(dtype), pool, causal_from)
