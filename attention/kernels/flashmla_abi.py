"""Which ABI an installed ``flash_mla`` has.

The library changed how decode is scheduled without changing its name: the schedule used to be computed
eagerly from the lengths, and is now an object that the first call fills; of the latter kind there are
builds whose dense decode wants ``use_legacy=True``, and builds that have none. What is not one of those
is refused. Sources: ``flash_mla_interface.py`` and ``_loader.py`` of sgl-flash-mla 1.0.0.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from .base import KernelUnavailableError

REMEDY = "pip install sgl-flash-mla (PyPI's flash-mla is an empty placeholder)"
_ALWAYS = {
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
    *("num_splits", "softmax_scale", "causal"),
}
_EAGER_FIRST = ("num_q_tokens_per_head_k", "num_heads_per_head_k")


class Abi(Enum):
    """How scheduler metadata is made and dense decode is called. All that is known."""

    EAGER = "eager"  # get_mla_metadata(lengths, rows per KV head, KV heads) -> two tensors
    LAZY = "lazy"  # get_mla_metadata() -> an object that the first call fills
    LAZY_LEGACY = "lazy, legacy kernels"  # likewise; dense decode wants use_legacy=True


def recognise_abi(module: Any) -> Abi:
    """Which ABI a ``flash_mla`` module has, by its signatures and never by its version.

    Raises:
        KernelUnavailableError: it has none that is known, or no dense decode.
    """
    decode = getattr(module, "flash_mla_with_kvcache", None)
    metadata = getattr(module, "get_mla_metadata", None)
    if not callable(decode) or not callable(metadata):
        raise KernelUnavailableError(f"flash_mla has no decode kernel; {REMEDY}")
    try:
        accepts = set(inspect.signature(decode).parameters)
        made_from = list(inspect.signature(metadata).parameters.values())
    except (TypeError, ValueError) as error:
        raise KernelUnavailableError(f"flash_mla's signatures can not be read; {REMEDY}") from error
    if not accepts >= _ALWAYS:
        missing = ", ".join(sorted(_ALWAYS - accepts))
        raise KernelUnavailableError(f"flash_mla's decode does not take {missing}; {REMEDY}")
    if _is_eager(made_from):
        return Abi.EAGER
    if not _is_lazy(metadata, made_from):
        raise KernelUnavailableError(
            f"flash_mla's scheduler metadata is of no known kind; {REMEDY}"
        )
    if "use_legacy" in accepts:
        has_legacy = getattr(module, "has_legacy", None)
        if not callable(has_legacy) or not has_legacy():
            raise KernelUnavailableError(
                f"flash_mla was built without its legacy kernels, dense decode among them; {REMEDY}"
            )
        return Abi.LAZY_LEGACY
    if "enable_batch_invariant" in accepts:  # upstream since 2026.09.30
        raise KernelUnavailableError(f"flash_mla has no dense decode any more; {REMEDY}")
    return Abi.LAZY


def _is_eager(parameters: list[inspect.Parameter]) -> bool:
    names = [parameter.name for parameter in parameters]
    if len(names) < 3 or names[0] != "cache_seqlens" or names[2] != "num_heads_k":
        return False
    optional = all(p.default is not inspect.Parameter.empty for p in parameters[3:])
    return names[1] in _EAGER_FIRST and optional


def _is_lazy(metadata: Any, parameters: list[inspect.Parameter]) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not all(parameter.kind in variadic for parameter in parameters):
        return False
    made = metadata()
    fields = ("have_initialized", "tile_scheduler_metadata", "num_splits")
    if not isinstance(made, tuple) or len(made) != 2 or made[1] is not None:
        return False
    return all(hasattr(made[0], name) for name in fields)
