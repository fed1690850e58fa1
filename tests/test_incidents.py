"""Warnings of what should not happen: said once, summed up after that, never on a hot path."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from engine import Engine

from tessera_sglang import incidents
from tessera_sglang.cache import TesseraCache
from tessera_sglang.ratelimit import RateLimit


@pytest.fixture
def cache() -> TesseraCache:
    return Engine().cache


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, logger=incidents.__name__):
        yield


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_a_limit_lets_one_pass_an_interval_and_says_what_it_held() -> None:
    limit = RateLimit(60)
    times = (0, 1, 59, 60, 61, 120)
    assert [limit.pass_at(now_s) for now_s in times] == [0, None, None, 2, None, 1]


def test_a_limit_asks_the_clock_itself() -> None:
    limit = RateLimit(3600)
    assert [limit.pass_at(), limit.pass_at()] == [0, None]


def test_nothing_is_said_while_nothing_happens(
    cache: TesseraCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.index.counters.collisions = 3  # before anybody looked
    watch = incidents.Watch(cache)
    for now_s in (0, 100, 200):
        watch.look(now_s)
    assert not said(caplog)


def test_a_collision_is_said_and_later_ones_are_summed_up(
    cache: TesseraCache, caplog: pytest.LogCaptureFixture
) -> None:
    watch, counters = incidents.Watch(cache), cache.index.counters
    counters.collisions = 1
    watch.look(0)
    (line,) = said(caplog)
    assert line.startswith("collisions: 1 more, 1 in all: ")
    for now_s in range(1, 60):
        counters.collisions += 2
        watch.look(now_s)
    assert not said(caplog)
    watch.look(60)
    (line,) = said(caplog)
    assert line.startswith("collisions: 118 more, 119 in all: ")
    watch.look(200)
    assert not said(caplog)


def test_every_incident_has_a_line_and_a_limit_of_its_own(
    cache: TesseraCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, counters = incidents.Watch(cache), cache.index.counters
    counters.collisions = 1
    watch.look(0)
    counters.latent_divergence = counters.broken_holds = 1
    with monkeypatch.context() as patched:
        patched.setattr(TesseraCache, "quarantined_pages", 1)
        watch.look(1)
    assert [line.split(":")[0] for line in said(caplog)] == [
        "collisions",
        "latent divergence",
        "quarantined",
        "broken holds",
    ]
