"""Adapters of CUDA libraries, as far as can be said without a GPU: which ABI, what is refused, whether
calls fit what is installed. Parity is in `test_kernels_on_gpu`."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from work import DECODE, STACKED, work_of

from tessera_sglang.attention.kernels.base import (
    AttentionShape,
    Capabilities,
    KernelUnavailableError,
    Phase,
    RowFormat,
)
from tessera_sglang.attention.kernels.flashinfer import FlashInferKernel
from tessera_sglang.attention.kernels.flashmla import FlashMLAKernel
from tessera_sglang.attention.kernels.flashmla_abi import Abi, recognise_abi
from tessera_sglang.attention.kernels.library import import_library, require
from tessera_sglang.attention.kernels.paging import blind_rows

MLA = AttentionShape(16, 1, 576, 512, True, 64, torch.bfloat16)
LLAMA = AttentionShape(32, 8, 128, 128, False, 64, torch.bfloat16)


# --- libraries that are missing or unknown -------------------------------------------------------


def test_a_missing_library_is_named_with_a_remedy() -> None:
    with pytest.raises(KernelUnavailableError, match=r"^no_such_library is missing: install it$"):
        import_library("no_such_library.kernels", "install it")
    with pytest.raises(KernelUnavailableError, match=r"^json has no decode; install it$"):
        require(import_library("json", "…"), "decode", "install it")


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (True, "broken_library is installed but does not load: OSError: libcuda.so.1: no such"),
        (False, "broken_library is installed; needs a CUDA device"),
    ],
)
def test_a_library_that_is_there_says_why_it_does_not_load(
    device: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'raise OSError("\\nlibcuda.so.1: no such\\nfile")\n'
    (tmp_path / "broken_library.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: device)
    with pytest.raises(KernelUnavailableError) as caught:
        import_library("broken_library", "install it")
    assert str(caught.value) == said


def test_a_library_without_what_it_needs_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_library.py").write_text("import its_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KernelUnavailableError) as caught:
        import_library("half_library", "install it")
    assert str(caught.value) == (
        "half_library is installed but does not load: its_dependency is missing; install it"
    )


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


class _Copy:
    """An event behind a plan's copy, through when the test says so or when it is waited for."""

    made: ClassVar[list[_Copy]] = []

    def __init__(self) -> None:
        self.recorded = self.through = False
        self.waits = 0
        self.made.append(self)

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.through

    def synchronize(self) -> None:
        self.waits += 1
        self.through = True


class _Planned(_Calls):
    """A wrapper that may not be planned again, nor go away, while its plan is being copied."""

    busy: Any = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        assert self.busy is None or self.busy.through, "written to while the device reads it"
        super().plan(*args, **kwargs)


@pytest.fixture
def planned(flashinfer_kernel: FlashInferKernel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prepares a launch; the wrapper it got knows the event behind its plan."""
    kernel = FlashInferKernel()
    monkeypatch.setattr(_Copy, "made", [])
    monkeypatch.setattr(torch.cpu, "Event", _Copy)
    for module, name in (
        (kernel._paged, "BatchPrefillWithPagedKVCacheWrapper"),
        (kernel._mla, "BatchMLAPagedAttentionWrapper"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *_, real=real: _Planned(real, []))

    def prepare(shape: AttentionShape) -> Any:
        pool = {"kv_heads": 1} if shape.latent else {"kv_heads": 2, "latent": False}
        work, _ = work_of(DECODE, **pool)
        prepared = kernel.prepare(work, shape, scale=0.5)
        assert _Copy.made[-1].recorded
        prepared.wrapper.busy = _Copy.made[-1]
        return prepared

    return prepare


def test_a_plan_is_recycled_once_nobody_holds_it(planned: Any) -> None:
    first, second = planned(LLAMA), planned(LLAMA)
    assert first.wrapper is not second.wrapper
    kept = second.wrapper
    _Copy.made[1].through = True
    del second
    assert planned(LLAMA).wrapper is kept
    assert not any(copy.waits for copy in _Copy.made), "nothing was on its way"
    assert first.wrapper is not kept


def test_a_plan_is_not_overwritten_on_its_way_to_the_device(planned: Any) -> None:
    first = planned(LLAMA)
    kept = first.wrapper
    del first
    assert planned(LLAMA).wrapper is kept
    assert _Copy.made[0].waits == 1


def test_the_oldest_plan_is_recycled_first(planned: Any) -> None:
    first, second = planned(LLAMA), planned(LLAMA)
    oldest = first.wrapper
    del first
    del second
    assert planned(LLAMA).wrapper is oldest


def test_an_mla_plan_is_given_back_once_it_is_on_the_device(planned: Any) -> None:
    first = planned(MLA)
    wrapper = weakref.ref(first.wrapper)
    del first
    second = planned(MLA)
    gc.collect()
    assert wrapper() is not None, "its pinned memory would be handed out again"
    _Copy.made[0].through = True
    third = planned(MLA)
    gc.collect()
    assert wrapper() is None
    assert third.wrapper is not second.wrapper
    assert not any(copy.waits for copy in _Copy.made), "other memory is there"


def test_flashinfer_needs_no_plan_for_rows_that_see_nothing(
    flashinfer_kernel: FlashInferKernel,
) -> None:
    work, pool = work_of(((2, 0), (1, 0)))
    prepared = flashinfer_kernel.prepare(work, replace(MLA, query_heads=3), scale=0.1)
    out, lse = flashinfer_kernel.run(prepared, torch.randn(3, 3, 576), pool.keys, pool.values)
    assert out.shape == (3, 3, 512)
    assert bool(lse.isneginf().all())
