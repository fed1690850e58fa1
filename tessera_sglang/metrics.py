"""Counters on ``/metrics``, for servers with ``--enable-metrics``.

What is counted lives where it happens, as plain numbers; here they are copied into Prometheus about
once a second, so that no forward pass pays for it. One table (:mod:`families`) says which.
``prometheus_client`` is imported when the first copy is made: it looks for SGLang's directory of metric
files then, which is not set yet while plugins load.

Every series that can ever move is there with 0 before a request is served. The one that may be missing
is ``tessera_kernel_fallback_total``: it has a series for each second choice that the router made, and
none where the best kernel runs everything. What the labels mean is in ``docs/observability``.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tessera_sglang.attention.kernels.base import Phase

from .cache import TesseraCache
from .families import FAMILIES, Family, Sources
from .incidents import Watch
from .kernels import router_of
from .reader import reader_of

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


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
        self._at_rest = False  # nothing ran since an idle server published

    def after_pass(self, now_s: float) -> None:
        """Publish, at most once an interval."""
        self._at_rest = False
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            self.publish()

    def when_idle(self, now_s: float) -> None:
        """Publish what the last pass left at once, then once an interval: an idle server spins."""
        if not self._at_rest:
            self._next_s = now_s
        self.after_pass(now_s)
        self._at_rest = True

    def publish(self) -> None:
        """Add what was counted since the last time."""
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


class Reporting:
    """What a scheduler's reporter does for Tessera: warnings, and metrics where they are on."""

    def __init__(self, reporter: Any) -> None:
        cache = reporter.scheduler.tree_cache
        self.watch = Watch(cache) if isinstance(cache, TesseraCache) else None
        self.publisher = _make_publisher(reporter)

    def report(self, now_s: float, *, idle: bool) -> None:
        """After a pass, or between passes of an idle server."""
        if self.watch is not None:
            self.watch.look(now_s)
        if self.publisher is None:
            return
        try:
            publish = self.publisher.when_idle if idle else self.publisher.after_pass
            publish(now_s)
        except Exception:  # whatever is wrong with the metrics, requests are served
            logger.exception("tessera's metrics stop here")
            self.publisher = None


def after_pass(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``SchedulerMetricsReporter.log_batch_result_stats``: once a pass, throttled."""
    _reporting(reporter).report(time.monotonic(), idle=False)
    return result


def when_idle(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``SchedulerMetricsReporter._maybe_log_idle_metrics``: the last pass shows at once."""
    _reporting(reporter).report(time.monotonic(), idle=True)
    return result


def _reporting(reporter: Any) -> Reporting:
    found: Reporting | None = getattr(reporter, "tessera_reporting", None)
    if found is None:
        found = reporter.tessera_reporting = Reporting(reporter)
    return found


def _make_publisher(reporter: Any) -> Publisher | None:
    """None where metrics are off, or nothing is ours."""
    if not reporter.current_scheduler_metrics_enabled:
        return None
    sources = _sources(reporter.scheduler)
    if sources.dispatches is None and sources.cache is None:
        return None
    from prometheus_client import Counter, Gauge

    # SGLang lets deployments replace the classes.
    collector = reporter.metrics_collector
    counter, gauge = collector._counter_cls or Counter, collector._gauge_cls or Gauge
    return Publisher(
        sources,
        collector.labels,
        counter=counter,
        gauge=functools.partial(gauge, multiprocess_mode="mostrecent"),
    )


def _sources(scheduler: Any) -> Sources:
    runner, cache = scheduler.tp_worker.model_runner, scheduler.tree_cache
    router = router_of(runner)
    stock = getattr(getattr(runner, "attn_backend", None), "stock", None)
    if router is not None and stock is not None:  # what runs plain batches shows with 0, too
        router.count_named(f"sglang:{stock.prefill}", Phase.PREFILL, 0)
        router.count_named(f"sglang:{stock.decode}", Phase.DECODE, 0)
    ours = isinstance(cache, TesseraCache)
    return Sources(
        router.dispatches if router is not None else None,
        cache if ours else None,
        (lambda: waiting_readers(scheduler.waiting_queue)) if ours else None,
    )


def waiting_readers(queue: Iterable[Any]) -> int:
    """Requests of a queue that lack a span."""
    readers = (reader_of(req) for req in queue)
    return sum(reader is not None and reader.path is None for reader in readers)
