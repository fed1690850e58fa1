"""Which kernel runs what, over kernels that exist only here, and what is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tessera_sglang.attention.kernels.base import (
    AttentionShape,
    Capabilities,
    Kernel,
    KernelUnavailableError,
    Phase,
    RowFormat,
)
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel
from tessera_sglang.attention.preferences import Situation, preferences
from tessera_sglang.attention.router import RouteError, Router, require, route
from tessera_sglang.attention.shelf import Offer, Shelf

MLA = AttentionShape(128, 1, 576, 512, True, 64, torch.bfloat16)
GQA = AttentionShape(32, 8, 128, 128, False, 64, torch.bfloat16)
HOPPER = Situation(MLA, "cuda", (9, 0))
AMPERE = Situation(MLA, "cuda", (8, 0))
TURING = Situation(MLA, "cuda", (7, 5))
CPU = Situation(MLA, "cpu")

ANY = Capabilities(
    name="any",
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    phases=frozenset(Phase),
    page_tokens=None,
    widths=None,
    latent=True,
    grouped=True,
    causal=True,
    logit_cap=True,
    lse_base="e",
    graph_safe=True,
    reads="slots",
)
ABLE = {
    "flashmla": replace(
        ANY,
        name="flashmla",
        dtypes=frozenset({torch.bfloat16}),
        phases=frozenset({Phase.DECODE, Phase.VERIFY}),
        page_tokens=frozenset({64}),
        widths=frozenset({(576, 512)}),
        grouped=False,
        compute=((9, 0), (9, 0)),
    ),
    "flashinfer": replace(ANY, name="flashinfer", compute=((8, 0), (12, 1))),
    "fa3": replace(ANY, name="fa3", compute=((9, 0), (9, 0))),
    "tilelang": replace(ANY, name="tilelang", phases=frozenset({Phase.DECODE})),
    "triton": replace(ANY, name="triton", causal=False),
    "torch": TorchKernel.capabilities,
}


@dataclass(eq=False)
class Named:
    """A kernel that is never run."""

    capabilities: Capabilities

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def offers(*missing: str, **changed: Capabilities) -> list[Offer]:
    """All five, some of them missing or able to do something else."""

    def loader(name: str) -> Callable[[], Kernel]:
        def load() -> Kernel:
            if name in missing:
                raise KernelUnavailableError(f"{name} is not installed")
            return Named(changed.get(name, ABLE[name]))

        return load

    return [Offer(name, loader(name)) for name in ABLE]


def table(
    situation: Situation, *missing: str, wanted: str = "auto", **changed: Capabilities
) -> Any:
    router = Router(wanted, situation, offers(*missing, **changed))
    return tuple(router.routes[phase].name for phase in Phase)


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        (HOPPER, ("flashinfer", "flashmla", "flashmla")),
        (AMPERE, ("flashinfer", "flashinfer", "flashinfer")),
        (TURING, ("torch", "triton", "torch")),
        (replace(HOPPER, shape=GQA), ("fa3", "fa3", "fa3")),
        (replace(TURING, shape=GQA), ("torch", "triton", "torch")),
        (CPU, ("torch", "torch", "torch")),
        (replace(CPU, shape=GQA), ("torch", "torch", "torch")),
        (Situation(MLA, "xpu"), ("torch", "torch", "torch")),
    ],
)
def test_what_is_meant_for_a_device_runs_there_and_is_no_fallback(
    situation: Situation, expected: tuple[str, str, str]
) -> None:
    router = Router("auto", situation, offers())
    assert tuple(router.routes[phase].name for phase in Phase) == expected
    assert [route.fallback for route in router.routes.values()] == [None] * 3
    assert all(route.wanted == route.name for route in router.routes.values())


def test_a_missing_library_is_a_fallback_to_the_next_best() -> None:
    found = route("auto", Phase.DECODE, HOPPER, Shelf(offers("flashmla")))
    assert (found.name, found.wanted) == ("flashinfer", "flashmla")
    assert found.fallback == ("flashmla", "flashinfer", "unavailable")
    assert found.reason == "instead of flashmla (unavailable: flashmla is not installed)"


def test_of_several_passed_over_the_best_is_the_one_that_was_wanted() -> None:
    found = route(
        "auto", Phase.DECODE, HOPPER, Shelf(offers("flashmla", "flashinfer", "fa3", "tilelang"))
    )
    assert found.fallback == ("flashmla", "triton", "unavailable")
    assert [other.name for other in found.rejected] == ["flashmla", "flashinfer", "fa3", "tilelang"]
    everything = Shelf(offers("flashmla", "flashinfer", "fa3", "tilelang", "triton"))
    assert route("auto", Phase.DECODE, HOPPER, everything).name == "torch"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": torch.float16}, "takes bfloat16, not float16"),
        ({"page_tokens": 128}, "takes pages of 64 tokens, not 128"),
        ({"key_width": 192, "value_width": 128}, "takes 576/512 channels, not 192/128"),
        ({"rows": RowFormat.FP8_PACKED}, "does not read fp8_packed rows"),
    ],
)
def test_a_shape_that_is_refused_is_a_fallback(changed: dict[str, Any], why: str) -> None:
    situation = replace(HOPPER, shape=replace(MLA, **changed))
    found = route("auto", Phase.DECODE, situation, Shelf(offers()))
    assert found.fallback is not None
    assert found.fallback[0::2] == ("flashmla", "refused")
    assert found.rejected[0].why == why
    assert why in found.reason


def test_a_kernel_without_the_phase_loses_nothing() -> None:
    able = replace(ABLE["flashmla"], phases=frozenset({Phase.DECODE}))
    found = route("auto", Phase.VERIFY, HOPPER, Shelf(offers(flashmla=able)))
    assert (found.name, found.wanted, found.fallback) == ("flashinfer", "flashinfer", None)
    assert "has no verify kernel" in found.reason
    maskless = route("auto", Phase.VERIFY, TURING, Shelf(offers()))
    assert (maskless.name, maskless.fallback) == ("torch", None)
    assert "triton (has no causal mask)" in maskless.reason


def test_a_gpu_whose_generation_can_not_be_read_runs_no_kernel_that_asks_for_one() -> None:
    unknown = replace(HOPPER, compute=None)
    assert preferences(unknown, Phase.DECODE) == ("triton", "torch")
    with pytest.raises(RouteError, match="none that can be read"):
        Router("flashmla", unknown, offers())


def test_rows_of_another_dtype_are_for_pytorch_which_converts() -> None:
    mixed = replace(HOPPER, row_dtype=torch.float32)
    assert table(mixed) == ("torch", "torch", "torch")
    with pytest.raises(RouteError, match=r"does not read torch.float32 rows for torch.bfloat16"):
        Router("flashmla", mixed, offers())
    with pytest.raises(RouteError, match="Choose another --attention-backend"):
        Router("auto", replace(HOPPER, row_dtype=torch.float8_e4m3fn), offers())


# --- a kernel by name ----------------------------------------------------------------------------


def test_a_kernel_by_name_runs_what_it_has_a_kernel_for() -> None:
    assert table(HOPPER, wanted="torch") == ("torch", "torch", "torch")
    assert table(HOPPER, wanted="flashmla") == ("flashinfer", "flashmla", "flashmla")
    assert table(HOPPER, wanted="tilelang") == ("flashinfer", "tilelang", "flashmla")
    router = Router("triton", HOPPER, offers())
    assert router.routes[Phase.DECODE].reason == "asked for"
    assert router.routes[Phase.DECODE].fallback is None
    assert router.routes[Phase.PREFILL].reason.endswith(
        "triton was asked for and has no prefill kernel"
    )


@pytest.mark.parametrize(
    ("wanted", "situation", "missing", "found"),
    [
        ("flashmla", HOPPER, ("flashmla",), "on cuda 9.0: it is unavailable: flashmla is not inst"),
        ("flashmla", CPU, (), "on cpu: it runs on cuda, not on cpu"),
        ("flashmla", AMPERE, (), "wants compute capability 9.0 to 9.0, found 8.0"),
        ("flashmla", replace(HOPPER, shape=GQA), (), "it reads MLA rows only (K/V 32/8 heads"),
        (
            "flashinfer",
            replace(HOPPER, shape=replace(MLA, dtype=torch.float32)),
            (),
            "takes bfloat16, float16, not float32",
        ),
        ("cutlass", HOPPER, (), "this version has no adapter for it"),
    ],
)
def test_a_kernel_by_name_that_can_not_serve_refuses_with_the_remedy(
    wanted: str, situation: Situation, missing: tuple[str, ...], found: str
) -> None:
    with pytest.raises(RouteError) as caught:
        Router(wanted, situation, offers(*missing))
    message = str(caught.value)
    assert message.startswith(f'TESSERA_CONFIG: kernel "{wanted}" can not serve on ')
    assert found in message
    assert message.endswith('use "auto" or "torch"')


def test_what_needs_no_model_is_known_without_one() -> None:
    assert require("flashmla", "cuda", (9, 0), Shelf(offers())).capabilities.name == "flashmla"
    for device, compute in (("cpu", None), ("cuda", (8, 0)), ("cuda", None)):
        with pytest.raises(RouteError):
            require("flashmla", device, compute, Shelf(offers()))


def test_nothing_that_can_run_is_said_with_every_reason() -> None:
    with pytest.raises(RouteError) as caught:
        Router("auto", HOPPER, offers(*ABLE), phases=[Phase.PREFILL])
    message = str(caught.value)
    assert "flashinfer (unavailable: flashinfer is not installed)" in message
    assert "torch (unavailable: torch is not installed)" in message


# --- loading -------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_once_and_only_if_it_is_looked_at() -> None:
    loads: list[str] = []

    def counted(offer: Offer) -> Offer:
        def load() -> Kernel:
            loads.append(offer.name)
            return offer.load()

        return Offer(offer.name, load)

    router = Router("auto", HOPPER, [counted(offer) for offer in offers()])
    assert sorted(loads) == ["flashinfer", "flashmla"]
    assert router.kernel(Phase.DECODE) is router.kernel(Phase.VERIFY)
    assert router.refusal("triton", Phase.PREFILL) == "has no causal mask"
    assert router.refusal("flashmla", Phase.DECODE) is None
    assert loads.count("triton") == loads.count("flashmla") == 1


@pytest.mark.parametrize("error", [OSError("libcuda.so.1:\n no such file"), ImportError("gone")])
def test_a_library_that_breaks_while_it_is_imported_is_unavailable(error: Exception) -> None:
    def load() -> Kernel:
        raise error

    shelf = Shelf([Offer("flashmla", load)])
    why = shelf.get("flashmla")
    assert isinstance(why, str)
    assert why.startswith(type(error).__name__)
    assert "\n" not in why


# --- what is counted, and said -------------------------------------------------------------------


def test_launches_are_counted_by_kernel_and_fallbacks_by_pass() -> None:
    router = Router("auto", HOPPER, offers("flashmla"))
    reason = ("flashmla", "flashinfer", "unavailable")
    assert router.dispatches.fallbacks == {reason: 0}
    router.count(Phase.PREFILL)
    router.count(Phase.DECODE, 3)
    router.count(Phase.DECODE)
    router.count_named("sglang:fa3", Phase.PREFILL)
    assert router.dispatches.launches == {
        ("flashinfer", "prefill"): 1,
        ("flashinfer", "decode"): 4,
        ("flashinfer", "verify"): 0,
        ("sglang:fa3", "prefill"): 1,
    }
    assert router.dispatches.fallbacks == {reason: 2}


def test_the_same_passes_give_the_same_counts() -> None:
    def run() -> Any:
        router = Router("auto", HOPPER, offers("flashinfer"))
        for phase in [Phase.PREFILL, *[Phase.DECODE] * 5, Phase.VERIFY]:
            router.count(phase, 2)
        return router.dispatches

    assert run() == run()


def test_each_phase_is_logged_in_one_line_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    router = Router("auto", HOPPER, offers("flashmla"))
    with caplog.at_level(logging.INFO):
        router.log()
    prefill, decode, verify = caplog.records
    assert prefill.getMessage() == (
        "attention kernel for prefill on cuda 9.0: flashinfer (first choice); "
        "MLA 128/1 heads, 576/512 channels, bfloat16 plain rows, pages of 64"
    )
    assert "flashinfer (instead of flashmla (unavailable: " in decode.getMessage()
    assert [line.levelname for line in (prefill, decode, verify)] == ["INFO", "WARNING", "WARNING"]
