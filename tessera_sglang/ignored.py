"""Marks that could not become spans: counted and said, since a request is served without them.

A ``cache_control`` is a hint. Clients send it to servers of every kind, so what can not be a span here
is ordinary text and no error. Nobody would notice, were it not counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from .ratelimit import RateLimit

logger = logging.getLogger(__name__)

NAME = "tessera_ignored_marks_total"
MEANING = "Requests whose cache_control was served as ordinary text, by the reason."
REASONS = {
    "body": "the request can not be read a second time",
    "place": "what is marked is neither a text nor a tool",
    "encoder": "the model's prompts are not made by a chat template",
    "template": "the chat template treats a marked text differently",
    "tokenizer": "the tokenizer can not encode the prompt in pieces",
    "text": "the engine takes the prompt as text",
    "request": "the request has something that spans can not meet, images for instance",
    "refused": "the server serves no spans",
    "room": "a span does not fit",
    "kept": "a span could not be kept in the cache",
}

counts: Counter[str] = Counter()
_limits = {reason: RateLimit() for reason in REASONS}
_metric: Any = None


def count(manager: Any, reason: str, detail: str = "") -> None:
    """One request lost its marks. Logged once a minute for each reason.

    ``manager`` is the tokenizer manager in whose process it happened; None in a scheduler's, whose
    counts are published with its other ones.
    """
    counts[reason] += 1
    if _limits[reason].pass_at() is not None:
        logger.warning("cache_control is ordinary text: %s: %s", REASONS[reason], detail)
    if getattr(manager, "enable_metrics", False):
        _count_on_metrics(manager, reason)


def _count_on_metrics(manager: Any, reason: str) -> None:
    global _metric
    labels = dict(getattr(manager.metrics_collector, "labels", {}))
    if _metric is None:
        from prometheus_client import Counter as Metric  # late: see metrics.py

        _metric = Metric(NAME, MEANING, labelnames=(*labels, "reason"))
    _metric.labels(**labels, reason=reason).inc()
