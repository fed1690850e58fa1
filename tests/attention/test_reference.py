"""The oracle against PyTorch's own attention, and MLA against itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_sglang.attention.reference import (
    MLAWeights,
    absorb_output,
    absorb_query,
    attend_reference,
    mla_absorbed,
    mla_naive,
)


def causal(rows: int, keys: int, before: int) -> Tensor:
    return torch.arange(keys)[None] <= before + torch.arange(rows)[:, None]  # [T, S]


@pytest.mark.parametrize("group", [1, 3])
def test_it_is_softmax_attention(group: int) -> None:
    torch.manual_seed(group)
    q, k, v = torch.randn(9, 2 * group, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 5)
    mask = causal(9, 20, 11)
    out, lse = attend_reference(q, k, v, mask, 0.3)
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1).double(),
        k.transpose(0, 1).double(),
        v.transpose(0, 1).double(),
        attn_mask=mask,
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(out.double(), expected.transpose(0, 1), rtol=1e-6, atol=1e-6)
    assert out.dtype == lse.dtype == torch.float32


def test_lse_is_the_natural_logarithm_of_the_sum() -> None:
    zero = torch.zeros(1, 1, 4)
    _, lse = attend_reference(zero, zero.expand(7, 1, 4), zero.expand(7, 1, 4), causal(1, 7, 4), 1)
    assert float(lse) == pytest.approx(math.log(5))


def test_rows_that_see_nothing() -> None:
    q, k = torch.randn(3, 2, 4), torch.randn(5, 1, 4)
    out, lse = attend_reference(q, k, k, causal(3, 5, -1), 1.0)
    assert out[0].tolist() == [[0.0] * 4] * 2
    assert lse[0].tolist() == [-math.inf] * 2
    torch.testing.assert_close(out[1], k[0].expand(2, 4))
    out, lse = attend_reference(q, k[:0], k[:0], causal(3, 0, 0), 1.0)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("where", ["key", "value"])
def test_a_broken_key_shows_to_those_who_see_it_only(where: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 2, 4), torch.randn(6, 1, 4), torch.randn(6, 1, 4)
    (k if where == "key" else v)[4] = math.nan
    out, _ = attend_reference(q, k, v, causal(4, 6, 1), 1.0)
    assert [bool(row.isnan().all()) for row in out] == [False, False, False, True]
    assert bool(out[:3].isfinite().all())


def test_logit_cap() -> None:
    q, k = torch.full((1, 1, 1), 100.0), torch.tensor([1.0, -1.0]).view(2, 1, 1)
    _, lse = attend_reference(q, k, k, causal(1, 2, 1), 1.0, logit_cap=5.0)
    assert float(lse) == pytest.approx(math.log(math.exp(5.0) + math.exp(-5.0)))


def test_absorbed_mla_is_naive_mla() -> None:
    torch.manual_seed(1)
    rows, keys, heads, nope, rope, rank, v_dim, hidden = 5, 11, 3, 8, 4, 16, 6, 20
    q_nope, q_rope = torch.randn(rows, heads, nope), torch.randn(rows, heads, rope)
    latent, k_rope = torch.randn(keys, rank), torch.randn(keys, rope)
    weights = MLAWeights(
        w_uk=torch.randn(heads, nope, rank),
        w_uv=torch.randn(heads, rank, v_dim),
        w_o=torch.randn(heads, v_dim, hidden),
    )
    inputs = (q_nope, q_rope, latent, k_rope, weights, causal(rows, keys, 6), 0.2)
    naive = mla_naive(*inputs)
    assert naive.shape == (rows, hidden)
    torch.testing.assert_close(mla_absorbed(*inputs), naive, rtol=1e-5, atol=1e-5)
    one = mla_absorbed(*inputs, one_output_product=True)
    torch.testing.assert_close(one, naive, rtol=1e-5, atol=1e-5)
    assert absorb_query(q_nope, weights.w_uk).shape == (rows, heads, rank)
    assert absorb_output(weights.w_uv, weights.w_o).shape == (heads, rank, hidden)
