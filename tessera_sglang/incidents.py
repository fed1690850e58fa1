"""What an operator should hear of even without metrics: warnings in the log, at most one a minute each.

The counters live where things happen and are compared once a pass, so nothing on a hot path logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from .cache import TesseraCache
from .ratelimit import RateLimit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Incident:
    """A counter that should stand still, and what it means when it does not."""

    name: str
    read: Callable[[TesseraCache], int]
    meaning: str


INCIDENTS = (
    Incident(
        "collisions",
        lambda cache: cache.index.counters.collisions,
        "two texts had the same page key, which by chance does not happen; the pages were not shared",
    ),
    Incident(
        "latent divergence",
        lambda cache: cache.index.counters.latent_divergence,
        "two requests computed the same page differently; the second one was kept private",
    ),
    Incident(
        "quarantined",
        lambda cache: cache.quarantined_pages,
        "pages came back damaged from a lower tier and were put aside; they are computed again",
    ),
    Incident(
        "broken holds",
        lambda cache: cache.index.counters.broken_holds,
        "memory was short and a waiting request lost a span; the pool is small for this load",
    ),
)


class Watch:
    """Looks at the counters of one cache."""

    def __init__(self, cache: TesseraCache) -> None:
        self._cache = cache
        self._said = [incident.read(cache) for incident in INCIDENTS]
        self._limits = [RateLimit() for _ in INCIDENTS]

    def look(self, now_s: float) -> None:
        """Log what grew. ``now_s`` is on a monotonic clock."""
        for number, incident in enumerate(INCIDENTS):
            total = incident.read(self._cache)
            said = self._said[number]
            if total == said or self._limits[number].pass_at(now_s) is None:
                continue
            self._said[number] = total
            logger.warning(
                "%s: %d more, %d in all: %s", incident.name, total - said, total, incident.meaning
            )
