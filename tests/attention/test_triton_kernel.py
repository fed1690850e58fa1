"""SGLang's Triton decode kernel through its adapter, on the CPU by Triton's interpreter.

``TRITON_INTERPRET`` has to be set before triton is imported, so the kernel runs in a process of its own,
one for all cases: this file, as a program, prints what became of each of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from work import check, make_pool, make_work

from tessera_sglang.attention.kernels.base import AttentionShape, Phase
from tessera_sglang.attention.kernels.triton_decode import (
    TritonKernel,
    heads_as_rows,
    padded_group,
    rows_as_heads,
)

LENGTHS = (1, 63, 64, 65, 127, 129)


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    parts: tuple[tuple[int, int], ...]  # query rows and keys
    latent: bool = False
    dtype: torch.dtype = torch.float32
    logit_cap: float = 0.0
    tolerance: float = 2e-5
    capacity: int | None = None

    def run(self, kernel: TritonKernel) -> None:
        """The kernel against the oracle."""
        torch.manual_seed(0)
        pool = make_pool(
            [keys for _, keys in self.parts],
            kv_heads=self.kv_heads,
            key_width=self.key_width,
            value_width=self.value_width,
            latent=self.latent,
            dtype=self.dtype,
        )
        parts = [(rows, slots) for (rows, _), slots in zip(self.parts, pool.slots, strict=True)]
        work = make_work(parts, capacity=self.capacity)
        shape = AttentionShape(
            self.heads,
            self.kv_heads,
            self.key_width,
            self.value_width,
            self.latent,
            64,
            self.dtype,
            logit_cap=self.logit_cap,
        )
        assert kernel.capabilities.refusal(shape, Phase.DECODE, "cpu") is None
        q = torch.randn(work.rows, self.heads, self.key_width).to(self.dtype)
        check(
            kernel,
            shape,
            work,
            q,
            pool,
            scale=self.key_width**-0.5,
            logit_cap=self.logit_cap,
            tolerance=self.tolerance,
            cosine=1e-4 if self.tolerance > 1e-3 else 1e-7,
        )


DECODE = tuple((1, length) for length in LENGTHS)
STACKED = ((3, 65), (1, 129), (4, 64), (2, 0), (0, 63), (1, 1))
MLA = {"heads": 16, "kv_heads": 1, "key_width": 576, "value_width": 512, "latent": True}
TINY_MLA = {"heads": 4, "kv_heads": 1, "key_width": 48, "value_width": 32, "latent": True}
LLAMA = {"heads": 32, "kv_heads": 8, "key_width": 128, "value_width": 128}
QWEN = {"heads": 28, "kv_heads": 4, "key_width": 128, "value_width": 128}  # Qwen2.5-7B
TINY_GQA = {"heads": 6, "kv_heads": 2, "key_width": 32, "value_width": 24}

CASES = (
    Case("mla decode", parts=DECODE, **MLA),
    Case("mla stacked", parts=((3, 65), (1, 129), (2, 0), (1, 1)), **MLA),
    Case("mla float16", parts=((2, 65),), dtype=torch.float16, tolerance=3e-3, **MLA),
    Case("several splits", parts=((1, 1200), (2, 700)), **{**TINY_MLA, "heads": 2}),
    Case("mla static", parts=((2, 65), (2, 0)), capacity=128, **MLA),
    Case("tiny mla decode", parts=DECODE, **TINY_MLA),
    Case("tiny mla stacked", parts=STACKED, **TINY_MLA),
    Case("one head", parts=((1, 129),), **{**TINY_MLA, "heads": 1}),
    Case("all parts empty", parts=((1, 0), (2, 0)), **TINY_MLA),
    Case("llama decode", parts=((1, 1), (1, 65)), **LLAMA),
    Case("llama stacked", parts=((2, 33), (1, 0)), **LLAMA),
    Case("tiny gqa decode", parts=DECODE, **TINY_GQA),
    Case("qwen decode", parts=((1, 64),), **QWEN),
    Case("qwen stacked", parts=((3, 33),), **QWEN),
    Case("capped", parts=((3, 65), (1, 2)), logit_cap=2.0, **TINY_GQA),
    Case("tiny gqa stacked", parts=STACKED, **TINY_GQA),
    Case("tiny gqa static", parts=((3, 70), (3, 64)), capacity=100, **TINY_GQA),
    Case("multi-head", parts=((1, 65), (1, 0)), **{**TINY_GQA, "heads": 2}),
    Case("multi-head stacked", parts=((3, 65),), **{**TINY_GQA, "heads": 2}),
)


@cache
def outcomes() -> dict[str, str]:
    """By case, ``""`` or what went wrong."""
    pytest.importorskip("sglang")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, str] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity_with_the_oracle(case: Case) -> None:
    problem = outcomes()[case.name]
    assert not problem, problem


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize(("rows", "group"), [(1, 4), (2, 3), (4, 7), (16, 1), (3, 20)])
def test_rows_become_heads_and_come_back(kv_heads: int, rows: int, group: int) -> None:
    padded = padded_group(rows, group, kv_heads)
    q = torch.randn(2, rows, kv_heads * group, 5)
    heads = rows_as_heads(q, kv_heads, padded)
    assert heads.shape == (2, kv_heads * rows * padded, 5)
    assert heads.is_contiguous()
    per_kv_head = rows * padded
    for kv_head in range(
        kv_heads
    ):  # a KV head's rows stand together: head h reads h // per_kv_head
        stacked = heads[:, kv_head * per_kv_head : (kv_head + 1) * per_kv_head]
        own = q[:, :, kv_head * group : (kv_head + 1) * group]
        assert torch.equal(stacked.view(2, rows, padded, 5)[:, :, :group], own)
    assert torch.equal(heads_as_rows(heads, rows, kv_heads, group), q)
    assert torch.equal(heads_as_rows(heads[..., 0], rows, kv_heads, group), q[..., 0])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 20])
def test_tiles_of_heads_never_straddle_two_kv_heads(rows: int, group: int) -> None:
    assert padded_group(rows, group, 1) == group
    padded = padded_group(rows, group, 4)
    assert padded >= group
    tile = min(16, rows * padded)
    assert (rows * padded) % tile == 0
    assert padded < 2 * group or padded <= 16


def test_what_it_can_run() -> None:
    def launch(*_: object) -> None:
        raise AssertionError("not called")

    kernel, interpreted = TritonKernel(launch), TritonKernel(launch, interpreted=True)
    shape = AttentionShape(16, 1, 576, 512, True, 64, torch.bfloat16)
    assert kernel.capabilities.refusal(shape, Phase.DECODE, "cuda", (8, 9)) is None
    refusal = interpreted.capabilities.refusal(shape, Phase.DECODE, "cpu")
    assert refusal == "takes float16, float32, not bfloat16"
    refusal = kernel.capabilities.refusal(shape, Phase.DECODE, "cpu")
    assert refusal == "runs on cuda, not on cpu"
    assert kernel.capabilities.refusal(shape, Phase.VERIFY, "cuda") == "has no verify kernel"
    single = AttentionShape(16, 1, 576, 512, True, 64, torch.float32)
    refusal = kernel.capabilities.refusal(single, Phase.DECODE, "cuda")
    assert refusal == "takes bfloat16, float16, not float32"


def _main() -> None:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    torch.set_num_threads(1)
    kernel = TritonKernel(decode_attention_fwd, interpreted=True)
    found = {}
    for case in CASES:
        begun = time.perf_counter()
        try:
            case.run(kernel)
            found[case.name] = ""
        except Exception:
            found[case.name] = traceback.format_exc(limit=-6)
        print(f"{case.name}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
