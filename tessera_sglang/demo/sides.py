"""The two servers of a comparison, which differ by their index alone."""

from __future__ import annotations

import json
from pathlib import Path

from tessera_sglang.launch import Server


def server_of(
    model: Path, *, index: str, pool_tokens: int, dtype: str, inspect: bool = True
) -> Server:
    """SGLang with ``--attention-backend tessera``; scheduling and chunking are SGLang's defaults.

    With ``inspect`` cached pages are listed in ``/server_info``; without, SGLang's tree has its default
    core.
    """
    arguments = (
        *("--dtype", dtype, "--attention-backend", "tessera"),
        *("--max-total-tokens", str(pool_tokens), "--mem-fraction-static", "0.3"),
    )
    environment = {"HF_HUB_OFFLINE": "1", "TESSERA_CONFIG": json.dumps({"index": index})}
    if inspect:
        # SGLang's tree has two cores that decide alike; this one's pages can be listed
        environment["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
        environment["TESSERA_INSPECT_PAGES"] = "1"
    return Server(model, arguments, environment)
