"""``tessera-sglang doctor``: whether a server would start here, and with what."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec

from .config import Config, ConfigError, load

if TYPE_CHECKING:  # torch and SGLang may be missing: that is a finding
    from tessera_sglang.attention.preferences import Situation
    from tessera_sglang.attention.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and whether a server can start with it."""

    name: str
    found: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Library:
    """A kernel library: whether it can be loaded here, and why not."""

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


def _configuration() -> tuple[Config, list[Finding]]:
    try:
        config = load()
    except ConfigError as error:
        return Config(), [Finding("configuration", str(error), ok=False)]
    found = Finding("configuration", msgspec.json.encode(config).decode())
    return config, [found, Finding("page size", _page_size())]


def _page_size() -> str:
    try:
        from .startup import PAGE_TOKENS
    except ImportError:
        return "unknown without SGLang"
    return f"{PAGE_TOKENS} tokens"


def _kernels(config: Config) -> tuple[list[Finding], list[Library], list[Choice]]:
    """What the router of a server here would say, for two kinds of model."""
    name = "kernel"
    try:
        # What libraries print while they load is not our answer.
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            from tessera_sglang.attention.router import AUTO, RouteError, require
            from tessera_sglang.attention.shelf import Shelf

            from . import kernels

            shelf = Shelf(kernels.offers())
            loaded = [(offered, shelf.get(offered)) for offered in shelf.names]
            situations = _situations()
    except Exception as error:  # whatever is broken is the finding
        return [Finding(name, f"{type(error).__name__}: {error}", ok=False)], [], []
    libraries = [
        Library(offered, False, found) if isinstance(found, str) else Library(offered, True, "")
        for offered, found in loaded
    ]
    if config.kernel != AUTO:
        here = next(iter(situations.values()))
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
    from .startup import PAGE_TOKENS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {
        "DeepSeek-V3 (MLA)": AttentionShape(128, 1, 576, 512, True, PAGE_TOKENS, torch.bfloat16),
        "Llama-3.1-8B (GQA)": AttentionShape(32, 8, 128, 128, False, PAGE_TOKENS, torch.bfloat16),
    }
    compute = compat.compute_capability(device)
    return {model: Situation(shape, device, compute) for model, shape in shapes.items()}
