"""What is copied into Prometheus: every number once, and only what grew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

metrics = pytest.importorskip("tessera_sglang.metrics", exc_type=ImportError)
prometheus_client = pytest.importorskip("prometheus_client")

from tessera_sglang.attention.dispatches import Dispatches  # noqa: E402 # after the skips
from tessera_sglang.attention.kernels.base import AttentionShape, Phase, RowFormat  # noqa: E402
from tessera_sglang.attention.preferences import Situation  # noqa: E402
from tessera_sglang.attention.router import Router  # noqa: E402
from tessera_sglang.attention.shelf import Offer  # noqa: E402
from tessera_sglang.kernels import offers  # noqa: E402

COMMON = {"model_name": "m", "tp_rank": 0}
SECURITY = (
    "tessera_dedup_collisions_total",
    "tessera_latent_divergence_total",
    "tessera_quarantined_total",
)


class Page:
    """A publisher over a registry of its own, read as `/metrics` would be."""

    def __init__(
        self, dispatches: Dispatches | None = None, cache: Any = None, waiting: Any = None
    ) -> None:
        self.registry = prometheus_client.CollectorRegistry()

        def made(kind: Any) -> Any:
            return lambda *args, **kwargs: kind(*args, registry=self.registry, **kwargs)

        self.publisher = metrics.Publisher(
            metrics.Sources(dispatches, cache, waiting),
            COMMON,
            counter=made(prometheus_client.Counter),
            gauge=made(prometheus_client.Gauge),
        )

    def value(self, name: str, **labels: str) -> float | None:
        found: float | None = self.registry.get_sample_value(
            name, {**{key: str(value) for key, value in COMMON.items()}, **labels}
        )
        return found


@pytest.fixture
def cache() -> Any:
    tier = SimpleNamespace(available=7, evictable=2, protected=1, in_use=0)
    counters = SimpleNamespace(collisions=0, latent_divergence=0, evicted_pages=0, broken_holds=0)
    return SimpleNamespace(
        paged_tier=lambda: tier,
        tier=tier,
        traffic=SimpleNamespace(lookup=0, prefix_hit=0, span_hit=0, forked=0, span_prefills=0),
        quarantined_pages=0,
        below=None,
        index=SimpleNamespace(counters=counters),
    )


def test_what_could_happen_shows_with_zero_and_then_grows() -> None:
    dispatches = Dispatches()
    dispatches.add("torch", "decode", 0)
    page = Page(dispatches)
    page.publisher.publish()
    labels = {"kernel": "torch", "phase": "decode"}
    assert page.value("tessera_kernel_dispatch_total", **labels) == 0
    for total in (3, 3, 8):
        dispatches.launches["torch", "decode"] = total
        page.publisher.publish()
        assert page.value("tessera_kernel_dispatch_total", **labels) == total


def test_a_fallback_is_a_series_of_its_own() -> None:
    dispatches = Dispatches()
    page = Page(dispatches)
    dispatches.add("triton", "decode", 4, ("flashmla", "triton", "unavailable"))
    page.publisher.publish()
    labels = {"wanted": "flashmla", "got": "triton", "reason": "unavailable"}
    assert page.value("tessera_kernel_fallback_total", **labels) == 1


def test_the_cache_is_counted(cache: Any) -> None:
    page = Page(cache=cache)
    page.publisher.publish()
    cache.traffic.lookup, cache.traffic.prefix_hit, cache.traffic.span_hit = 100, 30, 50
    cache.index.counters.evicted_pages = 4
    cache.traffic.forked, cache.traffic.span_prefills = 9, 3
    cache.index.counters.broken_holds = 2
    cache.tier.available, cache.tier.evictable = 5, 4
    page.publisher.publish()
    assert page.value("tessera_lookup_tokens_total") == 100
    assert page.value("tessera_hit_tokens_total", kind="prefix") == 30
    assert page.value("tessera_hit_tokens_total", kind="span") == 50
    assert page.value("tessera_evicted_pages_total", tier="device") == 4
    assert page.value("tessera_forked_tokens_total") == 9
    assert page.value("tessera_span_prefills_total") == 3
    assert page.value("tessera_broken_holds_total") == 2
    states = ("available", "evictable", "protected", "in_use")
    assert [page.value("tessera_pages", state=state) for state in states] == [5, 4, 1, 0]


def test_every_series_of_a_cache_is_there_before_anything_happened(cache: Any) -> None:
    page = Page(cache=cache, waiting=lambda: 0)
    page.publisher.publish()
    shown = {sample.name for metric in page.registry.collect() for sample in metric.samples}
    of_cache = {f.name for f in metrics.FAMILIES if not f.name.startswith("tessera_kernel_")}
    assert of_cache == {name for name in shown if not name.endswith("_created")}
    for name in SECURITY:
        assert page.value(name) == 0
    for kind in ("prefix", "span"):
        assert page.value("tessera_hit_tokens_total", kind=kind) == 0
    assert page.value("tessera_evicted_pages_total", tier="device") == 0


def test_what_must_not_happen_is_a_series_of_its_own(cache: Any) -> None:
    page = Page(cache=cache)
    cache.index.counters.collisions = 3
    cache.index.counters.latent_divergence = 4
    cache.quarantined_pages = 5
    page.publisher.publish()
    assert [page.value(name) for name in SECURITY] == [3, 4, 5]


def test_readers_that_wait_go_up_and_down(cache: Any) -> None:
    ready = SimpleNamespace(tessera_reader=SimpleNamespace(path=object()))
    lacking = SimpleNamespace(tessera_reader=SimpleNamespace(path=None))
    plain = SimpleNamespace()
    queue = [ready, lacking, plain, lacking]
    page = Page(cache=cache, waiting=lambda: metrics.waiting_readers(queue))
    page.publisher.publish()
    assert page.value("tessera_waiting_readers") == 2
    del queue[1:]
    page.publisher.publish()
    assert page.value("tessera_waiting_readers") == 0


def test_it_is_copied_once_an_interval() -> None:
    dispatches = Dispatches()
    dispatches.add("torch", "decode", 1)
    page = Page(dispatches)
    seen = []
    for now_s in (10.0, 10.5, 10.99, 11.0):
        dispatches.add("torch", "decode", 1)
        page.publisher.after_pass(now_s)
        seen.append(page.value("tessera_kernel_dispatch_total", kernel="torch", phase="decode"))
    assert seen == [2, 2, 2, 5]


def test_an_idle_server_copies_its_last_pass_at_once_and_then_once_an_interval() -> None:
    dispatches = Dispatches({("torch", "decode"): 0})
    page = Page(dispatches)
    seen = []
    for now_s in (10.0, 10.1, 10.2, 11.0):
        dispatches.add("torch", "decode", 1)
        page.publisher.when_idle(now_s)
        seen.append(page.value("tessera_kernel_dispatch_total", kernel="torch", phase="decode"))
    assert seen == [1, 1, 1, 4]
    page.publisher.after_pass(11.1)
    dispatches.add("torch", "decode", 1)
    page.publisher.when_idle(11.2)
    assert page.value("tessera_kernel_dispatch_total", kernel="torch", phase="decode") == 5


def test_a_second_choice_of_the_router_shows_with_zero_and_counts_its_passes(
    mla_situation: Situation,
) -> None:
    def broken() -> Any:
        raise ImportError("no such library")

    names = [offer.name for offer in offers()]
    shelf = [Offer(name, broken) for name in names if name != "torch"] + offers()[-1:]
    router = Router("auto", mla_situation, shelf)
    page = Page(router.dispatches)
    page.publisher.publish()
    labels = {"wanted": "flashmla", "got": "torch", "reason": "unavailable"}
    assert page.value("tessera_kernel_fallback_total", **labels) == 0
    router.count(Phase.DECODE)
    page.publisher.publish()
    assert page.value("tessera_kernel_fallback_total", **labels) == 1


@pytest.fixture
def mla_situation() -> Situation:
    """An MLA model on a Hopper GPU."""
    shape = AttentionShape(
        query_heads=16,
        kv_heads=1,
        key_width=576,
        value_width=512,
        latent=True,
        page_tokens=64,
        dtype=torch.bfloat16,
        rows=RowFormat.PLAIN,
        logit_cap=0.0,
    )
    return Situation(shape, "cuda", (9, 0))


def test_every_metric_of_the_table_has_a_name_of_its_own() -> None:
    names = [family.name for family in metrics.FAMILIES]
    assert len(set(names)) == len(names)
    for family in metrics.FAMILIES:
        assert family.name.startswith("tessera_")
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not family.read(metrics.Sources(None, None))


def test_the_client_library_is_not_imported_before_sglang_says_where_metrics_lie() -> None:
    """It decides then whether several processes share them."""
    program = (
        "import sys; from sglang.srt.plugins import load_plugins; load_plugins();"
        "assert 'tessera_sglang.metrics' in sys.modules;"
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# --- on a scheduler ------------------------------------------------------------------------------


def reporter(*, enabled: bool = True, router: Any = None) -> Any:
    runner = SimpleNamespace(**({"tessera_router": router} if router else {}))
    return SimpleNamespace(
        current_scheduler_metrics_enabled=enabled,
        scheduler=SimpleNamespace(
            tree_cache=object(), tp_worker=SimpleNamespace(model_runner=runner)
        ),
        metrics_collector=SimpleNamespace(labels=COMMON, _counter_cls=Counted, _gauge_cls=Counted),
    )


class Counted:
    """A metric that keeps what it is told."""

    made: list[Counted] = []  # noqa: RUF012 # emptied by the fixture

    def __init__(self, name: str, meaning: str, labelnames: Any, **kwargs: Any) -> None:
        self.name, self.total = name, 0
        Counted.made.append(self)

    def labels(self, **values: Any) -> Counted:
        return self

    def inc(self, amount: int) -> None:
        self.total += amount


@pytest.fixture(autouse=True)
def none_made() -> Iterator[None]:
    Counted.made.clear()
    yield
    Counted.made.clear()


def test_nothing_is_made_where_metrics_are_off_or_nothing_is_ours() -> None:
    router = SimpleNamespace(dispatches=Dispatches({("torch", "decode"): 1}))
    for found in (reporter(enabled=False, router=router), reporter()):
        assert metrics.when_idle("result", found) == "result"
        assert metrics.after_pass("result", found, object(), object()) == "result"
    assert not Counted.made


def test_an_idle_server_shows_its_last_pass_at_once() -> None:
    router = SimpleNamespace(dispatches=Dispatches({("torch", "decode"): 1}))
    found = reporter(router=router)
    metrics.after_pass(None, found)
    router.dispatches.add("torch", "decode", 1)
    metrics.after_pass(None, found)
    (metric,) = Counted.made
    assert metric.total == 1, "an interval has not passed"
    metrics.when_idle(None, found)
    assert metric.total == 2


def test_broken_metrics_stop_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    router = SimpleNamespace(dispatches=Dispatches({("torch", "decode"): "many"}))  # type: ignore[dict-item]
    found = reporter(router=router)
    for _ in range(2):
        assert metrics.when_idle("result", found) == "result"
    assert len(caplog.records) == 1
