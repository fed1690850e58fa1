"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def hardware() -> dict[str, object]:
    """Processor, cores, memory and accelerator; the last only where torch has been imported."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch is not None and on_gpu else None,
    }


def versions(*packages: str) -> dict[str, str]:
    """Python and the packages that matter; ``absent`` where one is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
