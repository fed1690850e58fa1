"""A CPU platform, so that the stock SGLang wheel serves on a machine without a GPU.

``activate`` is the entry point of the group ``sglang.srt.platforms``: the dotted path of a platform
class, or None to stand aside.
"""

from __future__ import annotations

import os


def activate() -> str | None:
    """Stand aside on any accelerator, and where the user asks for SGLang's own CPU engine."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "").lower() in ("1", "true", "yes"):
        return None
    import torch  # after the cheap test: platforms are asked before anything else is imported

    if torch.accelerator.is_available():
        return None
    return "tessera_sglang.cpu.TesseraCpuPlatform"
