"""What a running server says of itself: one line of settings at its start, and ``/server_info``.

With ``TESSERA_INSPECT_PAGES=1`` it also lists the cached pages as (digest of the token ids, physical
page), for the content index and for SGLang's tree alike. That is how the demo counts physical copies
of a document; it is off by default, since digests tell who knows a text that it is there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from array import array
from typing import Any

from tessera_sglang.attention.router import Router
from tessera_sglang.memory_pool.keys import TOKEN_BYTES, page_digest

from .cache import TesseraCache
from .compat import ComponentType, attention_backends
from .config import BACKEND, load
from .kernels import router_of

logger = logging.getLogger(__name__)

VARIABLE = "TESSERA_INSPECT_PAGES"
RESOLVED = "tessera_resolved"  # attribute of a scheduler
INDEX_IS_RADIX = "index is radix"


@dataclasses.dataclass(frozen=True, slots=True)
class SpanState:
    """Whether a server shares spans and how; requests may override pages and root."""

    refused: str | None  # why it shares none
    link_pages: int
    root_tokens: int
    policy: str


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """What a server's settings came to."""

    index: str
    verify: str
    page_tokens: int
    pool_tokens: int
    spans: SpanState

    def line(self, kernels: dict[str, str]) -> str:
        """``key=value`` with JSON values; ``kernels`` by phase."""
        spans = self.spans
        pairs: dict[str, Any] = {
            "index": self.index,
            "page_tokens": self.page_tokens,
            "pool_tokens": self.pool_tokens,
            "link_pages": spans.link_pages,
            "root_tokens": spans.root_tokens,
            "span_policy": spans.policy,
            "verify": self.verify,
            "spans_refused": spans.refused,
            **{f"kernel_{phase}": kernel for phase, kernel in kernels.items()},
        }
        return " ".join(f"{key}={json.dumps(value)}" for key, value in pairs.items())


def log_resolved(result: Any, scheduler: Any) -> Any:
    """Hook after ``Scheduler.init_schedule_policy`` and the intake's: one line of settings."""
    if BACKEND in attention_backends():
        router = router_of(scheduler.tp_worker.model_runner)
        kernels = {} if router is None else {p.value: r.name for p, r in router.routes.items()}
        logger.info("tessera serves with %s", resolved(scheduler).line(kernels))
    return result


def resolved(scheduler: Any) -> Resolved:
    """A scheduler's settings, put together when first asked for: a start does not change."""
    found: Resolved | None = getattr(scheduler, RESOLVED, None)
    if found is None:
        found = _resolve(scheduler)
        setattr(scheduler, RESOLVED, found)
    return found


def _resolve(scheduler: Any) -> Resolved:
    config, cache = load(), scheduler.tree_cache
    intake = getattr(scheduler, "tessera_intake", None)
    link_pages, root_tokens = config.link_pages, 0
    if intake is not None:
        settings = intake.settings
        refused = settings.refusal
        link_pages, root_tokens = settings.link_pages, len(settings.root)
    elif config.index == "radix":
        refused = INDEX_IS_RADIX
    else:
        refused = getattr(scheduler, "tessera_refusal", None) or "the model's pool is hybrid"
    return Resolved(
        index="content" if isinstance(cache, TesseraCache) else "radix",
        verify=config.verify,
        page_tokens=cache.page_size,
        pool_tokens=scheduler.max_total_num_tokens,
        spans=SpanState(refused, link_pages, root_tokens, config.span_policy),
    )


# --- /server_info --------------------------------------------------------------------------------


def add_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``Scheduler.get_internal_state``; a server with another backend says nothing."""
    if BACKEND not in attention_backends():
        return result
    cache, settings = scheduler.tree_cache, resolved(scheduler)
    state: dict[str, Any] = {
        "index": settings.index,
        "page_tokens": settings.page_tokens,
        "pool_tokens": settings.pool_tokens,
        "held_tokens": settings.pool_tokens - scheduler.token_to_kv_pool_allocator.available_size(),
        "spans": dataclasses.asdict(settings.spans),
    }
    if isinstance(cache, TesseraCache):
        state |= _cache_state(cache)
    router = router_of(scheduler.tp_worker.model_runner)
    if router is not None:
        state |= kernels_state(router)
    if os.environ.get(VARIABLE) == "1":
        content = isinstance(cache, TesseraCache)
        state["cached_pages"] = (
            _content_pages(cache) if content else _tree_pages(cache, cache.page_size)
        )
    result.internal_state["tessera"] = state
    return result


def _cache_state(cache: TesseraCache) -> dict[str, Any]:
    index = cache.index
    return {
        "pages": {
            "sealed": index.page_count,
            "locked": index.locked_pages,
            "held": index.held_pages,
            "evictable": index.evictable_pages,
        },
        "paged_tier": dataclasses.asdict(cache.paged_tier()),
        "page_bytes": cache.memory.page_bytes if cache.memory is not None else None,
        "rope_hash": cache.publication.schema.rope_hash,
        "publication": {"withheld": cache.publication.withheld},
        "counters": {
            **dataclasses.asdict(index.counters),
            "quarantined_pages": cache.quarantined_pages,
        },
        "traffic": dataclasses.asdict(cache.traffic),
        **({"lower_tiers": cache.below.state()} if cache.below is not None else {}),
        **cache.more_state(),
    }


def kernels_state(router: Router) -> dict[str, Any]:
    """Which kernel runs what and why, and what ran."""
    counts = router.dispatches
    dispatches: dict[str, dict[str, int]] = {}
    for (kernel, phase), launches in counts.launches.items():
        dispatches.setdefault(kernel, {})[phase] = launches
    return {
        "kernels": {
            phase.value: {"kernel": route.name, "reason": route.reason}
            for phase, route in router.routes.items()
        },
        "dispatches": dispatches,
        "fallbacks": [
            {"wanted": wanted, "got": got, "reason": reason, "passes": passes}
            for (wanted, got, reason), passes in counts.fallbacks.items()
        ],
    }


def _content_pages(cache: TesseraCache) -> list[tuple[str, int]]:
    width = cache.page_size
    return [
        (page_digest(run.tokens[number * width : (number + 1) * width].tobytes()), int(page_id))
        for run in cache.index.runs()
        for number, page_id in enumerate(run.page_ids)
    ]


def _tree_pages(cache: Any, size: int) -> list[tuple[str, int]] | None:
    """Pages of SGLang's tree, node by node; None where its core is not walkable from Python."""
    try:
        root = getattr(getattr(cache, "tree_core", None), "root_node", None)
    except NotImplementedError:  # SGLang's Rust core keeps its nodes to itself
        root = None
    if root is None:
        return None
    found: list[tuple[str, int]] = []
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        slots = node.component_data[ComponentType.FULL].value
        if slots is None:
            continue
        tokens = array("q", node.key.raw_token_ids()).tobytes()
        pages = (slots[::size] // size).tolist()
        width = size * TOKEN_BYTES
        found += [
            (page_digest(tokens[number * width : (number + 1) * width]), page)
            for number, page in enumerate(pages)
        ]
    return found
