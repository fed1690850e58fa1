"""Marks that could not become spans: counted and said, since a request is served without them.

A ``cache_control`` is a hint. Clients send it to servers of every kind, so what can not be a span here
is ordinary text and no error. Nobody would notice, were it not counted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)

NAME = "tessera_ignored_marks_total"
MEANING = "Requests whose cache_control was served as ordinary text, by the reason."
SAY_AGAIN_S = 60.0

counts: Counter[str] = Counter()
_said: dict[str, float] = {}
_metric: Any = None


def count(manager: Any, reason: str, detail: str = "") -> None:
    """One request of a tokenizer manager lost its marks. Logged once a minute for each reason."""
    counts[reason] += 1
    now = time.monotonic()
    if now - _said.get(reason, -SAY_AGAIN_S) >= SAY_AGAIN_S:
        _said[reason] = now
        logger.warning("cache_control is served as ordinary text (%s) %s", reason, detail)
    if getattr(manager, "enable_metrics", False):
        _count_on_metrics(manager, reason)


def _count_on_metrics(manager: Any, reason: str) -> None:
    global _metric
    labels = dict(getattr(manager.metrics_collector, "labels", {}))
    if _metric is None:
        from prometheus_client import Counter as Metric  # late: see metrics.py

        _metric = Metric(NAME, MEANING, labelnames=(*labels, "reason"))
    _metric.labels(**labels, reason=reason).inc()
