"""What a running server says of its cache in ``/server_info``: sizes and counters.

With ``TESSERA_INSPECT_PAGES=1`` it also lists the cached pages as (digest of the token ids, physical
page), for the content index and for SGLang's tree alike. That is how the demo counts physical copies
of a document; it is off by default, since digests tell who knows a text that it is there.
"""

from __future__ import annotations

import dataclasses
import os
from array import array
from typing import Any

from tessera_sglang.attention.router import Router
from tessera_sglang.memory_pool.keys import TOKEN_BYTES, page_digest

from .cache import TesseraCache
from .compat import ComponentType
from .kernels import router_of

VARIABLE = "TESSERA_INSPECT_PAGES"


def add_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``Scheduler.get_internal_state``."""
    cache = scheduler.tree_cache
    content = isinstance(cache, TesseraCache)
    size = cache.page_size
    state: dict[str, Any] = {
        "index": "content" if content else "radix",
        "page_tokens": size,
        "pool_tokens": scheduler.max_total_num_tokens,
        "held_tokens": scheduler.max_total_num_tokens
        - scheduler.token_to_kv_pool_allocator.available_size(),
    }
    if content:
        index = cache.index
        state |= {
            "pages": {
                "sealed": index.page_count,
                "locked": index.locked_pages,
                "held": index.held_pages,
                "evictable": index.evictable_pages,
            },
            "paged_tier": dataclasses.asdict(cache.paged_tier()),
            "page_bytes": cache.memory.page_bytes if cache.memory is not None else None,
            "counters": dataclasses.asdict(index.counters),
            "traffic": dataclasses.asdict(cache.traffic),
        }
    router = router_of(scheduler.tp_worker.model_runner)
    if router is not None:
        state |= kernels_state(router)
    if os.environ.get(VARIABLE) == "1":
        state["cached_pages"] = _content_pages(cache) if content else _tree_pages(cache, size)
    result.internal_state["tessera"] = state
    return result


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
