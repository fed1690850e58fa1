"""``tessera-sglang doctor``: whether a server would start here, and with what."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec

from .config import Config, ConfigError, load

if TYPE_CHECKING:  # torch and SGLang may be missing: that is a finding
    from tessera_sglang.attention.kernels.base import Kernel
    from tessera_sglang.attention.preferences import Situation
    from tessera_sglang.attention.shelf import Shelf

PATIENCE_S = 1.0  # before a terminal is told what takes so long


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and whether a server can start with it."""

    name: str
    found: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Library:
    """A kernel library: whether it runs here, and why not."""

    kernel: str
    available: bool
    why: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What would run a phase of a model here; no kernel if the server would refuse the model."""

    model: str
    phase: str
    kernel: str | None
    why: str


def run(*, as_json: bool) -> int:
    """Look, print, and return 0 when nothing stands in the way."""
    with _progress("looking at what is installed"), _quiet():
        findings = [*_versions(), _plugin(), _device()]
        config, configuration = _configuration()
        kernel, libraries, choices = _kernels(config)
    findings += [*configuration, *kernel]
    ok = all(finding.ok for finding in findings)
    if as_json:
        shown = {
            "findings": [dataclasses.asdict(item) for item in findings],
            "kernels": [dataclasses.asdict(item) for item in libraries],
            "routes": [dataclasses.asdict(item) for item in choices],
        }
        print(json.dumps({"ok": ok, **shown}, indent=2))
        return 0 if ok else 1
    marks = [("ok  " if item.ok else "FAIL", item.name, item.found) for item in findings]
    _print_aligned(marks)
    if libraries:
        print("\nKernel libraries")
        _print_aligned(
            [(item.kernel, "loads" if item.available else item.why) for item in libraries]
        )
    if choices:
        print("\nWhat would run (TP 1, BF16)")
        _print_aligned([(c.model, c.phase, c.kernel or "none", c.why) for c in choices])
    return 0 if ok else 1


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[None]:
    """Say so on a terminal where it takes long, and take it back."""
    if not os.isatty(2):
        yield
        return
    terminal = os.dup(2)  # whatever is redirected meanwhile
    late = threading.Timer(PATIENCE_S, os.write, (terminal, f"{doing} …".encode()))
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()
        os.write(terminal, b"\r\x1b[K")
        os.close(terminal)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What libraries say while they load is not our answer. It is said after all if that fails.

    Native code and child processes write to the descriptors, so those are what is redirected. Loggers
    that are made meanwhile keep a stream that goes wherever descriptor 2 does.
    """
    stream = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    with (
        tempfile.TemporaryFile() as said,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        kept = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in kept:
            os.dup2(said.fileno(), number)
        failed = True
        try:
            yield
            failed = False
        finally:
            stream.flush()
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
            if failed:
                said.seek(0)
                os.write(2, said.read())


def _print_aligned(rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell; the last one as it is, for it may be long."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, last in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join((*padded, last)))


def _versions() -> list[Finding]:
    found = []
    for name in ("tessera-sglang", "sglang", "torch", "transformers"):
        try:
            found.append(Finding(name, version(name)))
        except PackageNotFoundError:
            remedy = "not installed: pip install 'tessera-sglang[sglang]'"
            found.append(Finding(name, remedy, ok=False))
    return found


def _plugin() -> Finding:
    """Load SGLang's plugins as a server does, and see whether ours took hold."""
    name = "plugin"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kernels that SGLang finds missing
            from sglang.srt.plugins import load_plugins

            from . import compat, plugin, wiring

            compat.check_version()
            load_plugins()
            plugin.verify()
    except Exception as error:  # whatever stops a server is the finding
        return Finding(name, f"{type(error).__name__}: {error}", ok=False)
    known = ", ".join(compat.KNOWN_VERSIONS)
    return Finding(name, f"all {len(wiring.HOOKS)} hooks landed; known SGLang versions: {known}")


def _device() -> Finding:
    name = "device"
    try:
        import torch
    except ImportError as error:
        return Finding(name, str(error), ok=False)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return Finding(name, f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}")
    return Finding(name, f"CPU, {torch.get_num_threads()} threads")


def _configuration() -> tuple[Config | None, list[Finding]]:
    try:
        config = load()
    except ConfigError as error:
        return None, [Finding("configuration", str(error), ok=False)]
    found = Finding("configuration", msgspec.json.encode(config).decode())
    return config, [found, Finding("page size", _page_size())]


def _page_size() -> str:
    try:
        from .config import PAGE_TOKENS
    except ImportError:
        return "unknown without SGLang"
    return f"{PAGE_TOKENS} tokens"


def _kernels(config: Config | None) -> tuple[list[Finding], list[Library], list[Choice]]:
    """What the router of a server here would say, for two kinds of model; without a configuration,
    what there is."""
    name = "kernel"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tessera_sglang.attention.router import AUTO, RouteError, require
            from tessera_sglang.attention.shelf import Shelf

            from . import kernels

            shelf = Shelf(kernels.offers())
            loaded = [(offered, shelf.get(offered)) for offered in shelf.names]
            situations = _situations()
    except Exception as error:  # whatever is broken is the finding
        return [Finding(name, f"{type(error).__name__}: {error}", ok=False)], [], []
    here = next(iter(situations.values()))
    libraries = [_library(offered, found, here) for offered, found in loaded]
    if config is None:
        return [], libraries, []
    if config.kernel != AUTO:
        try:
            require(config.kernel, here.device, here.compute, shelf)
        except RouteError as error:
            return [Finding(name, str(error), ok=False)], libraries, []
    choices = [
        choice
        for model, situation in situations.items()
        for choice in _choices(model, situation, config.kernel, shelf)
    ]
    return [Finding(name, config.kernel)], libraries, choices


def _library(name: str, found: Kernel | str, here: Situation) -> Library:
    from tessera_sglang.attention.kernels.library import NEEDS_CUDA

    if isinstance(found, str):
        return Library(name, False, found)
    misplaced = found.capabilities.misplaced(here.device, here.compute)
    if misplaced is None:
        return Library(name, True, "")
    elsewhere = here.device != "cuda" and found.capabilities.devices == {"cuda"}
    return Library(name, False, f"installed; {NEEDS_CUDA if elsewhere else misplaced}")


def _choices(model: str, situation: Situation, wanted: str, shelf: Shelf) -> list[Choice]:
    from tessera_sglang.attention.kernels.base import Phase
    from tessera_sglang.attention.router import RouteError, route

    found = []
    for phase in Phase:
        try:
            chosen = route(wanted, phase, situation, shelf)
        except RouteError as error:
            found.append(Choice(model, phase.value, None, str(error)))
        else:
            found.append(Choice(model, phase.value, chosen.name, chosen.reason))
    return found


def _situations() -> dict[str, Situation]:
    """Two well-known models, whole on this device, in the pages that a server takes."""
    import torch

    from tessera_sglang.attention.kernels.base import AttentionShape
    from tessera_sglang.attention.preferences import Situation

    from . import compat
    from .config import PAGE_TOKENS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {
        "DeepSeek-V3 (MLA)": AttentionShape(128, 1, 576, 512, True, PAGE_TOKENS, torch.bfloat16),
        "Llama-3.1-8B (GQA)": AttentionShape(32, 8, 128, 128, False, PAGE_TOKENS, torch.bfloat16),
    }
    compute = compat.compute_capability(device)
    return {model: Situation(shape, device, compute) for model, shape in shapes.items()}
