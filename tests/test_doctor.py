"""``tessera-sglang doctor``: what it says of kernels, and what it exits with."""

from __future__ import annotations

import json
from typing import Any

import pytest

kernels = pytest.importorskip("tessera_sglang.kernels", exc_type=ImportError)

from tessera_sglang import doctor  # noqa: E402 # after the skip
from tessera_sglang.attention.kernels.base import KernelUnavailableError  # noqa: E402
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel  # noqa: E402
from tessera_sglang.attention.shelf import Offer  # noqa: E402


def broken() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


def missing() -> Any:
    raise KernelUnavailableError("flashinfer is not installed")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, one library that breaks, one that is missing."""
    monkeypatch.delenv("TESSERA_CONFIG", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "_plugin", lambda: doctor.Finding("plugin", "all hooks landed"))
    found = [Offer("flashmla", broken), Offer("flashinfer", missing), Offer("torch", TorchKernel)]
    monkeypatch.setattr(kernels, "offers", lambda: found)


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = doctor.run(as_json=True)
    return status, json.loads(capsys.readouterr().out)


def test_a_machine_without_a_gpu_is_served_by_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys)
    assert (status, found["ok"]) == (0, True)
    assert found["kernels"] == [
        {
            "kernel": "flashmla",
            "available": False,
            "why": "OSError: libcuda.so.1: cannot open shared object file",
        },
        {"kernel": "flashinfer", "available": False, "why": "flashinfer is not installed"},
        {"kernel": "torch", "available": True, "why": ""},
    ]
    assert len(found["routes"]) == 6, "two models, three phases"
    for route in found["routes"]:
        assert (route["kernel"], route["why"]) == ("torch", "first choice")
    assert {route["model"] for route in found["routes"]} == {
        "DeepSeek-V3 (MLA)",
        "Llama-3.1-8B (GQA)",
    }


def test_the_table_is_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=False) == 0
    printed = capsys.readouterr().out
    assert "flashinfer  flashinfer is not installed" in printed
    assert "DeepSeek-V3 (MLA)   decode   torch  first choice" in printed


def test_a_kernel_that_can_not_serve_here_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", '{"kernel": "flashinfer"}')
    status, found = report(capsys)
    assert (status, found["ok"], found["routes"]) == (1, False, [])
    (kernel,) = (finding for finding in found["findings"] if finding["name"] == "kernel")
    assert 'kernel "flashinfer" can not serve on cpu' in kernel["found"]
    assert 'use "auto" or "torch"' in kernel["found"]


def test_a_gpu_shows_what_it_misses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(kernels.compat, "compute_capability", lambda device: (9, 0))
    status, found = report(capsys)
    assert status == 0, "a server starts, on a fallback"
    why = {(route["model"][:5], route["phase"]): route["why"] for route in found["routes"]}
    assert why["DeepS", "decode"].startswith("instead of flashmla (unavailable: OSError: libcuda")
    assert why["Llama", "prefill"].endswith("flashinfer (unavailable: flashinfer is not installed)")


def test_a_bad_configuration_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", '{"kernel": "cuda"}')
    status, found = report(capsys)
    assert status == 1
    assert any("kernel must be" in finding["found"] for finding in found["findings"])


def test_a_broken_installation_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "offers", broken)
    status, found = report(capsys)
    assert (status, found["kernels"], found["routes"]) == (1, [], [])
