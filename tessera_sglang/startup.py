"""What ``--attention-backend tessera`` selects, and what it refuses to start with.

Runs inside SGLang's resolution of server arguments, before any process is spawned. Defaults come
first, so that later steps of the resolution see them; contradictions are looked for at the end, on
the resolved values, so that an explicit flag and one that SGLang set by itself are treated alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from tessera_sglang.attention.router import RouteError
from tessera_sglang.memory_pool import eviction

from . import compat
from .config import BACKEND, PAGE_TOKENS, Config, load
from .kernels import check_wanted
from .survey import SPARSE_BACKEND
from .v4_serving import config as v4

logger = logging.getLogger(__name__)


class StartupError(ValueError):
    """Flags that contradict each other; names both and the remedy."""


def selected(server_args: Any) -> bool:
    """Whether the user asked for Tessera, in any of the three flags."""
    view = compat.resolving_view(server_args)
    return BACKEND in (
        view.attention_backend,
        view.prefill_attention_backend,
        view.decode_attention_backend,
    )


def choose_defaults(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: the page size, and on a CPU no graphs and a quiet idle loop.

    With drafts the page size is SGLang's to choose: it refuses pages for some kinds of them, by the
    name of a backend that is not ours.
    """
    view = compat.resolving_view(server_args)
    if view.device is None and _on_cpu(view):
        # SGLang's own detection trips over an out-of-tree CPU, whatever the backend
        compat.declare_resolution(server_args, BACKEND, device="cpu")
        if not selected(server_args):
            logger.warning(
                "no accelerator was found and Tessera's CPU platform stepped in; what it serves "
                "with is --attention-backend tessera"
            )
    if selected(server_args):
        config = load()  # a bad TESSERA_CONFIG stops the start here
        _check_drafts(view, config)
        chosen: dict[str, Any] = {}
        if _serves_v4(view):
            chosen |= v4.defaults(view)
        elif view.page_size is None and not view.speculative_algorithm:
            chosen["page_size"] = PAGE_TOKENS
        if _on_cpu(view):
            chosen["disable_cuda_graph"] = True
            chosen["sleep_on_idle"] = True  # an idle scheduler would burn a core
        compat.declare_resolution(server_args, BACKEND, **chosen)
        logger.info("tessera selects %s", chosen)
    previous(server_args)


def place_drafts(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: drafts run on what SGLang would have taken; it can build none on our name."""
    previous(server_args)
    view = compat.resolving_view(server_args)
    if not selected(server_args) or not view.speculative_algorithm:
        return
    if view.speculative_draft_attention_backend is None:
        sparse = compat.picks_keys(server_args)
        name = SPARSE_BACKEND if sparse else compat.default_backend_of(server_args)
        compat.declare_resolution(server_args, BACKEND, speculative_draft_attention_backend=name)
        logger.info("tessera selects %s for drafts", name)


def refuse_contradictions(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: stop when flags contradict each other."""
    previous(server_args)
    if selected(server_args):
        view, config = compat.resolving_view(server_args), load()
        check(
            view,
            config,
            mla=compat.use_mla_backend(server_args),
            sparse=compat.picks_keys(server_args),
        )
        if _serves_v4(view):
            _refuse_with_v4(view, config)
        try:
            check_wanted(config.kernel, view.device)
        except RouteError as error:
            raise StartupError(str(error)) from error


def _check_drafts(view: Any, config: Config) -> None:
    """Before SGLang looks at drafts, and would name what it took for the cause."""
    algorithm = view.speculative_algorithm
    if not algorithm:
        return
    if config.index == "content":
        raise _with_content(
            f"--speculative-algorithm {algorithm}", "drafts do not know span layouts"
        )
    if _on_cpu(view):
        raise StartupError(
            f"--speculative-algorithm {algorithm} with --attention-backend tessera: on a CPU "
            "Tessera's own kernels serve, and they verify no drafts; drop the flag"
        )


def check(view: Any, config: Config, *, mla: bool, sparse: bool = False) -> None:
    """Raise StartupError for the first contradiction in resolved arguments.

    ``sparse``: the model picks its keys by an indexer, so SGLang's own backend and pool serve it.
    """
    backends = set(compat.attention_backends_of(view))
    if backends != {BACKEND}:
        raise StartupError(
            f"--prefill-attention-backend and --decode-attention-backend resolve to "
            f"{sorted(backends)}: spans need both phases; use --attention-backend tessera alone"
        )
    _check_drafts(view, config)
    if mla and view.page_size % PAGE_TOKENS and not view.speculative_algorithm:
        raise StartupError(
            f"--page-size {view.page_size} with --attention-backend tessera on an MLA model: its "
            f"pages hold a multiple of {PAGE_TOKENS} tokens; drop --page-size"
        )
    for flag, wanted, remedy in _always_refused(view, sparse):
        raise StartupError(f"{flag} with --attention-backend tessera: {wanted}; {remedy}")
    if config.index != "content":
        return
    if isinstance(config.span_root, list) and len(config.span_root) % view.page_size:
        raise StartupError(
            f"TESSERA_CONFIG: span_root has {len(config.span_root)} token ids, but it must be whole "
            f"pages of {view.page_size} (--page-size); add or remove ids"
        )
    if config.verify == "latents" and view.tp_size > 1:
        raise StartupError(
            f'TESSERA_CONFIG: verify "latents" with --tp-size {view.tp_size}: ranks hold different '
            'latents and would disagree on which pages are equal; use "tokens", or --tp-size 1'
        )
    if config.host_bytes and view.tp_size > 1:
        key = config.store or "host_tier_bytes"
        raise StartupError(
            f"TESSERA_CONFIG: {key} with --tp-size {view.tp_size}: ranks would not agree on when a page "
            "has come back from a lower tier; drop the key, or use --tp-size 1"
        )
    for flag, wanted in _refused_with_content(view):
        raise _with_content(flag, wanted)


def _with_content(flag: str, wanted: str) -> StartupError:
    return StartupError(
        f'{flag} with the content index (TESSERA_CONFIG index "content"): {wanted}; drop the '
        'flag, or set TESSERA_CONFIG=\'{"index": "radix"}\''
    )


def _always_refused(view: Any, sparse: bool) -> list[tuple[str, str, str]]:
    found = []
    if not sparse and view.kv_cache_dtype not in (
        "auto",
        "bfloat16",
        "bf16",
        "float16",
        "fp16",
        "float32",
    ):
        found.append(
            (
                f"--kv-cache-dtype {view.kv_cache_dtype}",
                "the pools that are served have 16- and 32-bit rows",
                "use --kv-cache-dtype auto",
            )
        )
    for field, flag in (
        ("enable_two_batch_overlap", "--enable-two-batch-overlap"),
        ("enable_dp_attention", "--enable-dp-attention"),
        ("enable_pdmux", "--enable-pdmux"),
    ):
        if getattr(view, field):
            found.append((flag, "batches are split or padded behind the plan", "drop the flag"))
    for field, flag in (
        ("dcp_size", "--dcp-size"),
        ("attn_cp_size", "--attn-cp-size"),
        ("attn_dp_size", "--attn-dp-size"),  # what --enable-dp-attention resolves to
    ):
        value = getattr(view, field)
        if value and value > 1:
            found.append(
                (f"{flag} {value}", "rows or batches are split or padded", "drop the flag")
            )
    return found


def _refused_with_content(view: Any) -> list[tuple[str, str]]:
    found = [
        (flag, wanted)
        for field, flag, wanted in (
            ("disable_radix_cache", "--disable-radix-cache", "it would disable the index"),
            ("enable_hierarchical_cache", "--enable-hierarchical-cache", "it drives SGLang's tree"),
            ("enable_lmcache", "--enable-lmcache", "it drives SGLang's tree"),
            ("enable_flexkv", "--enable-flexkv", "it drives SGLang's tree"),
            (
                "enable_unified_cache_external_linker",
                "--enable-unified-cache-external-linker",
                "it drives SGLang's tree",
            ),
            (
                "enable_session_radix_cache",
                "--enable-session-radix-cache",
                "it needs SGLang's tree",
            ),
            ("enable_streaming_session", "--enable-streaming-session", "it needs SGLang's tree"),
            ("enable_hisparse", "--enable-hisparse", "it moves KV behind the index"),
        )
        if getattr(view, field)
    ]
    for field, flag, wanted in (
        ("radix_cache_backend", "--radix-cache-backend", "two indexes for one pool"),
        ("kv_events_config", "--kv-events-config", "the index emits no KV events"),
        ("dllm_algorithm", "--dllm-algorithm", "denoising rewrites rows in place"),
    ):
        value = getattr(view, field)
        if value:
            found.append((f"{flag} {value}", wanted))
    if view.disaggregation_mode not in (None, "null"):
        found.append(
            (f"--disaggregation-mode {view.disaggregation_mode}", "rows are moved in prompt order")
        )
    if view.radix_eviction_policy not in (None, *eviction.POLICIES):
        found.append(
            (
                f"--radix-eviction-policy {view.radix_eviction_policy}",
                f"it evicts by {', '.join(eviction.POLICIES)}",
            )
        )
    for key, value in (view.radix_eviction_policy_config or {}).items():
        known = view.radix_eviction_policy == "slru" and key == "protected_threshold"
        if not known or isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found.append(
                (
                    f"--radix-eviction-policy-config {json.dumps({key: value})}",
                    'slru takes "protected_threshold", a whole number from 1 on, and the other '
                    "policies take nothing",
                )
            )
    if view.tokenizer_worker_num > 1:
        found.append(
            (
                f"--tokenizer-worker-num {view.tokenizer_worker_num}",
                "SGLang loads no plugins in these workers, which would miss cache_control",
            )
        )
    if view.pp_size > 1:
        found.append((f"--pp-size {view.pp_size}", "stages would see rows in different orders"))
    if compat.envs.SGLANG_RADIX_FORCE_MISS.get():
        found.append(("SGLANG_RADIX_FORCE_MISS", "a reader can not be scheduled without its spans"))
    return found


def _serves_v4(view: Any) -> bool:
    return _on_cpu(view) and v4.serves_here(view.model_path)


def _refuse_with_v4(view: Any, config: Config) -> None:
    for flag, reason, remedy in v4.contradictions(view, index=config.index, verify=config.verify):
        raise StartupError(f"{flag} with a DeepSeek-V4 model on a CPU: {reason}; {remedy}")


def _on_cpu(view: Any) -> bool:
    """Whether the server will run on a CPU: asked for, or our platform stepped in."""
    if view.device:
        return str(view.device).startswith("cpu")
    return compat.platform_is_plugin_cpu()
