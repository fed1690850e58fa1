"""Counters on ``/metrics``, for servers with ``--enable-metrics``.

What is counted lives where it happens, as plain numbers; here they are copied into Prometheus about
once a second, so that no forward pass pays for it. One table says which. ``prometheus_client`` is
imported when the first copy is made: it looks for SGLang's directory of metric files then, which is
not set yet while plugins load.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessera_sglang.attention.dispatches import Dispatches

from .cache import TesseraCache
from .kernels import router_of

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0

Values = Mapping[Any, int]  # by a tuple of label values


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a scheduler's numbers are; None where it has no such part."""

    dispatches: Dispatches | None
    cache: TesseraCache | None


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


def _pages(cache: TesseraCache) -> Values:
    tier = cache.paged_tier()
    states = ("available", "evictable", "protected", "in_use")
    return {(state,): getattr(tier, state) for state in states}


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
        "Prompt tokens of scheduled requests.",
        (),
        _of_cache(lambda c: {(): c.traffic.lookup}),
    ),
    Family(
        "tessera_hit_tokens_total",
        "Prompt tokens that were not computed, by what they were found as.",
        ("kind",),
        _of_cache(
            lambda c: {("prefix",): c.traffic.prefix_hit, ("span",): c.traffic.span_hit},
        ),
    ),
    Family(
        "tessera_dedup_collisions_total",
        "Two texts had the same page key; by chance that does not happen.",
        (),
        _of_cache(lambda c: {(): c.index.counters.collisions}),
    ),
    Family(
        "tessera_latent_divergence_total",
        "Two requests computed the same page differently.",
        (),
        _of_cache(lambda c: {(): c.index.counters.latent_divergence}),
    ),
    Family(
        "tessera_evicted_pages_total",
        "Pages evicted, by the tier that they left.",
        ("tier",),
        _of_cache(lambda c: {("device",): c.index.counters.evicted_pages}),
    ),
)


class Publisher:
    """Copies numbers into Prometheus. Made in the process that counts them."""

    def __init__(
        self,
        sources: Sources,
        common: Mapping[str, Any],
        *,
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
    ) -> None:
        """``common`` are the labels of SGLang's own metrics; ``counter`` and ``gauge`` make metrics."""
        self._sources = sources
        self._common = dict(common)
        self._make = {"counter": counter, "gauge": gauge}
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._published: dict[tuple[str, tuple[str, ...]], int] = {}
        self._next_s = 0.0

    def publish(self, *, now_s: float | None = None) -> None:
        """Add what was counted since the last time. With ``now_s`` at most once an interval."""
        if now_s is not None:
            if now_s < self._next_s:
                return
            self._next_s = now_s + INTERVAL_S
        for family in FAMILIES:
            for labels, value in family.read(self._sources).items():
                key = (family.name, labels)
                before = self._published.get(key)
                if value == before:
                    continue
                child = self._child(family, labels)
                if family.kind == "gauge":
                    child.set(value)
                else:
                    child.inc(value - (before or 0))  # 0 too: a series that can be watched
                self._published[key] = value

    def _child(self, family: Family, labels: tuple[str, ...]) -> Any:
        key = (family.name, labels)
        if key not in self._children:
            own = dict(zip(family.labels, labels, strict=True))
            values = {**self._common, **own}
            metric = self._metrics.get(family.name)
            if metric is None:
                make = self._make[family.kind]
                metric = make(family.name, family.meaning, labelnames=tuple(values))
                self._metrics[family.name] = metric
            self._children[key] = metric.labels(**values)
        return self._children[key]


# --- on a running server -------------------------------------------------------------------------


def after_pass(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``SchedulerMetricsReporter.log_batch_result_stats``: once a pass, throttled."""
    publisher = _publisher_of(reporter)
    if publisher is not None:
        _publish(reporter, publisher, time.monotonic())
    return result


def when_idle(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``SchedulerMetricsReporter._maybe_log_idle_metrics``: the last pass shows at once."""
    publisher = _publisher_of(reporter)
    if publisher is not None:
        _publish(reporter, publisher, None)
    return result


def _publish(reporter: Any, publisher: Publisher, now_s: float | None) -> None:
    try:
        publisher.publish(now_s=now_s)
    except Exception:  # whatever is wrong with the metrics, requests are served
        logger.exception("tessera's metrics stop here")
        reporter.tessera_publisher = None


def _publisher_of(reporter: Any) -> Publisher | None:
    """The reporter's publisher, made when first asked for; None where metrics are off."""
    if not hasattr(reporter, "tessera_publisher"):
        reporter.tessera_publisher = _make_publisher(reporter)
    publisher: Publisher | None = reporter.tessera_publisher
    return publisher


def _make_publisher(reporter: Any) -> Publisher | None:
    if not reporter.current_scheduler_metrics_enabled:
        return None
    scheduler, collector = reporter.scheduler, reporter.metrics_collector
    cache, router = scheduler.tree_cache, router_of(scheduler.tp_worker.model_runner)
    sources = Sources(
        router.dispatches if router is not None else None,
        cache if isinstance(cache, TesseraCache) else None,
    )
    if sources.dispatches is None and sources.cache is None:
        return None
    from prometheus_client import Counter, Gauge

    # SGLang lets deployments replace the classes.
    counter, gauge = collector._counter_cls or Counter, collector._gauge_cls or Gauge
    return Publisher(
        sources,
        collector.labels,
        counter=counter,
        gauge=functools.partial(gauge, multiprocess_mode="mostrecent"),
    )
