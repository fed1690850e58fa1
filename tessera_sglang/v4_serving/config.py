"""Which models are served here, how SGLang learns of them, and what a start refuses.

SGLang reads a DeepSeek-V4 config as one of its own class, with pools that it builds for CUDA only. So
the config gets the name of another architecture, and is else what transformers reads.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera_sglang import compat

ARCHITECTURE = "TesseraV4ForCausalLM"
_AS_READ = "tessera_as_read"  # attribute of a loaded config
MAX_RUNNING_REQUESTS = 32
"""Where no flag says otherwise: each has an arena slot, whether it runs or not."""

SERVED_BY = "transformers' DeepSeek-V4 modules over the two-tier pool"


def serves_here(model_path: object) -> bool:
    """Whether a model is a DeepSeek-V4 in a local directory, and our CPU platform serves."""
    return is_v4(str(model_path)) and compat.platform_is_plugin_cpu()


@functools.lru_cache(maxsize=32)
def is_v4(model_path: str) -> bool:
    """Whether a directory's ``config.json`` is that of a DeepSeek-V4."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "deepseek_v4"


def is_served(hf_config: Any) -> bool:
    """Whether a loaded config is one that :func:`load_config` made."""
    return getattr(hf_config, "architectures", None) == [ARCHITECTURE]


def load_config(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's ``get_config``."""
    if not serves_here(model):
        return original(model, *args, **kwargs)
    config = v4_config(str(model))
    config.architectures = [ARCHITECTURE]
    config.update(dict(kwargs.get("model_override_args") or {}))
    setattr(config, _AS_READ, config.to_dict())
    return config


def as_read(hf_config: Any) -> Any:
    """A loaded config before SGLang padded its sizes to what its own CPU kernels want."""
    from transformers import DeepseekV4Config  # not for servers of other models

    config = DeepseekV4Config.from_dict(getattr(hf_config, _AS_READ, None) or hf_config.to_dict())
    config.name_or_path = hf_config.name_or_path
    return config


def register(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``ModelRunner.initialize``: SGLang finds the class by the architecture's name."""
    if is_served(runner.model_config.hf_config):
        from .model import TesseraV4ForCausalLM  # not for servers of other models

        compat.register_model(ARCHITECTURE, TesseraV4ForCausalLM)


def v4_config(model_path: str) -> Any:
    """A directory's config, as transformers reads it."""
    from transformers import DeepseekV4Config  # not for servers of other models

    config = DeepseekV4Config.from_pretrained(model_path)
    config.name_or_path = model_path
    return config


def defaults(view: Any) -> dict[str, Any]:
    """What a server is started with, beside what every one of ours is."""
    found: dict[str, Any] = {"disable_overlap_schedule": True}
    if view.page_size is None:
        found["page_size"] = page_tokens(str(view.model_path), None)
    if view.max_running_requests is None:
        found["max_running_requests"] = MAX_RUNNING_REQUESTS
    stored = str(v4_config(str(view.model_path)).dtype)
    if view.dtype == "auto" and not stored.endswith("bfloat16"):
        found["dtype"] = "float32"  # SGLang would make it float16, which the pool does not hold
    return found


def refusal(hf_config: Any) -> str | None:
    """Why spans can not be served with a loaded config; None where they can."""
    from tessera_sglang.v4.rope import Rope
    from tessera_sglang.v4.storage import pool_geometry

    page, window = pool_geometry(hf_config).page_tokens, hf_config.sliding_window
    if window > page:
        return f"DeepSeek-V4: its window of {window} tokens reaches out of a shared page of {page}"
    try:
        Rope(hf_config).refuse_unknown()
    except ValueError as error:
        return f"DeepSeek-V4: {error}"
    return None


def page_tokens(model_path: str, wanted: int | None) -> int:
    """Tokens of a page; ValueError for a page that splits a group."""
    from tessera_sglang.v4.storage import pool_geometry

    return pool_geometry(v4_config(model_path), page_tokens=wanted).page_tokens


def contradictions(view: Any, *, index: str, verify: str) -> Iterator[tuple[str, str, str]]:
    """Flags that can not be met: flag, what stands against it, remedy."""
    if index != "content":
        yield (
            f'TESSERA_CONFIG index "{index}"',
            "SGLang's tree does not know which pages can be gone on from",
            'use "content"',
        )
    if verify == "latents":
        yield (
            'TESSERA_CONFIG verify "latents"',
            "pages of compressed entries are not compared",
            'use "tokens"',
        )
    try:
        page_tokens(str(view.model_path), view.page_size)
    except ValueError as error:
        yield f"--page-size {view.page_size}", str(error), "drop --page-size"
    if view.dtype in ("float16", "half"):
        yield f"--dtype {view.dtype}", "rows are float32 or bfloat16", "use one of them"
    if view.tp_size > 1:
        yield f"--tp-size {view.tp_size}", "the model runs whole", "use --tp-size 1"
    if view.enable_lora:
        yield "--enable-lora", "transformers' modules run as they are", "drop the flag"
    if view.load_format not in ("auto", "safetensors"):
        yield (
            f"--load-format {view.load_format}",
            "weights are read from safetensors",
            "drop the flag",
        )
