"""``tessera-sglang doctor``: whether a server would start here, and with what."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import msgspec

from .config import Config, ConfigError, load


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and whether a server can start with it."""

    name: str
    found: str
    ok: bool = True


def run(*, as_json: bool) -> int:
    """Look, print, and return 0 when nothing stands in the way."""
    findings = [*_versions(), _plugin(), _device(), *_configuration()]
    ok = all(finding.ok for finding in findings)
    if as_json:
        shown = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": ok, "findings": shown}, indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name:{width}}  {finding.found}")
    return 0 if ok else 1


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


def _configuration() -> list[Finding]:
    try:
        config = load()
    except ConfigError as error:
        return [Finding("configuration", str(error), ok=False)]
    found = [Finding("configuration", msgspec.json.encode(config).decode())]
    return [*found, Finding("page size", _page_size()), Finding("kernel", _kernel(config))]


def _page_size() -> str:
    try:
        from .startup import PAGE_TOKENS
    except ImportError:
        return "unknown without SGLang"
    return f"{PAGE_TOKENS} tokens"


def _kernel(config: Config) -> str:
    chosen = "torch" if config.kernel == "auto" else config.kernel
    return f"{chosen} (kernel {config.kernel!r}; this version has no other)"
