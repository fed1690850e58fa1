"""Everything that is used of SGLang, in one place.

Importing this module imports the symbols; :func:`install` registers the hooks; :func:`verify` checks
that each of them landed. A version that is not in ``KNOWN_VERSIONS``, a symbol that moved or a hook
that did not land makes ``--attention-backend tessera`` refuse to start (see :mod:`plugin`): SGLang
itself would only log it and serve something else.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang.srt.arg_groups.choices import (
    CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS as PREFIX_CHUNK_BACKENDS,
)
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.arg_groups.model_override_base import get_default_attn_backend, model_config_of
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    resolving_view,
    use_mla_backend,
)
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.environ import envs
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.layer_boundary.adapters.attention import (
    AttentionInputs,
    get_attn_tp_context,
)
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    MatchResult,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import (
    KVWriteLoc,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NoOpMHATokenToKVPool,
)
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    _dispatch_mla_subtype,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import (
    attention_backends,
    get_parallel,
    get_platform,
    get_server_args,
    get_spec,
)
from sglang.srt.sampling.sampling_params import SamplingParams

__all__ = [
    "FINISH_ABORT",
    "HEALTH_CHECK_RID_PREFIX",
    "PREFIX_CHUNK_BACKENDS",
    "AddReqResult",
    "AttentionBackend",
    "AttentionBackendRegistry",
    "AttentionInputs",
    "AttentionType",
    "BasePrefixCache",
    "ComponentType",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "ForwardBatch",
    "ForwardMode",
    "Hook",
    "HookType",
    "IncLockRefResult",
    "IncompatibleError",
    "KVWriteLoc",
    "LogitsProcessor",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "MatchResult",
    "NoOpMHATokenToKVPool",
    "RadixAttention",
    "Req",
    "SamplingParams",
    "ScheduleBatch",
    "SharedReadEnds",
    "TreeCacheBuildContext",
    "absorbed_mla",
    "add_attention_backend_choices",
    "attention_backends",
    "attention_backends_of",
    "build_backend",
    "capture_attention_variant",
    "check_version",
    "compute_capability",
    "current_backend",
    "declare_resolution",
    "default_backend_name",
    "default_backend_of",
    "envs",
    "get_attn_tp_context",
    "get_parallel",
    "get_server_args",
    "has_flashinfer",
    "hybrid_backend",
    "install",
    "parse_storage_config",
    "picks_keys",
    "platform_is_plugin_cpu",
    "register_attention_backend",
    "register_model",
    "register_resolution_hook",
    "resolving_view",
    "storage_backend",
    "storage_backend_names",
    "use_mla_backend",
    "verifies_as_decode",
    "verify",
]

KNOWN_VERSIONS = ("0.5.23",)


class IncompatibleError(RuntimeError):
    """The installed SGLang is not one that this version of Tessera knows."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One patch of SGLang: a dotted target and what wraps it."""

    target: str
    kind: HookType
    function: Callable[..., Any]


def check_version() -> None:
    """Raise IncompatibleError unless the installed SGLang is known."""
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise IncompatibleError(
            f"SGLang is not installed; install sglang=={KNOWN_VERSIONS[-1]}"
        ) from error
    if found not in KNOWN_VERSIONS:
        raise IncompatibleError(
            f"SGLang {found} is installed, but this version of Tessera knows "
            f"{', '.join(KNOWN_VERSIONS)}; install sglang=={KNOWN_VERSIONS[-1]} "
            "or a Tessera that knows yours"
        )


def install(hooks: tuple[Hook, ...]) -> None:
    """Register hooks with SGLang, which applies them once all plugins are loaded."""
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)


def verify(hooks: tuple[Hook, ...]) -> None:
    """Raise IncompatibleError for the first hook that did not land.

    SGLang wraps a target and leaves the original in ``__wrapped__``; several plugins may have
    wrapped the same one, so the whole chain is looked through.
    """
    for hook in hooks:
        try:
            found = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            raise IncompatibleError(f"{hook.target} is gone from this SGLang: {error}") from error
        if not _wraps(found, hook.function):
            raise IncompatibleError(
                f"the hook on {hook.target} did not land; another plugin may replace it: "
                "restrict plugins with SGLANG_PLUGINS=tessera"
            )


def absorbed_mla(attention: Any, forward_batch: ForwardBatch) -> Any:
    """Forward method of an MLA layer under our backend: absorbed, so that K/V are never expanded."""
    return _dispatch_mla_subtype(attention, forward_batch)


def platform_is_plugin_cpu() -> bool:
    """Whether a CPU platform from a plugin, ours that is, stepped in."""
    from sglang.srt.platforms import current_platform  # a lazy singleton: asking creates it

    return bool(current_platform.is_out_of_tree() and current_platform.device_type == "cpu")


def picks_keys(server_args: Any) -> bool:
    """Whether the model has DeepSeek's sparse attention."""
    return bool(is_deepseek_dsa(model_config_of(server_args).hf_config))


def register_model(architecture: str, model: type) -> None:
    """Let SGLang find a model class by the architecture that a config names."""
    from sglang.srt.models.registry import ModelRegistry  # imports every model that SGLang has

    known = ModelRegistry.models.setdefault(architecture, model)
    if known is not model:
        raise IncompatibleError(f"{architecture} is registered as {known}, by another plugin")


def build_backend(runner: Any, name: str) -> Any:
    """One of SGLang's attention backends."""
    return ATTENTION_BACKENDS[name](runner)


def hybrid_backend(runner: Any, prefill: Any, decode: Any) -> Any:
    """SGLang's backend that has another for each phase."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    return HybridAttnBackend(runner, prefill, decode)


def current_backend() -> Any:
    """What attends in the forward pass in hand; the part of a hybrid model that pages."""
    backend = get_attn_backend()
    return getattr(backend, "full_attn_backend", backend)


def capture_attention_variant() -> str | None:
    """Which attention variant SGLang's decode runner is capturing."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

    found: str | None = get_capture_attention_variant()
    return found


def default_backend_name(runner: Any) -> str:
    """What SGLang would use for the model on this device, had nobody chosen."""
    return str(
        get_default_attn_backend(runner.server_args, runner.use_mla_backend, runner.model_config)
    )


def default_backend_of(server_args: Any) -> str:
    """Likewise by server arguments, before there is a runner."""
    return str(
        get_default_attn_backend(
            server_args, use_mla_backend(server_args), model_config_of(server_args)
        )
    )


def verifies_as_decode() -> bool:
    """Whether drafts are verified by the decode backend, where that is another one."""
    return bool(get_spec().speculative_attention_mode == "decode")


def compute_capability(device: str) -> tuple[int, int] | None:
    """Of the GPU; None on other devices. Makes no CUDA context where there is none yet."""
    generation: int = get_platform().device_sm if device == "cuda" else 0
    return divmod(generation, 10) if generation else None


def has_flashinfer() -> bool:
    """Whether SGLang may build backends that need FlashInfer."""
    return bool(get_platform().has_flashinfer)


def storage_backend_names() -> list[str]:
    """Engines that SGLang's hierarchical cache can store pages in, by name."""
    return sorted(StorageBackendFactory._registry)


def parse_storage_config(text: str | None) -> dict[str, Any]:
    """Settings of a storage engine, less those that SGLang's cache controller takes for itself."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    found: dict[str, Any] = HybridCacheController.parse_storage_backend_extra_config(text)[0]
    return found


def storage_backend(name: str, extra: dict[str, Any], pool: Any, model_name: str) -> Any:
    """One of SGLang's storage engines over a host pool.

    As on a single rank whose pages are latents: one object for each page, and no rank in its key.
    """
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model_name,
        extra_config=extra,
    )
    return StorageBackendFactory.create_backend(name, config, pool)


def _wraps(found: Any, function: Callable[..., Any]) -> bool:
    while found is not None:
        closure = getattr(found, "__closure__", None) or ()
        if any(cell.cell_contents is function for cell in closure):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
