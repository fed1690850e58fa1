"""Adapters of CUDA libraries: what can be said of them without a GPU (which ABI, what is refused, what
the arguments of a call mean), and, marked ``gpu``, parity with the oracle."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from work import Pool, check, make_pool, make_work, part_slots, reference_parts

from tessera_sglang.attention.kernels.base import (
    AttentionShape,
    Capabilities,
    KernelUnavailableError,
    Phase,
    RowFormat,
    Work,
)
from tessera_sglang.attention.kernels.flashinfer import FlashInferKernel, planned_heads
from tessera_sglang.attention.kernels.flashmla import FlashMLAKernel, key_indices, padded_heads
from tessera_sglang.attention.kernels.flashmla_abi import Abi, recognise_abi
from tessera_sglang.attention.kernels.library import import_library, require
from tessera_sglang.attention.kernels.paging import blind_rows, in_pages, page_plan
from tessera_sglang.attention.kernels.stacking import buckets, stack
from tessera_sglang.attention.packed_rows import pack, unpack

MLA = AttentionShape(16, 1, 576, 512, True, 64, torch.bfloat16)
LLAMA = AttentionShape(32, 8, 128, 128, False, 64, torch.bfloat16)

# Query rows and keys of the parts.
DECODE = tuple((1, keys) for keys in (1, 63, 64, 65, 127, 129, 700))
STACKED = ((3, 65), (1, 129), (16, 300), (2, 0), (1, 1), (5, 64), (5, 128))
VERIFY = ((4, 4), (4, 65), (3, 129), (1, 1), (4, 700))
PREFILL = ((100, 100), (7, 129), (1, 64), (65, 400))


def work_of(
    parts: tuple[tuple[int, int], ...],
    causal: bool = False,
    capacity: int | None = None,
    **pool: Any,
) -> tuple[Work, Pool]:
    shape = {"kv_heads": 1, "key_width": 8, "value_width": 4, "latent": True, **pool}
    made = make_pool([keys for _, keys in parts], **shape)
    described = [(rows, slots) for (rows, _), slots in zip(parts, made.slots, strict=True)]
    return make_work(described, causal, capacity=capacity), made


# --- libraries that are missing or unknown -------------------------------------------------------


def test_a_missing_library_is_named_with_a_remedy() -> None:
    with pytest.raises(KernelUnavailableError, match=r"^no_such_library is not installed; install"):
        import_library("no_such_library", "install it")
    with pytest.raises(KernelUnavailableError, match=r"^json has no decode; install it$"):
        require(import_library("json", "…"), "decode", "install it")


def test_a_broken_library_says_what_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text('raise OSError("libcuda.so.1: no such\\nfile")\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KernelUnavailableError) as caught:
        import_library("broken_library", "repair it")
    assert str(caught.value) == (
        "broken_library does not load here (OSError: libcuda.so.1: no such); repair it"
    )


def test_a_library_without_what_it_needs_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_library.py").write_text("import its_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KernelUnavailableError, match=r"^its_dependency is not installed"):
        import_library("half_library", "install it")


# --- FlashMLA's ABIs -----------------------------------------------------------------------------


def _decode(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
    softmax_scale=None, causal=False,
):  # fmt: skip
    raise AssertionError("not called")


def _with(*names: str) -> Any:
    """The decode function with more parameters."""
    parameters = list(inspect.signature(_decode).parameters.values())
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names
    ]

    def decode(*args: Any, **kwargs: Any) -> Any:
        return _decode(*args, **kwargs)

    decode.__signature__ = inspect.Signature(parameters)
    return decode


def _lazy(*args: Any, **kwargs: Any) -> tuple[Any, None]:
    return SimpleNamespace(
        have_initialized=False, tile_scheduler_metadata=None, num_splits=None
    ), None


def _first_eager(cache_seqlens, num_heads_per_head_k, num_heads_k):
    raise AssertionError("not called")


def _later_eager(
    cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False
):
    raise AssertionError("not called")


def module(metadata: Any, decode: Any = _decode, **more: Any) -> Any:
    return SimpleNamespace(get_mla_metadata=metadata, flash_mla_with_kvcache=decode, **more)


@pytest.mark.parametrize(
    ("found", "abi"),
    [
        (module(_first_eager), Abi.EAGER),
        (module(_later_eager, _with("is_fp8_kvcache", "indices")), Abi.EAGER),
        (module(_lazy, _with("is_fp8_kvcache", "indices", "topk_length")), Abi.LAZY),
        (
            module(_lazy, _with("use_legacy", "enable_batch_invariant"), has_legacy=lambda: True),
            Abi.LAZY_LEGACY,
        ),
    ],
)
def test_known_abis(found: Any, abi: Abi) -> None:
    assert recognise_abi(found) is abi


def _four_positional(a, b, c, d):
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (SimpleNamespace(), "has no decode kernel"),  # PyPI's placeholder
        (module(_lazy, lambda q, k: None), "does not take block_table, cache_seqlens, causal"),
        (module(_four_positional), "metadata is of no known kind"),
        (module(lambda *a, **k: (object(), None)), "metadata is of no known kind"),
        (module(lambda *a: 3), "metadata is of no known kind"),
        (module(_lazy, _with("use_legacy"), has_legacy=lambda: False), "without its legacy"),
        (module(_lazy, _with("use_legacy")), "without its legacy"),
        (module(_lazy, _with("enable_batch_invariant")), "no dense decode any more"),
    ],
)
def test_unknown_abis_are_refused(found: Any, reason: str) -> None:
    with pytest.raises(KernelUnavailableError, match=reason) as caught:
        FlashMLAKernel(found)
    assert "pip install sgl-flash-mla" in str(caught.value)


def test_packed_rows_need_the_lazy_abi() -> None:
    lazy = FlashMLAKernel(module(_lazy, _with("indices", "topk_length")))
    eager = FlashMLAKernel(module(_later_eager, _with("indices", "topk_length")))
    assert lazy.capabilities.rows == {RowFormat.PLAIN, RowFormat.FP8_PACKED}
    assert eager.capabilities.rows == {RowFormat.PLAIN}


def test_the_installed_abi_is_known() -> None:
    """The wheel's Python interface, without its native half, which wants a CUDA driver."""
    search = (Path(path) / "flash_mla/flash_mla_interface.py" for path in sys.path)
    source = next((path for path in search if path.is_file()), None)
    if source is None:
        pytest.skip("sgl-flash-mla is not installed")
    text = source.read_text()
    import_line = "from flash_mla._loader import get_ops"
    assert import_line in text
    interface = ModuleType("flash_mla_interface")
    sys.modules["flash_mla_interface"] = interface  # dataclasses look their module up
    try:
        exec(compile(text.replace(import_line, "get_ops = None"), source, "exec"), vars(interface))
    finally:
        del sys.modules["flash_mla_interface"]
    interface.has_legacy = lambda: True  # type: ignore[attr-defined]
    assert FlashMLAKernel(interface).abi is Abi.LAZY_LEGACY


# --- what they can run ---------------------------------------------------------------------------


def flashmla() -> Capabilities:
    return FlashMLAKernel(module(_lazy, _with("indices", "topk_length"))).capabilities


@pytest.mark.parametrize(
    ("shape", "phase", "compute", "reason"),
    [
        (MLA, Phase.DECODE, (9, 0), None),
        (MLA, Phase.VERIFY, (9, 0), None),
        (replace(MLA, rows=RowFormat.FP8_PACKED), Phase.DECODE, (9, 0), None),
        (MLA, Phase.PREFILL, (9, 0), "has no prefill kernel"),
        (MLA, Phase.DECODE, (10, 0), "wants compute capability 9.0 to 9.0, found 10.0"),
        (MLA, Phase.DECODE, (8, 0), "wants compute capability 9.0 to 9.0, found 8.0"),
        (LLAMA, Phase.DECODE, (9, 0), "reads MLA rows only"),
        (replace(MLA, page_tokens=32), Phase.DECODE, (9, 0), "takes pages of 64 tokens, not 32"),
        (replace(MLA, dtype=torch.float16), Phase.DECODE, (9, 0), "takes bfloat16, not float16"),
        (replace(MLA, key_width=288), Phase.DECODE, (9, 0), "takes 576/512 channels, not 288/512"),
        (replace(MLA, logit_cap=30.0), Phase.DECODE, (9, 0), "does not cap logits"),
    ],
)
def test_flashmla_refuses(
    shape: AttentionShape, phase: Phase, compute: tuple[int, int], reason: str | None
) -> None:
    assert flashmla().refusal(shape, phase, "cuda", compute) == reason


@pytest.mark.parametrize(
    ("shape", "phase", "compute", "reason"),
    [
        (MLA, Phase.PREFILL, (9, 0), None),
        (MLA, Phase.DECODE, (8, 0), None),
        (LLAMA, Phase.VERIFY, (12, 0), None),
        (replace(LLAMA, logit_cap=30.0, page_tokens=1), Phase.DECODE, (8, 9), None),
        (MLA, Phase.DECODE, (7, 5), "wants compute capability 8.0 to 99.9, found 7.5"),
        (replace(MLA, logit_cap=30.0), Phase.DECODE, (9, 0), "does not cap logits of MLA rows"),
        (
            replace(LLAMA, key_width=576, value_width=512),
            Phase.DECODE,
            (9, 0),
            "takes no keys and values of 576/512 channels",
        ),
        (
            replace(MLA, key_width=128, value_width=128),
            Phase.DECODE,
            (9, 0),
            "takes no MLA rows of 128/128 channels",
        ),
        (
            replace(MLA, rows=RowFormat.FP8_PACKED),
            Phase.DECODE,
            (9, 0),
            "does not read fp8_packed rows",
        ),
    ],
)
def test_flashinfer_refuses(
    shape: AttentionShape, phase: Phase, compute: tuple[int, int], reason: str | None
) -> None:
    assert FlashInferKernel.capabilities.refusal(shape, phase, "cuda", compute) == reason
    assert FlashInferKernel.capabilities.refusal(shape, phase, "cpu") == "runs on cuda, not on cpu"


# --- stacking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_buckets_against_brute_force(powers_of_two: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, (2, 5, 40, 3, 17, 1)[seed] + 1, size=random.integers(1, 30))
    indptr = np.concatenate([[0], np.cumsum(counts)])
    found, place = buckets(indptr, powers_of_two=powers_of_two)

    assert sorted(part for bucket in found for part in bucket.parts) == list(np.flatnonzero(counts))
    classes = [int(np.ceil(np.log2(counts[bucket.parts].max()))) for bucket in found]
    assert classes == sorted(set(classes))
    rows_in_places = np.concatenate([np.empty(0, np.int64), *(bucket.gather for bucket in found)])
    assert np.array_equal(rows_in_places[place], np.arange(indptr[-1]))
    for bucket in found:
        most = int(counts[bucket.parts].max())
        assert bucket.rows == (1 << (most - 1).bit_length() if powers_of_two else most)
        assert bool((2 * counts[bucket.parts] > bucket.rows).all()), "less than half is padding"
        for part, line in zip(bucket.parts, bucket.gather.reshape(-1, bucket.rows), strict=True):
            first, last = indptr[part], indptr[part + 1]
            padding = bucket.rows - (last - first)
            assert list(line) == [first] * padding + list(range(first, last))


@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("parts", [DECODE, STACKED, VERIFY, ((0, 9), (2, 64), (0, 0), (2, 3))])
def test_a_stacked_batch_holds_the_parts(
    parts: tuple[tuple[int, int], ...], causal: bool, powers_of_two: bool
) -> None:
    work, _ = work_of(parts, causal)
    stacking = stack(work, powers_of_two=powers_of_two)
    q = torch.randn(work.rows, 3, 8)
    own = part_slots(work)
    stacked = [batch.stack(q) for batch in stacking.batches]
    assert torch.equal(stacking.restore(stacked), q)
    for batch, rows in zip(stacking.batches, stacked, strict=True):
        tokens, visible = batch.key_tokens(work), batch.visible_keys(work)
        table = batch.block_table(work, tokens)
        indices = key_indices(table, visible, causal)
        indptr, slots = batch.key_slots(work)
        for entry, part in enumerate(batch.host_parts.tolist()):
            count, keys = parts[part]
            first, last = work.host_query_indptr[part : part + 2]
            assert torch.equal(rows[entry, batch.rows - count :], q[first:last])
            assert int(tokens[entry]) == keys
            paged = (table[entry].long()[:, None] * 64 + torch.arange(64)).reshape(-1)
            assert torch.equal(paged[:keys], own[part])
            assert bool((table[entry, -(-keys // 64) :] == 0).all())
            assert torch.equal(slots[indptr[entry] : indptr[entry + 1]], own[part])
            for row in range(count):
                seen = max(keys - count + row + 1, 0) if causal else keys
                at = batch.rows - count + row
                assert int(visible[entry, at]) == seen
                listed = indices[entry, at]
                assert torch.equal(listed[:seen].long(), own[part][:seen])
                assert bool((listed[seen:] == -1).all())


def test_equal_parts_are_neither_copied_nor_indexed() -> None:
    work, _ = work_of(DECODE)
    (batch,) = stack(work, powers_of_two=True).batches
    q = torch.randn(work.rows, 3, 8)
    assert batch.stack(q).data_ptr() == q.data_ptr()
    assert batch.key_slots(work) == (work.key_indptr, work.slots)
    strided = torch.randn(work.rows, 2, 3, 8)[:, 1]
    assert torch.equal(batch.stack(strided)[:, 0], strided)


def test_static_work_has_the_shapes_of_its_capacity() -> None:
    shapes = set()
    for parts in (((3, 65), (3, 0)), ((3, 1), (3, 190))):
        work, _ = work_of(parts, capacity=192)
        (batch,) = stack(work, powers_of_two=True).batches
        assert (batch.rows, batch.parts, batch.gather) == (3, None, None)
        tokens = batch.key_tokens(work)
        table = batch.block_table(work, tokens)
        for line, (_, keys), slots in zip(table, parts, part_slots(work), strict=True):
            assert torch.equal(
                (line.long()[:, None] * 64 + torch.arange(64)).view(-1)[:keys], slots
            )
        shapes.add((table.shape, batch.visible_keys(work).shape))
    assert shapes == {((2, 3), (2, 3))}


def test_a_run_of_parts_shares_the_table_of_slots() -> None:
    work, _ = work_of(((1, 5), (2, 65), (2, 3), (4, 9)))
    two = stack(work).batches[1]
    assert two.host_parts.tolist() == [1, 2]
    indptr, slots = two.key_slots(work)
    assert slots is work.slots
    assert indptr.tolist() == [5, 70, 73]


# --- pages on the host ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_blind_rows(causal: bool) -> None:
    work, _ = work_of(((3, 0), (2, 5), (4, 2), (0, 0), (1, 1)), causal)
    assert blind_rows(work).tolist() == ([0, 1, 2, 5, 6] if causal else [0, 1, 2])


def test_page_plan_against_brute_force() -> None:
    work, _ = work_of(STACKED)
    plan = page_plan(work)
    assert all(
        tensor.dtype == torch.int32
        for tensor in (plan.query_indptr, plan.page_indptr, plan.key_tokens, plan.last_page_tokens)
    )
    assert plan.query_indptr.tolist() == work.query_indptr.tolist()
    assert plan.key_tokens.tolist() == [keys for _, keys in STACKED]
    assert plan.page_indptr.tolist() == work.page_indptr.tolist()
    for (first, last), tail, (_, keys) in zip(
        pairwise(plan.page_indptr.tolist()), plan.last_page_tokens.tolist(), STACKED, strict=True
    ):
        assert keys == (max(last - first - 1, 0)) * 64 + tail
        assert (1 <= tail <= 64) == (keys > 0)


def test_a_pool_in_pages_is_a_view() -> None:
    pool = torch.arange(10 * 2 * 3).view(10, 2, 3)
    pages = in_pages(pool, 4)
    assert pages.shape == (2, 4, 2, 3)
    assert pages.data_ptr() == pool.data_ptr()
    assert torch.equal(pages[1, 3], pool[7])


def test_padded_heads() -> None:
    assert [padded_heads(heads) for heads in (1, 16, 64, 65, 128)] == [64, 64, 64, 128, 128]
    with pytest.raises(ValueError, match="at most 128"):
        padded_heads(129)
    assert [planned_heads(heads) for heads in (1, 9, 16, 40, 128)] == [1, 16, 16, 64, 128]


# --- calls of FlashInfer, against the installed signatures ---------------------------------------


@dataclass
class _Calls:
    """Stands where a wrapper class does, and binds its calls to the signatures of that class."""

    real: Any
    plans: list[dict[str, Any]]

    def __call__(self, *args: Any) -> Any:
        inspect.signature(self.real.__init__).bind(None, *args)
        return self

    def plan(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(self.real.plan).bind(self, *args, **kwargs)
        self.plans.append(bound.arguments)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        inspect.signature(self.real.run).bind(self, *args, **kwargs)
        rows = args[0] if args else kwargs["query"]
        return torch.zeros(*rows.shape[:2], 4), torch.zeros(rows.shape[:2])


@pytest.fixture(scope="module")
def flashinfer_kernel() -> FlashInferKernel:
    pytest.importorskip("flashinfer")
    return FlashInferKernel()


@pytest.mark.filterwarnings("ignore")
def test_flashinfer_calls_fit_the_installed_library(
    flashinfer_kernel: FlashInferKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = flashinfer_kernel
    mla, paged = kernel._mla, kernel._paged
    calls = _Calls(mla.BatchMLAPagedAttentionWrapper, [])
    monkeypatch.setattr(mla, "BatchMLAPagedAttentionWrapper", calls)
    work, pool = work_of(STACKED, causal=True)
    shape = replace(MLA, query_heads=3, key_width=8, value_width=4)
    prepared = kernel.prepare(work, shape, scale=0.5)
    _, lse = kernel.run(prepared, torch.randn(work.rows, 3, 8), pool.keys, pool.values)
    assert torch.nonzero(lse.isneginf()[:, 0]).flatten().tolist() == blind_rows(work).tolist()
    plan = calls.plans[0]
    assert plan["num_heads"] == 4, "heads of a causal plan are a power of two"
    metadata = plan["metadata"]
    # The library's own reading of such metadata, which it would do on the way to a kernel.
    planning = sys.modules["flashinfer.mla._batch_mla._planning"]
    planning._validate_csr_metadata(
        qo_indptr=metadata.qo_indptr,
        kv_indptr=metadata.kv_indptr,
        kv_indices=metadata.kv_indices,
        kv_len_arr=metadata.kv_len_arr,
        page_size=64,
        device=torch.device("cpu"),
    )

    calls = _Calls(paged.BatchPrefillWithPagedKVCacheWrapper, [])
    monkeypatch.setattr(paged, "BatchPrefillWithPagedKVCacheWrapper", calls)
    work, pool = work_of(STACKED, kv_heads=2, latent=False)
    shape = replace(LLAMA, query_heads=4, kv_heads=2, key_width=8, value_width=4, logit_cap=9.0)
    prepared = kernel.prepare(work, shape, scale=0.5)
    kernel.run(prepared, torch.randn(work.rows, 4, 8), pool.keys, pool.values, logit_cap=9.0)
    plan = calls.plans[0]
    assert plan["logits_soft_cap"] == 9.0
    get_seq_lens = sys.modules["flashinfer.page"].get_seq_lens
    lengths = get_seq_lens(plan["paged_kv_indptr"], plan["paged_kv_last_page_len"], 64)
    assert lengths.tolist() == [keys for _, keys in STACKED]


def test_a_plan_is_recycled_once_nobody_holds_it(
    flashinfer_kernel: FlashInferKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = flashinfer_kernel
    real = kernel._paged.BatchPrefillWithPagedKVCacheWrapper
    made: list[Any] = []

    def wrapper(*_: Any) -> Any:
        made.append(_Calls(real, []))
        return made[-1]

    monkeypatch.setattr(kernel._paged, "BatchPrefillWithPagedKVCacheWrapper", wrapper)
    monkeypatch.setattr(kernel, "_shelf", {})
    work, _ = work_of(DECODE, kv_heads=2, latent=False)
    first = kernel.prepare(work, LLAMA, scale=0.5)
    second = kernel.prepare(work, LLAMA, scale=0.25)
    assert first.wrapper is not second.wrapper
    kept = second.wrapper
    del second
    third = kernel.prepare(work, LLAMA, scale=0.125)
    assert third.wrapper is kept
    assert len(made) == 2


def test_flashinfer_needs_no_plan_for_rows_that_see_nothing(
    flashinfer_kernel: FlashInferKernel,
) -> None:
    work, pool = work_of(((2, 0), (1, 0)))
    prepared = flashinfer_kernel.prepare(work, replace(MLA, query_heads=3), scale=0.1)
    out, lse = flashinfer_kernel.run(prepared, torch.randn(3, 3, 576), pool.keys, pool.values)
    assert out.shape == (3, 3, 512)
    assert bool(lse.isneginf().all())


# --- parity, on a GPU ----------------------------------------------------------------------------

BF16_TOLERANCE = 2e-2  # outputs are stored in it, and probabilities are rounded to it
BF16_COSINE = 2e-5


def on_gpu(
    kernel: Any,
    shape: AttentionShape,
    parts: tuple[tuple[int, int], ...],
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


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_flashmla_parity(heads: int) -> None:
    kernel, shape = or_skip(FlashMLAKernel), replace(MLA, query_heads=heads)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.DECODE)
    on_gpu(kernel, shape, VERIFY, Phase.VERIFY, causal=True)
    on_gpu(kernel, shape, ((2, 65), (2, 0), (2, 130)), Phase.DECODE, capacity=192)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 40, 128])
def test_flashinfer_parity_on_mla(heads: int) -> None:
    kernel, shape = or_skip(FlashInferKernel), replace(MLA, query_heads=heads)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.PREFILL)
    on_gpu(kernel, shape, VERIFY, Phase.VERIFY, causal=True)
    on_gpu(kernel, shape, PREFILL, Phase.PREFILL, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [LLAMA, replace(LLAMA, query_heads=28, kv_heads=4)], ids=str)
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_flashinfer_parity_on_grouped_heads(shape: AttentionShape, logit_cap: float) -> None:
    kernel, shape = or_skip(FlashInferKernel), replace(shape, logit_cap=logit_cap)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.PREFILL)
    on_gpu(kernel, shape, PREFILL, Phase.PREFILL, causal=True)


@pytest.mark.gpu
def test_triton_parity() -> None:
    from tessera_sglang.attention.kernels.triton_decode import TritonKernel

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


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_tilelang_parity(heads: int) -> None:
    from tessera_sglang.attention.kernels.tilelang_decode import TileLangKernel

    kernel, shape = or_skip(TileLangKernel), replace(MLA, query_heads=heads)
    on_gpu(kernel, shape, DECODE, Phase.DECODE)
    on_gpu(kernel, shape, STACKED, Phase.DECODE)
    on_gpu(kernel, shape, VERIFY, Phase.VERIFY, causal=True)
