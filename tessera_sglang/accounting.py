"""What a request's prefill found and what it had to compute, counted once when it is scheduled.

Counted are prompts that somebody asked, so that hits divide by look-ups as ``cached_tokens`` divides by
``prompt_tokens`` over the answers. Not counted are span prefills, whose tokens the reader they are for
reports as computed, health checks, and requests that were refused in the queue: SGLang schedules those
with a prompt of one token, and answers with the error. A request that is retracted and scheduled again
was counted the first time, and so was one whose prefill takes several chunks.

SGLang's own gauges see span prefills as requests, and the reader behind one as a hit. The hooks at the
end of this module take that back.
"""

from __future__ import annotations

from typing import Any

from .cache import TesseraCache
from .compat import HEALTH_CHECK_RID_PREFIX
from .reader import is_span_prefill, reader_of

ACCOUNTED = "tessera_accounted"  # attribute of a Req
NOT_FOUND = "tessera_not_found"  # of a Req in a batch being made: tokens that SGLang takes for hits


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
        if is_span_prefill(req):
            cache.traffic.span_prefills += 1
            setattr(req, NOT_FOUND, req.cached_tokens)
            continue
        found = _take_back_computed(req)
        if _was_asked(req):
            _count(cache, req, found)
    return result


def _take_back_computed(req: Any) -> int:
    """Shared tokens that the reader found; those that were computed for it are no hits."""
    reader = reader_of(req)
    if reader is None:
        return 0
    shared: int = reader.layout.shared_tokens
    computed: int = min(reader.computed_tokens, shared)
    req.cached_tokens -= computed
    req.cached_tokens_device -= computed
    setattr(req, NOT_FOUND, computed)
    return shared - computed


def _was_asked(req: Any) -> bool:
    refused = req.to_finish is not None
    return not refused and not str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)


def _count(cache: TesseraCache, req: Any, found: int) -> None:
    traffic, copied = cache.traffic, req.last_node.copied
    traffic.lookup += len(req.origin_input_ids)
    traffic.span_hit += found
    traffic.prefix_hit += req.cached_tokens - found
    traffic.forked += copied.rows if copied is not None and not copied.loaded else 0


# --- SGLang's own metrics ------------------------------------------------------------------------


def correct_prefill_stats(result: Any, cls: Any, adder: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``PrefillStats.from_adder``, which follows `account`: what was computed is no hit.

    So ``sglang:cache_hit_rate`` and the counters of cached prefill tokens say what answers say.
    """
    for req in adder.can_run_list:
        tokens = getattr(req, NOT_FOUND, 0)
        if tokens:
            setattr(req, NOT_FOUND, 0)
            result.log_hit_tokens -= tokens
            loaded = req.materialized_host_hit_len() if is_span_prefill(req) else 0
            stored = min(loaded, req.storage_hit_length)
            result.log_device_hit_tokens -= tokens - loaded
            result.log_host_hit_tokens -= loaded - stored
            result.log_storage_hit_tokens -= stored
    return result


def count_asked(original: Any, cls: Any, reqs: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``QueueCount.from_reqs``: queues are as long as what somebody asked."""
    if any(is_span_prefill(req) for req in reqs):
        reqs = [req for req in reqs if not is_span_prefill(req)]
    return original(cls, reqs, *args, **kwargs)
