# mypy: ignore-errors
"""The TileLang kernel of `tilelang_decode`: attention of stacked heads to scattered MLA rows.

One source for two targets. On a GPU, tiles are in shared memory and registers. Compiled to C, which is
how it is tested where there is no GPU, they are local arrays, and the two reductions over a row are
loops: TileLang 0.1.12 has no others for a CPU. Everything else is the same.

TileLang reads the source of what is below and evaluates its annotations, so that this module has no
``from __future__ import annotations``, and mypy can make nothing of it.

Online softmax: Milakov & Gimelshein, arXiv 1805.02867; split keys: Flash-Decoding (Dao et al., 2023).
"""

import math
from typing import Any

NOTHING = (
    -1.0e30
)  # a score that is hidden; an lse below NOTHING / 1e10 is of a row that saw nothing


def build(
    tilelang: Any,
    *,
    dtype: str,
    key_width: int,
    value_width: int,
    block_heads: int,
    block_keys: int,
    scale: float,
    target: Any,
    threads: int = 128,
) -> Any:
    """Compile.

    Args:
        tilelang: the module.
        dtype: of queries and rows, TileLang's name.
        key_width: channels of a row; value_width: its first channels, which are the value.
        block_heads: heads of a block, a multiple of 16; block_keys: keys of a step, likewise.
        scale: of the scores.
        target: ``"c"``, or what TileLang knows as a GPU.
        threads: of a block.

    Returns:
        ``kernel(Q, KV, Bounds, Limits, Slots, Out, Lse)``:

        * ``Q [b, heads, key_width]``, ``KV [num_slots, key_width]``, contiguous;
        * ``Bounds [b, splits + 1]`` int32: split s of entry i has the keys
          ``Slots[Bounds[i, s]:Bounds[i, s + 1]]``, possibly none;
        * ``Limits [b, heads]`` int32: a head sees keys before this index into ``Slots``;
        * ``Slots [keys]`` int64: rows of ``KV``;
        * ``Out [b, splits, heads, value_width]`` and natural-log ``Lse [b, splits, heads]``, float32,
          written: attention to each split. A head that sees nothing has an lse below -1e20.
    """
    T = tilelang.language
    cpu = target == "c"
    shared, fragment = (T.alloc_local, T.alloc_local) if cpu else (T.alloc_shared, T.alloc_fragment)
    rope_width = key_width - value_width
    to_exp2 = scale * math.log2(math.e)
    # Rows are gathered one by one: there is nothing for a producer warp to do with bulk copies.
    configs = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}
    extra = {"execution_backend": "cython"} if cpu else {}

    @T.macro
    def row_max(scores, top):
        if cpu:
            for h, j in T.grid(block_heads, block_keys):
                top[h] = T.max(top[h], scores[h, j])
        else:
            T.reduce_max(scores, top, dim=1, clear=False)

    @T.macro
    def row_sum(scores, added):
        if cpu:
            T.fill(added, 0)
            for h, j in T.grid(block_heads, block_keys):
                added[h] += scores[h, j]
        else:
            T.reduce_sum(scores, added, dim=1)

    @tilelang.jit(target=target, pass_configs=configs, **extra)
    def decode():
        b, heads, num_slots = T.dynamic("b"), T.dynamic("heads"), T.dynamic("num_slots")
        keys, splits, ends = T.dynamic("num_keys"), T.dynamic("splits"), T.dynamic("ends")

        @T.prim_func
        def main(
            Q: T.Tensor((b, heads, key_width), dtype),
            KV: T.Tensor((num_slots, key_width), dtype),
            Bounds: T.Tensor((b, ends), "int32"),
            Limits: T.Tensor((b, heads), "int32"),
            Slots: T.Tensor((keys,), "int64"),
            Out: T.Tensor((b, splits, heads, value_width), "float32"),
            Lse: T.Tensor((b, splits, heads), "float32"),
        ):
            with T.Kernel(T.ceildiv(heads, block_heads), splits, b, threads=threads) as (
                bx,
                by,
                bz,
            ):
                q = shared((block_heads, value_width), dtype)
                q_rope = shared((block_heads, rope_width), dtype)
                row = shared((block_keys, value_width), dtype)
                row_rope = shared((block_keys, rope_width), dtype)
                p = shared((block_heads, block_keys), dtype)
                s = fragment((block_heads, block_keys), "float32")
                o = fragment((block_heads, value_width), "float32")
                top = fragment((block_heads,), "float32")
                before = fragment((block_heads,), "float32")
                decay = fragment((block_heads,), "float32")
                total = fragment((block_heads,), "float32")
                added = fragment((block_heads,), "float32")
                first = Bounds[bz, by]
                last = Bounds[bz, by + 1]
                low = bx * block_heads
                T.copy(Q[bz, low : low + block_heads, 0:value_width], q)
                T.copy(Q[bz, low : low + block_heads, value_width:key_width], q_rope)
                T.fill(o, 0)
                T.fill(total, 0)
                T.fill(top, NOTHING)
                for i in T.serial(T.ceildiv(last - first, block_keys)):
                    for j, d in T.Parallel(block_keys, value_width):
                        at = first + i * block_keys + j
                        row[j, d] = T.if_then_else(at < last, KV[Slots[T.min(at, last - 1)], d], 0)
                    for j, d in T.Parallel(block_keys, rope_width):
                        at = first + i * block_keys + j
                        row_rope[j, d] = T.if_then_else(
                            at < last, KV[Slots[T.min(at, last - 1)], value_width + d], 0
                        )
                    for h, j in T.Parallel(block_heads, block_keys):
                        s[h, j] = T.if_then_else(
                            first + i * block_keys + j < T.min(last, Limits[bz, low + h]),
                            0,
                            NOTHING,
                        )
                    T.gemm(q, row, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                    T.gemm(q_rope, row_rope, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                    T.copy(top, before)
                    row_max(s, top)
                    for h in T.Parallel(block_heads):
                        decay[h] = T.exp2((before[h] - top[h]) * to_exp2)
                    for h, j in T.Parallel(block_heads, block_keys):
                        s[h, j] = T.exp2((s[h, j] - top[h]) * to_exp2)
                    row_sum(s, added)
                    for h in T.Parallel(block_heads):
                        total[h] = total[h] * decay[h] + added[h]
                    for h, d in T.Parallel(block_heads, value_width):
                        o[h, d] *= decay[h]
                    T.copy(s, p)
                    T.gemm(p, row, o, policy=T.GemmWarpPolicy.FullCol)
                for h, d in T.Parallel(block_heads, value_width):
                    o[h, d] /= T.if_then_else(total[h] == 0.0, 1.0, total[h])
                for h in T.Parallel(block_heads):
                    total[h] = T.if_then_else(
                        total[h] == 0.0, NOTHING, T.log(total[h]) + top[h] * scale
                    )
                T.copy(o, Out[bz, by, low : low + block_heads, 0:value_width])
                T.copy(total, Lse[bz, by, low : low + block_heads])

        return main

    return decode()
