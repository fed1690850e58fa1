"""What a request's prefill found and what it had to compute, counted once when it is scheduled."""

from __future__ import annotations

from typing import Any

from .cache import TesseraCache
from .intake import is_span_prefill
from .reader import reader_of

ACCOUNTED = "tessera_accounted"  # attribute of a Req


def account(result: Any, batch: Any) -> Any:
    """Hook after ``ScheduleBatch.prepare_for_extend``.

    A reader that caused a span's prefill reports those tokens as computed: SGLang has just counted
    the whole prefix of its row as cached.
    """
    cache = batch.tree_cache
    if not isinstance(cache, TesseraCache):
        return result
    for req in batch.reqs:
        if getattr(req, ACCOUNTED, False):
            continue
        setattr(req, ACCOUNTED, True)
        reader = reader_of(req)
        shared = reader.layout.shared_tokens if reader is not None else 0
        computed = min(reader.computed_tokens, shared) if reader is not None else 0
        if computed:
            req.cached_tokens -= computed
            req.cached_tokens_device -= computed
        if is_span_prefill(req):
            continue
        tokens = cache.traffic
        tokens.lookup += len(req.origin_input_ids)
        tokens.prefix_hit += max(req.cached_tokens - (shared - computed), 0)
        tokens.span_hit += shared - computed
    return result
