"""Rotations of queries: pairings, tables, YaRN figures, no drift (cases 15, 16, 18, 29)."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from tessera_sglang.attention.rope import (
    Pairing,
    RelativeRotation,
    mla_softmax_scale,
    yarn_inv_freq,
    yarn_mscale,
)

PAIRINGS = list(Pairing)


def plain_inv_freq(dim: int, base: float = 10_000.0) -> Tensor:
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # [dim/2]


def cos_sin_table(
    inv_freq: Tensor, length: int, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """As engines build it: everything in float32, times YaRN's factor, then cast."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq.float()
    return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1).to(dtype)


def rope_oracle(x: Tensor, position: int, inv_freq: Tensor, pairing: Pairing) -> Tensor:
    """x [..., d] at ``position``, as complex numbers in float64."""
    x = x.double()
    half = x.shape[-1] // 2
    shape = (half, 2) if pairing is Pairing.INTERLEAVED else (2, half)
    pairs = x.reshape(*x.shape[:-1], *shape)
    axis = -1 if pairing is Pairing.INTERLEAVED else -2
    first, second = pairs.unbind(axis)
    turned = torch.complex(first, second) * torch.polar(
        torch.ones_like(inv_freq), inv_freq * position
    )
    return torch.stack([turned.real, turned.imag], dim=axis).flatten(-2)


@pytest.mark.parametrize(
    ("pairing", "filled"), [(Pairing.INTERLEAVED, [0, 1]), (Pairing.HALF_SPLIT, [0, 32])]
)
def test_a_unit_vector_fills_the_channels_of_its_pair(pairing: Pairing, filled: list[int]) -> None:
    unit = torch.zeros(1, 1, 64)
    unit[..., 0] = 1.0
    turned = RelativeRotation.from_inv_freq(plain_inv_freq(64), pairing).rotate(unit, 1, start=0)
    assert turned[0, 0].nonzero().flatten().tolist() == filled
    torch.testing.assert_close(turned[0, 0, filled], torch.tensor([math.cos(1), math.sin(1)]))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("offset", [0, 1, -1, 640, -4097, 1_000_000, -1_000_000])
def test_rotation_matches_float64(pairing: Pairing, offset: int) -> None:
    torch.manual_seed(1)
    inv_freq, q = plain_inv_freq(32), torch.randn(3, 2, 32)
    turned = RelativeRotation.from_inv_freq(inv_freq, pairing).rotate(q, offset, start=0)
    expected = rope_oracle(q, offset, inv_freq, pairing).float()
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rotary_channels_turn_and_the_query_is_kept(
    pairing: Pairing, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    packed = torch.randn(5, 3, 2 * 96).to(dtype)
    q = packed[..., ::2]  # strided, [5, 3, 96]
    before = q.clone()
    inv_freq = plain_inv_freq(32)
    rotation = RelativeRotation.from_inv_freq(inv_freq, pairing)
    assert rotation.rotary_dim == 32
    for start in (0, 64):
        turned = rotation.rotate(q, 77, start=start)
        channels = slice(start, start + 32)
        expected = rope_oracle(q[..., channels], 77, inv_freq, pairing).to(dtype)
        torch.testing.assert_close(turned[..., channels], expected)
        kept = torch.ones(96, dtype=torch.bool)
        kept[channels] = False
        assert torch.equal(turned[..., kept], q[..., kept])
        assert turned.dtype == dtype
        assert turned.is_contiguous()
    assert torch.equal(q, before)
    with pytest.raises(ValueError, match="exceed a vector of 96"):
        rotation.rotate(q, 1, start=65)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_one_offset_per_row(pairing: Pairing) -> None:
    torch.manual_seed(3)
    q, offsets = torch.randn(6, 4, 16), [0, 5, -5, 128, -1000, 999_999]
    rotation = RelativeRotation.from_inv_freq(plain_inv_freq(16), pairing)
    turned = rotation.rotate(q, torch.tensor(offsets), start=0)
    for row, offset in enumerate(offsets):
        assert torch.equal(
            turned[row : row + 1], rotation.rotate(q[row : row + 1], offset, start=0)
        )
    assert rotation.rotate(q[:0], torch.tensor([], dtype=torch.int64), start=0).shape == (0, 4, 16)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("yarn", [False, True])
@pytest.mark.parametrize("offset", [1, 128, 4096, 163_839, 1_000_000, -17])
def test_turning_the_query_back_is_moving_the_key_on(
    pairing: Pairing, yarn: bool, offset: int
) -> None:
    torch.manual_seed(4)
    inv_freq = yarn_inv_freq(10_000.0, 64, 40.0, 4096) if yarn else plain_inv_freq(64)
    q, k = torch.randn(2, 4, 64), torch.randn(9, 64)
    stored = torch.stack([rope_oracle(k[p], p, inv_freq, pairing) for p in range(9)])
    moved = torch.stack([rope_oracle(k[p], p + offset, inv_freq, pairing) for p in range(9)])
    turned = RelativeRotation.from_inv_freq(inv_freq, pairing).rotate(q, -offset, start=0)
    torch.testing.assert_close(turned.double() @ stored.T, q.double() @ moved.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_relocation_does_not_drift(pairing: Pairing) -> None:
    """Case 18: the error of the 24th use of one stored key is that of the first."""
    torch.manual_seed(5)
    inv_freq = yarn_inv_freq(10_000.0, 64, 40.0, 4096)
    rotation = RelativeRotation.from_inv_freq(inv_freq, pairing)
    q, k = torch.randn(1, 8, 64), torch.randn(64)
    stored = rope_oracle(k, 64, inv_freq, pairing).float()
    record = stored.clone()
    rng = random.Random(5)
    offsets = [0, 128, 640, 5, *(rng.randint(-100_000, 100_000) for _ in range(20))]
    errors = []
    for offset in offsets:
        score = rotation.rotate(q, -offset, start=0).double() @ stored.double()  # [1, 8]
        direct = q.double() @ rope_oracle(k, 64 + offset, inv_freq, pairing)
        errors.append(float((score - direct).abs().max()))
    assert max(errors) < 5e-6, errors
    assert torch.equal(stored, record)


def test_yarn_figures() -> None:
    """Case 16."""
    assert mla_softmax_scale(192, 40.0, 0.707) == pytest.approx(0.114721, abs=5e-7)
    assert mla_softmax_scale(192, 40.0, 1.0) == pytest.approx(0.135234, abs=5e-7)
    assert mla_softmax_scale(192) == pytest.approx(192**-0.5)
    ratio = yarn_mscale(40.0, 1.0) / yarn_mscale(40.0, 0.707)
    assert ratio == pytest.approx(1.08573, abs=5e-6)
    assert ratio**2 == pytest.approx(1.1788, abs=5e-5)
    assert yarn_mscale(1.0) == 1.0


def test_yarn_keeps_fast_channels_and_slows_slow_ones() -> None:
    plain, yarn = plain_inv_freq(64), yarn_inv_freq(10_000.0, 64, 40.0, 4096)
    torch.testing.assert_close(yarn[:10], plain[:10])  # 64·ln(4096/64π)/(2·ln 10⁴) = 10.4
    torch.testing.assert_close(yarn[23:], plain[23:] / 40.0)  # 64·ln(4096/2π)/(2·ln 10⁴) = 22.5
    assert bool((yarn[1:] < yarn[:-1]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1.08573])
@pytest.mark.parametrize("length", [2, 100, 16_384])
@pytest.mark.parametrize("yarn", [False, True])
def test_a_table_gives_its_frequencies(
    dtype: torch.dtype, factor: float, length: int, yarn: bool
) -> None:
    inv_freq = yarn_inv_freq(10_000.0, 64, 40.0, 4096) if yarn else plain_inv_freq(64, 500_000.0)
    table = cos_sin_table(inv_freq, length, factor, dtype)
    rotation = RelativeRotation.from_cos_sin_table(table, Pairing.INTERLEAVED)
    assert rotation.inv_freq.dtype == torch.float64
    # At no position of the table further off than one rounding of an entry, or of the angle.
    angle_error = (rotation.inv_freq - inv_freq).abs() * (length - 1)
    allowed = torch.finfo(dtype).eps + inv_freq * (length - 1) * 2.0**-23
    assert bool((angle_error <= allowed).all()), (angle_error / allowed).max()
    unit = torch.nn.functional.normalize(torch.randn(4, 1, 64), dim=-1)
    norm = rotation.rotate(unit, length - 1, start=0).norm(dim=-1)
    torch.testing.assert_close(norm, torch.ones(4, 1), rtol=0, atol=1e-6)


def test_frequency_of_a_long_float32_table_is_sharper_than_float32() -> None:
    inv_freq = yarn_inv_freq(10_000.0, 64, 40.0, 4096).float().double()  # what the table holds
    table = cos_sin_table(inv_freq, 163_840)
    recovered = RelativeRotation.from_cos_sin_table(table, Pairing.INTERLEAVED).inv_freq
    torch.testing.assert_close(recovered, inv_freq, rtol=2.0**-25, atol=0)


def dynamic_table(length: int) -> Tensor:
    """Base grown with the position, as dynamic NTK does past its original length."""
    rows = []
    for p in range(length):
        base = 10_000.0 * max(1.0, p / 64) ** (32 / 30)
        angle = p * plain_inv_freq(32, base)
        rows.append(torch.cat([angle.cos(), angle.sin()]))
    return torch.stack(rows).float()


def test_tables_that_are_no_rotation_are_refused() -> None:
    """Case 29: what can not be moved by turning the query says so."""
    good = cos_sin_table(plain_inv_freq(32), 300)
    build = RelativeRotation.from_cos_sin_table

    def refused(table: Tensor, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            build(table, Pairing.HALF_SPLIT)

    refused(dynamic_table(300), "not linear in position")
    refused(torch.cat([good[:150], good[:150]]), "not linear in position")  # a second table
    refused(good[1:], "not linear in position")  # does not start at position 0
    refused(good * torch.linspace(1, 1.1, 300)[:, None], "norm is not constant")
    per_channel = torch.ones(32)
    per_channel[[3, 19]] = 1.01
    refused(good * per_channel, "norm is not constant.*channel pair 3")
    refused(good * 0, "norm is not constant")
    refused(torch.where(good == good[7, 2], math.nan, good), "not finite")
    refused(good[:, :31], "even")
    refused(good[0], "even")
    refused(good[:1], "fewer than 2")
    refused(good.long(), "floats")
    with pytest.raises(ValueError, match="non-empty vector"):
        RelativeRotation.from_inv_freq(good, Pairing.HALF_SPLIT)
    with pytest.raises(ValueError, match="not finite"):
        RelativeRotation.from_inv_freq(torch.tensor([1.0, math.inf]), Pairing.HALF_SPLIT)


def test_channels_that_do_not_turn_are_fine() -> None:
    inv_freq = torch.cat([plain_inv_freq(16), torch.zeros(8, dtype=torch.float64)])
    rotation = RelativeRotation.from_cos_sin_table(cos_sin_table(inv_freq, 500), Pairing.HALF_SPLIT)
    torch.testing.assert_close(rotation.inv_freq, inv_freq, rtol=1e-6, atol=1e-9)
