"""FlashAttention 3's adapter against what the library documents, written down in PyTorch.

The library runs on Hopper only. What can be wrong without it is the call: offsets, tables, lengths, how
MLA rows are cut, which rows are hidden. A function that does what the documentation of
``flash_attn_with_kvcache`` says takes its place here, so nothing is said of the kernel's numbers.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from work import DECODE, PREFILL, STACKED, VERIFY, Sizes, check, make_pool, make_work

from tessera_sglang.attention.kernels.base import AttentionShape, Phase
from tessera_sglang.attention.kernels.fa3 import FA3Kernel
from tessera_sglang.attention.reference import attend_reference

MLA = AttentionShape(4, 1, 96, 64, True, 64, torch.float32)
GQA = AttentionShape(6, 2, 32, 32, False, 64, torch.float32)


def documented(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    softcap: float,
    return_softmax_lse: bool,
    qv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Any]:
    """Sequence p has the queries ``cu_seqlens_q[p] .. [p + 1]`` and the first ``cache_seqlens[p]`` keys
    of its pages; ``qv`` scores against the values; the causal mask is aligned at the bottom right."""
    assert return_softmax_lse
    assert {t.dtype for t in (page_table, cache_seqlens, cu_seqlens_q)} == {torch.int32}
    assert bool((cache_seqlens > 0).all()), "what the library makes of no keys is not known"
    out = q.new_full((q.shape[0], q.shape[1], v_cache.shape[-1]), math.nan)
    lse = q.new_full((q.shape[1], q.shape[0]), math.nan)
    for part in range(len(cache_seqlens)):
        rows = slice(int(cu_seqlens_q[part]), int(cu_seqlens_q[part + 1]))
        count, keys = rows.stop - rows.start, int(cache_seqlens[part])
        assert count <= max_seqlen_q
        k = k_cache[page_table[part].long()].flatten(0, 1)[:keys]
        v = v_cache[page_table[part].long()].flatten(0, 1)[:keys]
        query = q[rows]
        if qv is not None:
            query, k = torch.cat([qv[rows], query], -1), torch.cat([v, k], -1)
        mask = torch.ones(count, keys, dtype=torch.bool)
        if causal:
            mask = mask.tril(keys - count)
        part_out, part_lse = attend_reference(query, k, v, mask, softmax_scale, softcap)
        out[rows], lse[:, rows] = part_out, part_lse.T
    return out, lse, None


@pytest.mark.parametrize("shape", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize(
    ("parts", "causal"),
    [(DECODE, False), (STACKED, False), (VERIFY, True), (PREFILL, True)],
    ids=["decode", "stacked", "verify", "prefill"],
)
def test_the_call_says_what_the_work_says(
    shape: AttentionShape, parts: Sizes, causal: bool
) -> None:
    torch.manual_seed(0)
    pool = make_pool(
        [keys for _, keys in parts],
        kv_heads=shape.kv_heads,
        key_width=shape.key_width,
        value_width=shape.value_width,
        latent=shape.latent,
    )
    pool.keys.nan_to_num_(3.0)  # an empty part reads one key of page 0
    pool.values.nan_to_num_(3.0)
    work = make_work(
        [(rows, slots) for (rows, _), slots in zip(parts, pool.slots, strict=True)], causal
    )
    q = torch.randn(work.rows, shape.query_heads, shape.key_width)
    check(FA3Kernel(documented), shape, work, q, pool, scale=0.2)


def test_what_it_refuses() -> None:
    can = FA3Kernel(documented).capabilities
    v3 = AttentionShape(16, 1, 576, 512, True, 64, torch.bfloat16)
    assert can.refusal(v3, Phase.PREFILL, "cuda", (9, 0)) is None
    assert "compute capability" in str(can.refusal(v3, Phase.PREFILL, "cuda", (8, 0)))
    assert "96/64" in str(can.refusal(MLA, Phase.DECODE, "cuda", (9, 0))) or "float32" in str(
        can.refusal(MLA, Phase.DECODE, "cuda", (9, 0))
    )
