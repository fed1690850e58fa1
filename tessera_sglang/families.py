"""The metrics: their names, labels and meanings, and where a scheduler's numbers are.

Names and labels are public: dashboards and alerts rely on them (``docs/observability``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessera_sglang.attention.dispatches import Dispatches

from . import ignored
from .below import LoadedTokens
from .cache import TesseraCache

Values = Mapping[Any, int]  # by a tuple of label values


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a scheduler's numbers are; None where it has no such part."""

    dispatches: Dispatches | None
    cache: TesseraCache | None
    waiting_readers: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name, what it says, its labels, and how its values are read."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    read: Callable[[Sources], Values]
    kind: Literal["counter", "gauge"] = "counter"


def _of_dispatches(read: Callable[[Dispatches], Values]) -> Callable[[Sources], Values]:
    return lambda at: read(at.dispatches) if at.dispatches is not None else {}


def _of_cache(read: Callable[[TesseraCache], Values]) -> Callable[[Sources], Values]:
    return lambda at: read(at.cache) if at.cache is not None else {}


def _waiting(at: Sources) -> Values:
    return {(): at.waiting_readers()} if at.waiting_readers is not None else {}


def _pages(cache: TesseraCache) -> Values:
    tier = cache.paged_tier()
    states = ("available", "evictable", "protected", "in_use")
    return {(state,): getattr(tier, state) for state in states}


def _evicted(cache: TesseraCache) -> Values:
    below = cache.below.evicted if cache.below is not None else {}
    return {
        ("device",): cache.index.counters.evicted_pages,
        ("host",): below.get("host", 0),
        ("store",): below.get("store", 0),
    }


def _loaded(cache: TesseraCache) -> Values:
    loaded = cache.below.loaded if cache.below is not None else LoadedTokens()
    return {("host",): loaded.host, ("store",): loaded.store}


def _host_pages(cache: TesseraCache) -> Values:
    if cache.below is None:
        return {("held",): 0, ("free",): 0}
    host = cache.below.stack.host
    return {("held",): len(host), ("free",): host.page_count - len(host)}


FAMILIES = (
    Family(
        "tessera_kernel_dispatch_total",
        "Attention launches of a layer, by the kernel that ran and the phase.",
        ("kernel", "phase"),
        _of_dispatches(lambda d: d.launches),
    ),
    Family(
        "tessera_kernel_fallback_total",
        "Forward passes that ran on another kernel than the best one for this device.",
        ("wanted", "got", "reason"),
        _of_dispatches(lambda d: d.fallbacks),
    ),
    Family(
        "tessera_pages",
        "Pages of the pool, each counted once.",
        ("state",),
        _of_cache(_pages),
        kind="gauge",
    ),
    Family(
        "tessera_lookup_tokens_total",
        "Prompt tokens of requests that were scheduled, each request once.",
        (),
        _of_cache(lambda c: {(): c.traffic.lookup}),
    ),
    Family(
        "tessera_hit_tokens_total",
        "Of tessera_lookup_tokens_total: tokens that were not computed, by what they were found as.",
        ("kind",),
        _of_cache(
            lambda c: {("prefix",): c.traffic.prefix_hit, ("span",): c.traffic.span_hit},
        ),
    ),
    Family(
        "tessera_forked_tokens_total",
        "Prefix hits that were copied out of a partly equal page.",
        (),
        _of_cache(lambda c: {(): c.traffic.forked}),
    ),
    Family(
        "tessera_span_prefills_total",
        "Prefills that computed a span for those who wait for it.",
        (),
        _of_cache(lambda c: {(): c.traffic.span_prefills}),
    ),
    Family(
        "tessera_waiting_readers",
        "Queued requests that wait for a span.",
        (),
        _waiting,
        kind="gauge",
    ),
    Family(
        "tessera_broken_holds_total",
        "Held stretches of pages that waiting requests lost because memory was short.",
        (),
        _of_cache(lambda c: {(): c.index.counters.broken_holds}),
    ),
    Family(
        "tessera_dedup_collisions_total",
        "Two texts had the same page key, which by chance does not happen; nothing was shared.",
        (),
        _of_cache(lambda c: {(): c.index.counters.collisions}),
    ),
    Family(
        "tessera_latent_divergence_total",
        "Two requests computed the same page differently; the second was kept private.",
        (),
        _of_cache(lambda c: {(): c.index.counters.latent_divergence}),
    ),
    Family(
        "tessera_quarantined_total",
        "Pages that came back damaged from a lower tier and were put aside, never served.",
        (),
        _of_cache(lambda c: {(): c.quarantined_pages}),
    ),
    Family(
        "tessera_evicted_pages_total",
        "Pages evicted, by the tier that they left.",
        ("tier",),
        _of_cache(_evicted),
    ),
    Family(
        "tessera_loaded_tokens_total",
        "Prefix hits that were copied from a lower tier to the device, by the tier they were in.",
        ("tier",),
        _of_cache(_loaded),
    ),
    Family(
        "tessera_host_pages",
        "Pages in the host tier, and how many it has room for.",
        ("state",),
        _of_cache(_host_pages),
        kind="gauge",
    ),
    Family(
        ignored.NAME,
        ignored.MEANING,
        ("reason",),
        _of_cache(lambda _: {(reason,): ignored.counts[reason] for reason in ignored.REASONS}),
    ),
)
