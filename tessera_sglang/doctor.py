"""``tessera-sglang doctor``: whether a server would start here, and with what."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import msgspec

from . import outlook, tables, terminal
from .config import Config, ConfigError, load
from .layout import LayoutError
from .outlook import Heads, Outlook

if TYPE_CHECKING:  # torch and SGLang may be missing: that is a finding
    from tessera_sglang.attention.kernels.base import Kernel
    from tessera_sglang.attention.preferences import Situation
    from tessera_sglang.attention.shelf import Shelf

PACKAGES = {  # whether a server needs it
    **dict.fromkeys(("tessera-sglang", "sglang", "torch", "transformers"), True),
    **dict.fromkeys(("flashinfer-python", "sgl-flash-mla", "tilelang", "triton"), False),
}


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


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was looked at. ``model`` is there if one was asked about."""

    findings: tuple[Finding, ...]
    libraries: tuple[Library, ...]
    choices: tuple[Choice, ...]
    model: Outlook | None

    @property
    def ok(self) -> bool:
        """Whether a server would start, as far as can be told. Spans are no part of that."""
        return all(finding.ok for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        """The object that ``--json`` prints."""
        return {
            "ok": self.ok,
            "findings": [dataclasses.asdict(item) for item in self.findings],
            "kernels": [dataclasses.asdict(item) for item in self.libraries],
            "routes": [dataclasses.asdict(item) for item in self.choices],
            "model": None if self.model is None else dataclasses.asdict(self.model),
        }

    def show(self) -> None:
        """Print for people."""
        marks = [("ok  " if item.ok else "FAIL", item.name, item.found) for item in self.findings]
        tables.show_aligned(marks)
        if self.libraries:
            print("\nKernel libraries")
            tables.show_aligned(
                [(item.kernel, "loads" if item.available else item.why) for item in self.libraries]
            )
        if self.model is not None:
            print(f"\n{self.model.model}, by its config.json (TP 1, BF16)")
            tables.show_aligned(list(outlook.lines(self.model)))
        if self.choices:
            print("\nWhat would run (TP 1, BF16)")
            tables.show_aligned(
                [(c.model, c.phase, c.kernel or "none", c.why) for c in self.choices]
            )


def run(*, as_json: bool, model: str | None = None) -> int:
    """Look, print, and return 0 when nothing stands in the way.

    ``model`` is a directory with a config.json, such a file, or the name of a known model; 2 if it is
    none of them.
    """
    try:
        seen = outlook.look(model) if model is not None else None
    except LayoutError as error:
        print(f"tessera-sglang doctor: --model-path {error}", file=sys.stderr)
        return 2
    report = _report(seen)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        report.show()
    return 0 if report.ok else 1


def _report(seen: tuple[Outlook, Heads | None] | None) -> Report:
    with terminal.progress("looking at what is installed"), terminal.quiet():
        findings = [*_versions(), _plugin(), _device()]
        config, configuration = _configuration()
        kernel, libraries, choices = _kernels(config, seen)
    return Report(
        findings=(*findings, *configuration, *kernel),
        libraries=tuple(libraries),
        choices=tuple(choices),
        model=seen[0] if seen is not None else None,
    )


def _versions() -> list[Finding]:
    found = [Finding("python", platform.python_version())]
    for name, needed in PACKAGES.items():
        try:
            found.append(Finding(name, version(name)))
        except PackageNotFoundError:
            remedy = (
                "not installed: pip install 'tessera-sglang[sglang]'" if needed else "not installed"
            )
            found.append(Finding(name, remedy, ok=not needed))
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


def _kernels(
    config: Config | None, seen: tuple[Outlook, Heads | None] | None
) -> tuple[list[Finding], list[Library], list[Choice]]:
    """What the router of a server here would say, for the model that was asked about or for two kinds
    of model; without a configuration, what there is."""
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
    if seen is not None:
        model, heads = seen
        situations = {} if heads is None else {model.model: _situation(heads, here)}
    choices = [
        choice
        for name, situation in situations.items()
        for choice in _choices(name, situation, config.kernel, shelf)
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


def _situation(heads: Heads, here: Situation) -> Situation:
    shape = dataclasses.replace(here.shape, **dataclasses.asdict(heads))
    return dataclasses.replace(here, shape=shape)


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
