"""Every adapter against the oracle, on a GPU: ``pytest -m gpu tests/attention``. What the GPU, or
what is installed, can not run is skipped with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from work import (
    DECODE,
    PREFILL,
    STACKED,
    VERIFY,
    Sizes,
    check,
    make_pool,
    make_work,
    reference_parts,
)

from tessera_sglang.attention.kernels.base import (
    AttentionShape,
    KernelUnavailableError,
    Phase,
    RowFormat,
)
from tessera_sglang.attention.kernels.flashinfer import FlashInferKernel
from tessera_sglang.attention.kernels.flashmla import FlashMLAKernel
from tessera_sglang.attention.kernels.tilelang_decode import TileLangKernel
from tessera_sglang.attention.kernels.triton_decode import TritonKernel
from tessera_sglang.attention.packed_rows import pack, unpack

pytestmark = pytest.mark.gpu

MLA = AttentionShape(16, 1, 576, 512, True, 64, torch.bfloat16)
LLAMA = AttentionShape(32, 8, 128, 128, False, 64, torch.bfloat16)
BF16_TOLERANCE = 2e-2  # outputs are stored in it, and probabilities are rounded to it
BF16_COSINE = 2e-5


def on_gpu(
    kernel: Any,
    shape: AttentionShape,
    parts: Sizes,
    phase: Phase,
    *,
    causal: bool = False,
    capacity: int | None = None,
) -> None:
    """The kernel over these parts against the oracle."""
    refusal = kernel.capabilities.refusal(shape, phase, "cuda", _compute())
    if refusal is not None:
        pytest.skip(refusal)
    torch.manual_seed(0)
    pool = make_pool(
        [keys for _, keys in parts],
        kv_heads=shape.kv_heads,
        key_width=shape.key_width,
        value_width=shape.value_width,
        latent=shape.latent,
        dtype=shape.dtype,
        page_tokens=shape.page_tokens,
    )
    described = [(rows, slots) for (rows, _), slots in zip(parts, pool.slots, strict=True)]
    work = make_work(described, causal, shape.page_tokens, capacity=capacity, device="cuda")
    q = torch.randn(work.rows, shape.query_heads, shape.key_width, device="cuda").to(shape.dtype)
    check(
        kernel,
        shape,
        work,
        q,
        pool.to("cuda"),
        scale=shape.key_width**-0.5,
        logit_cap=shape.logit_cap,
        tolerance=BF16_TOLERANCE,
        cosine=BF16_COSINE,
    )


def _compute() -> tuple[int, int]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.cuda.get_device_capability()


def or_skip(make: Any) -> Any:
    try:
        return make()
    except KernelUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_flashmla_parity(heads: int) -> None:
    kernel, shape = or_skip(FlashMLAKernel), replace(MLA, query_heads=heads)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.DECODE)
    on_gpu(kernel, shape, VERIFY, Phase.VERIFY, causal=True)
    on_gpu(kernel, shape, ((2, 65), (2, 0), (2, 130)), Phase.DECODE, capacity=192)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_flashmla_parity_on_packed_rows(heads: int, causal: bool) -> None:
    kernel = or_skip(FlashMLAKernel)
    shape = replace(MLA, query_heads=heads, rows=RowFormat.FP8_PACKED)
    refusal = kernel.capabilities.refusal(shape, Phase.VERIFY, "cuda", _compute())
    if refusal is not None:
        pytest.skip(refusal)
    parts = VERIFY if causal else STACKED
    torch.manual_seed(0)
    pool = make_pool(
        [keys for _, keys in parts],
        kv_heads=1,
        key_width=576,
        value_width=512,
        latent=True,
        dtype=torch.bfloat16,
    )
    keys = pool.keys.nan_to_num()  # NaN has no place in a quantised row
    packed = pack(keys[:, 0, :512], keys[:, 0, 512:])  # [slots, 656]
    read = unpack(packed, torch.float32)[:, None]
    packed = packed.cuda()[:, None]
    described = [(rows, slots) for (rows, _), slots in zip(parts, pool.slots, strict=True)]
    work = make_work(described, causal, device="cuda")
    q = torch.randn(work.rows, heads, 576, device="cuda").to(torch.bfloat16)
    prepared = kernel.prepare(work, shape, scale=0.05)
    out, lse = kernel.run(prepared, q, packed, packed)
    wanted, wanted_lse = reference_parts(work, q, read, read[..., :512], 0.05)
    assert torch.equal(lse.cpu().isneginf(), wanted_lse.isneginf())
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=2e-2, atol=2e-2)
    shown = ~wanted_lse.isneginf()
    torch.testing.assert_close(out.cpu().float()[shown], wanted[shown], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("heads", [16, 40, 128])
def test_flashinfer_parity_on_mla(heads: int) -> None:
    kernel, shape = or_skip(FlashInferKernel), replace(MLA, query_heads=heads)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.PREFILL)
    on_gpu(kernel, shape, VERIFY, Phase.VERIFY, causal=True)
    on_gpu(kernel, shape, PREFILL, Phase.PREFILL, causal=True)


@pytest.mark.parametrize("shape", [LLAMA, replace(LLAMA, query_heads=28, kv_heads=4)], ids=str)
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_flashinfer_parity_on_grouped_heads(shape: AttentionShape, logit_cap: float) -> None:
    kernel, shape = or_skip(FlashInferKernel), replace(shape, logit_cap=logit_cap)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.PREFILL)
    on_gpu(kernel, shape, PREFILL, Phase.PREFILL, causal=True)


def test_triton_parity() -> None:
    library = pytest.importorskip("sglang.kernels.ops.attention.decode_attention")
    kernel = TritonKernel(library.decode_attention_fwd)
    for shape in (
        MLA,
        replace(MLA, query_heads=128),
        LLAMA,
        replace(LLAMA, query_heads=28, kv_heads=4),
    ):
        on_gpu(kernel, shape, DECODE, Phase.DECODE)
        on_gpu(kernel, shape, STACKED, Phase.DECODE)
        on_gpu(kernel, shape, ((2, 65), (2, 0), (2, 130)), Phase.DECODE, capacity=192)


@pytest.mark.parametrize("heads", [16, 128])
def test_tilelang_parity(heads: int) -> None:
    kernel, shape = or_skip(TileLangKernel), replace(MLA, query_heads=heads)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.DECODE)
    on_gpu(kernel, shape, VERIFY, Phase.VERIFY, causal=True)
