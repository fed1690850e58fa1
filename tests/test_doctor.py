"""``tessera-sglang doctor``: what it says of kernels, and what it exits with."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

kernels = pytest.importorskip("tessera_sglang.kernels", exc_type=ImportError)

from tessera_sglang import doctor, terminal  # noqa: E402 # after the skip
from tessera_sglang.attention.kernels.base import KernelUnavailableError  # noqa: E402
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel  # noqa: E402
from tessera_sglang.attention.shelf import Offer  # noqa: E402


def broken() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


def missing() -> Any:
    raise KernelUnavailableError("flashinfer is missing: pip install it")


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
        {
            "kernel": "flashinfer",
            "available": False,
            "why": "flashinfer is missing: pip install it",
        },
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
    assert "flashinfer  flashinfer is missing: pip install it" in printed
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
    assert why["Llama", "prefill"].endswith(
        "flashinfer (unavailable: flashinfer is missing: pip install it)"
    )


def test_a_bad_configuration_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", '{"kernel": "cuda"}')
    status, found = report(capsys)
    assert status == 1
    assert any("kernel must be" in finding["found"] for finding in found["findings"])
    names = [finding["name"] for finding in found["findings"]]
    assert "kernel" not in names, "nobody knows which"
    assert found["routes"] == []
    assert len(found["kernels"]) == 3, "what is installed is the same"


def test_a_broken_installation_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "offers", broken)
    status, found = report(capsys)
    assert (status, found["kernels"], found["routes"]) == (1, [], [])


# --- libraries for other devices -----------------------------------------------------------------


class Elsewhere(TorchKernel):
    """Loads anywhere."""

    def __init__(self, **limits: Any) -> None:
        super().__init__()
        self.capabilities = replace(TorchKernel.capabilities, **limits)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"devices": frozenset({"cuda"})}, "installed; needs a CUDA device"),
        ({"devices": frozenset({"xpu", "cuda"})}, "installed; runs on cuda, xpu, not on cpu"),
        ({"devices": frozenset({"cpu"})}, ""),
    ],
)
def test_a_library_that_loads_and_can_not_run_says_what_it_needs(
    limits: dict[str, Any],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = [Offer("flashinfer", lambda: Elsewhere(**limits)), Offer("torch", TorchKernel)]
    monkeypatch.setattr(kernels, "offers", lambda: offered)
    _, found = report(capsys)
    assert found["kernels"][0] == {"kernel": "flashinfer", "available": not why, "why": why}


def test_a_gpu_of_another_generation_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"devices": frozenset({"cuda"}), "compute": ((9, 0), (9, 0))}
    offered = [Offer("flashmla", lambda: Elsewhere(**limits)), Offer("torch", TorchKernel)]
    monkeypatch.setattr(kernels, "offers", lambda: offered)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA A100")
    monkeypatch.setattr(kernels.compat, "compute_capability", lambda device: (8, 0))
    _, found = report(capsys)
    assert found["kernels"][0]["why"] == (
        "installed; wants compute capability 9.0 to 9.0, found 8.0"
    )


# --- what else appears on a terminal -------------------------------------------------------------


def noisy() -> Any:
    print("printed")
    print("complained", file=sys.stderr)
    os.write(1, b"native\n")
    os.write(2, b"native\n")
    os.system("echo child >&2")
    return TorchKernel()


def test_what_libraries_say_while_they_load_is_kept_back(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "offers", lambda: [Offer("torch", noisy)])
    assert doctor.run(as_json=True) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["ok"]
    assert err == ""
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def test_what_they_say_is_shown_if_looking_fails(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> Any:
        os.write(2, b"the last words\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "offers", lambda: [Offer("torch", interrupted)])
    with pytest.raises(KeyboardInterrupt):
        doctor.run(as_json=True)
    assert "the last words" in capfd.readouterr().err


@pytest.mark.parametrize(("patience", "said"), [(0.0, True), (60.0, False)])
def test_a_terminal_is_told_what_takes_so_long(
    patience: float, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", patience)
    ours, line = pty.openpty()
    before = os.dup(2)
    os.dup2(line, 2)
    try:
        with terminal.progress("looking"), terminal.quiet():
            os.write(2, b"noise")
            time.sleep(0.2)
    finally:
        os.dup2(before, 2)
        shown = ""
        while not shown.endswith("\x1b[K"):  # a terminal hands out what it has
            shown += os.read(ours, 1000).decode()
        for descriptor in (before, ours, line):
            os.close(descriptor)
    assert shown == ("looking …" if said else "") + "\r\x1b[K"


# --- hooks ---------------------------------------------------------------------------------------

TARGET = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
PROGRAM = f"""
import pkgutil, sys
import sglang.srt.plugins as plugins

original = plugins.load_plugins

def load():
    original()
    owner, _, name = {TARGET!r}.rpartition(".")
    setattr(pkgutil.resolve_name(owner), name, lambda *arguments: None)

plugins.load_plugins = load
from tessera_sglang.cli import main
sys.exit(main(["doctor", "--json"]))
"""


def test_a_hook_that_another_plugin_replaced_is_named() -> None:
    from tessera_sglang import wiring

    assert TARGET in {hook.target for hook in wiring.HOOKS}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    (plugin,) = (one for one in json.loads(done.stdout)["findings"] if one["name"] == "plugin")
    assert plugin["ok"] is False
    assert f"the hook on {TARGET} did not land" in plugin["found"]
    assert "SGLANG_PLUGINS=tessera" in plugin["found"]


# --- a model -------------------------------------------------------------------------------------


def test_a_model_is_judged_by_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=True, model="deepseek-v3") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["spans"] is True
    assert found["model"]["page_bytes"] == 64 * 61 * 1152
    assert {route["model"] for route in found["routes"]} == {"deepseek-v3"}
    assert {route["phase"] for route in found["routes"]} == {"prefill", "decode", "verify"}


def test_a_model_without_spans_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=False, model="deepseek-v4-pro") == 0
    printed = capsys.readouterr().out
    assert "spans      no: on a GPU compressed and windowed layers are SGLang's to run" in printed
    assert "What would run" not in printed


def test_no_model_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=False, model="no-such-model") == 2
    out, err = capsys.readouterr()
    assert not out
    assert "no-such-model: neither a config file" in err


def test_versions_are_printed_and_only_what_a_server_needs_is_required(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.PACKAGES, "no-such-kernels", False)
    status, found = report(capsys)
    versions = {finding["name"]: finding["found"] for finding in found["findings"]}
    assert status == 0
    assert versions["no-such-kernels"] == "not installed"
    for name in ("python", "tessera-sglang", "sglang", "torch"):
        assert versions[name][0].isdigit()
    monkeypatch.setitem(doctor.PACKAGES, "no-such-kernels", True)
    assert report(capsys)[0] == 1
