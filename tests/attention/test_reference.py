"""The oracle against PyTorch's own attention, and MLA against itself: a ladder of precisions.

Bounds are absolute-or-relative, ``|got - want| <= bound * (1 + |want|)``, and hold for every
quantity of a trace, from the score terms to the output. Measured maxima stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_sglang.attention.reference import (
    MLATrace,
    MLAWeights,
    absorb_output,
    absorb_query,
    attend_reference,
    causal_mask,
    mla_absorbed,
    mla_naive,
    trace_absorbed,
    trace_naive,
    verify_mask,
)

LENGTHS = [1, 63, 64, 65, 127, 128, 129]


@dataclass(frozen=True)
class Dims:
    nope: int
    rope: int
    v_dim: int
    rank: int
    hidden: int


DEEPSEEK = Dims(nope=128, rope=64, v_dim=128, rank=512, hidden=64)  # V2 and V3; hidden is free
TINY = Dims(nope=8, rope=4, v_dim=6, rank=16, hidden=20)


@cache
def random_weights(heads: int, dims: Dims) -> MLAWeights:
    torch.manual_seed(heads)
    return MLAWeights(
        w_uk=torch.randn(heads, dims.nope, dims.rank) * dims.rank**-0.5,
        w_uv=torch.randn(heads, dims.rank, dims.v_dim) * dims.rank**-0.5,
        w_o=torch.randn(heads, dims.v_dim, dims.hidden) * (heads * dims.v_dim) ** -0.5,
    )


@dataclass(frozen=True)
class Inputs:
    """Arguments of an MLA function, in its order; scores have a spread of about 1."""

    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    weights: MLAWeights
    mask: Tensor
    scale: float

    @classmethod
    def random(cls, mask: Tensor, heads: int, dims: Dims) -> Inputs:
        weights = random_weights(heads, dims)
        torch.manual_seed(mask.numel() + heads)
        rows, keys = mask.shape
        return cls(
            torch.randn(rows, heads, dims.nope),
            torch.randn(rows, heads, dims.rope),
            torch.randn(keys, dims.rank),
            torch.randn(keys, dims.rope),
            weights,
            mask,
            (dims.nope + dims.rope) ** -0.5,
        )

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in fields(self))

    def seen_by(self, rows: slice, keys: Tensor) -> Inputs:
        """Some of the queries, over some of the keys, all of which they see causally."""
        return replace(
            self,
            q_nope=self.q_nope[rows],
            q_rope=self.q_rope[rows],
            latent=self.latent[keys],
            k_rope=self.k_rope[keys],
            mask=self.mask[rows][:, keys],
        )


def close(got: MLATrace, want: MLATrace, bound: float, cosine: float = 0.0) -> None:
    """Every quantity that both have; ``cosine`` is how far it may be below 1."""
    for field in fields(MLATrace):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if a is None or b is None:
            continue
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
        if cosine and bool(b.any()):
            angle = F.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0)
            assert float(angle) >= 1 - cosine, field.name


def ladder(inputs: Inputs) -> None:
    """Naive float64, naive float32, absorbed float32 with both output products, absorbed bfloat16."""
    bf16 = trace_absorbed(*inputs, precision=torch.bfloat16)
    one = trace_absorbed(*inputs, precision=torch.float32, one_output_product=True)
    absorbed = trace_absorbed(*inputs, precision=torch.float32)
    naive = trace_naive(*inputs, precision=torch.float32)
    oracle, oracle_absorbed = trace_naive(*inputs), trace_absorbed(*inputs)
    close(oracle_absorbed, oracle, 1e-6, 1e-12)  # measured: equal, once they are float32
    close(naive, oracle, 1e-5, 1e-10)  # 4e-6, the output; cosine 3e-12
    close(absorbed, naive, 1e-5, 1e-10)  # 2e-6, content scores; 2e-12
    close(one, absorbed, 2e-5, 1e-10)  # 8e-6, the output of 128 heads; 2e-11
    close(bf16, oracle_absorbed, 3e-2, 1e-4)  # 1.8e-2, content scores; 4e-5 at tiny widths
    assert naive.latent_out is None
    assert absorbed.latent_out is not None


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    yield
    torch.set_num_threads(threads)


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


@pytest.mark.parametrize("heads", [1, 2, 16, 128])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dims", [TINY, DEEPSEEK], ids=["tiny", "deepseek"])
def test_the_ladder_in_prefill_append_and_decode(dims: Dims, length: int, heads: int) -> None:
    most = length if heads * dims.rank <= 1024 else 5  # expanded, 128 heads are 16 MB a token
    for rows in sorted({1, min(length, 5), min(length, most)}):
        ladder(Inputs.random(causal_mask(rows, length), heads, dims))


def test_the_ladder_at_4096_keys() -> None:
    ladder(Inputs.random(causal_mask(2, 4096), 16, DEEPSEEK))


def test_public_forms_are_the_outputs_of_the_traces() -> None:
    inputs = Inputs.random(causal_mask(5, 11), 3, TINY)
    naive = mla_naive(*inputs)
    assert naive.shape == (5, TINY.hidden)
    assert torch.equal(naive, trace_naive(*inputs).out)
    torch.testing.assert_close(mla_absorbed(*inputs), naive, rtol=1e-6, atol=1e-6)
    one = mla_absorbed(*inputs, one_output_product=True)
    torch.testing.assert_close(one, naive, rtol=1e-6, atol=1e-6)
    assert absorb_query(inputs.q_nope, inputs.weights.w_uk).shape == (5, 3, TINY.rank)
    product = absorb_output(inputs.weights.w_uv, inputs.weights.w_o)
    assert product.shape == (3, TINY.rank, TINY.hidden)


def test_a_trace_is_consistent_with_itself() -> None:
    inputs = Inputs.random(causal_mask(7, 20), 3, TINY)
    trace = trace_absorbed(*inputs)
    scores = (trace.content + trace.position).masked_fill(~inputs.mask[:, None], -math.inf)
    torch.testing.assert_close(trace.row_max, scores.amax(-1))
    torch.testing.assert_close(trace.lse, scores.logsumexp(-1))
    p = (scores - trace.lse[..., None]).exp()
    assert trace.latent_out is not None
    torch.testing.assert_close(trace.latent_out, p @ inputs.latent)
    head_out = torch.einsum("thr,hrv->thv", trace.latent_out, inputs.weights.w_uv)
    torch.testing.assert_close(trace.head_out, head_out)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trace", [trace_naive, trace_absorbed])
def test_what_an_invisible_key_holds_never_shows(
    trace: Callable[..., MLATrace], precision: torch.dtype
) -> None:
    inputs = Inputs.random(causal_mask(9, 30), 2, TINY)
    inputs.mask[:, [0, 11]] = False
    inputs.mask[4] = False  # sees nothing at all
    clean = trace(*inputs, precision=precision)
    inputs.latent[[0, 11]] = math.nan
    inputs.k_rope[[0, 11]] = math.inf
    close(trace(*inputs, precision=precision), clean, 0.0)
    assert bool((clean.lse[4] == -math.inf).all())
    assert bool((clean.row_max[4] == -math.inf).all())
    assert not clean.out[4].any()
    inputs.latent[29] = math.nan  # the last row alone sees the last key
    broken = trace(*inputs, precision=precision)
    assert bool(broken.out[8].isnan().all())
    assert torch.equal(broken.out[:8], clean.out[:8])


def test_strided_inputs() -> None:
    inputs = Inputs.random(causal_mask(9, 30), 2, TINY)
    row = torch.stack([torch.cat([inputs.latent, inputs.k_rope], dim=1)] * 2, dim=2)  # [S, C, 2]
    q = torch.cat([inputs.q_nope, inputs.q_rope], dim=2).transpose(0, 1).contiguous()  # [H, T, D]
    strided = replace(
        inputs,
        q_nope=q.transpose(0, 1)[..., : TINY.nope],
        q_rope=q.transpose(0, 1)[..., TINY.nope :],
        latent=row[:, : TINY.rank, 1],
        k_rope=row[:, TINY.rank :, 1],
        mask=inputs.mask.T.contiguous().T,
    )
    for trace in (trace_naive, trace_absorbed):
        close(trace(*strided), trace(*inputs), 1e-6)


def test_64_appends_are_one_prefill() -> None:
    inputs = Inputs.random(causal_mask(100, 100), 2, TINY)
    for trace in (trace_naive, trace_absorbed):
        whole = trace(*inputs).out
        first = trace(*inputs.seen_by(slice(0, 36), torch.arange(36))).out
        steps = [
            trace(*inputs.seen_by(slice(n, n + 1), torch.arange(n + 1))).out for n in range(36, 100)
        ]
        torch.testing.assert_close(torch.cat([first, *steps]), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, -1, 0, 0, 1, 3, 5], [-1]])
@pytest.mark.parametrize("prefix", [0, 63, 64])
def test_verifying_a_tree_is_decoding_each_of_its_paths(prefix: int, parents: list[int]) -> None:
    inputs = Inputs.random(verify_mask(prefix, parents), 2, TINY)
    ladder(inputs)
    verified = trace_absorbed(*inputs)
    for token in range(len(parents)):
        path, at = [], token
        while at >= 0:
            path.append(prefix + at)
            at = parents[at]
        keys = torch.tensor([*range(prefix), *reversed(path)])
        decode = replace(
            inputs.seen_by(slice(token, token + 1), keys), mask=causal_mask(1, len(keys))
        )
        step = trace_absorbed(*decode)
        row = slice(token, token + 1)
        torch.testing.assert_close(step.out, verified.out[row], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(step.lse, verified.lse[row], rtol=1e-6, atol=1e-6)


def test_masks() -> None:
    assert torch.equal(causal_mask(3, 3), torch.ones(3, 3, dtype=torch.bool).tril())
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert causal_mask(0, 4).shape == (0, 4)
    assert torch.equal(verify_mask(5, range(-1, 3)), causal_mask(4, 9))
    assert verify_mask(1, [-1, -1]).tolist() == [[True, True, False], [True, False, True]]
    with pytest.raises(ValueError, match="not the last tokens"):
        causal_mask(5, 4)
    for parents in ([0], [-1, 1], [-2], [-1, 2, 0]):
        with pytest.raises(ValueError, match="can not continue"):
            verify_mask(4, parents)
