"""`/metrics` of a real server: each series moves with what it counts, and agrees with the answers."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from load import settle
from prometheus_client.parser import text_string_to_metric_families
from prompts import PAGE, around
from server import Answer, RequestError, Server

from tessera_sglang.families import FAMILIES

MODEL = Path(__file__).parents[2] / "examples" / "tiny-mla"
WEAK = {"PYTHONPATH": str(Path(__file__).parents[1] / "weak_hash")}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"}
POOL = 4096
CHUNK = 256
CONFIG = {"verify": "latents", "link_pages": 1}
FALLBACK = "tessera_kernel_fallback_total"
Key = tuple[str, frozenset[tuple[str, str]]]


class Scrape:
    """One look at `/metrics`; values are summed over the labels that a caller does not name."""

    def __init__(self, server: Server) -> None:
        text = requests.get(f"{server.url}/metrics", timeout=60).text
        self.values: dict[Key, float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        found = [v for (n, has), v in self.values.items() if n == name and wanted <= has]
        return sum(found)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}

    def labels(self, name: str) -> set[str]:
        return {key for n, has in self.values if n == name for key, _ in has}

    @property
    def hits(self) -> float:
        return self("tessera_hit_tokens_total")

    @property
    def lookups(self) -> float:
        return self("tessera_lookup_tokens_total")


def settled(server: Server) -> Scrape:
    """`/metrics` once it shows what the idle server counted."""
    deadline = time.monotonic() + 10
    while True:
        traffic: Any = settle(server)["traffic"]
        scrape = Scrape(server)
        hits = traffic["prefix_hit"] + traffic["span_hit"]
        if (scrape.lookups, scrape.hits) == (traffic["lookup"], hits):
            return scrape
        assert time.monotonic() < deadline, (scrape.lookups, scrape.hits, traffic)
        time.sleep(0.1)


class Grown:
    """By how much counters grew from one scrape to another."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        return self._after(name, **labels) - self._before(name, **labels)

    @property
    def hits(self) -> float:
        return self._after.hits - self._before.hits

    @property
    def lookups(self) -> float:
        return self._after.lookups - self._before.lookups


def during(server: Server, load: Callable[[], Any]) -> tuple[Any, Grown]:
    """What a load returns, and what it added."""
    before = settled(server)
    result = load()
    return result, Grown(before, settled(server))


def agree(grown: Grown, answers: list[Answer]) -> None:
    """Counters, answers and SGLang's own series say the same of some requests."""
    assert grown.lookups == sum(answer.prompt for answer in answers)
    assert grown.hits == sum(answer.cached for answer in answers)
    assert grown.hits <= grown.lookups
    assert grown("sglang:prompt_tokens_total") == grown.lookups
    assert grown("sglang:cached_tokens_total") == grown.hits
    assert grown("sglang:num_requests_total") == len(answers)
    assert grown("sglang:time_to_first_token_seconds_count") == len(answers)
    assert grown("sglang:queue_time_seconds_count") == len(answers)


class Typist:
    """Seeded printable text, in the ids of the byte tokenizer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, tokens: int) -> list[int]:
        return [self.random.randrange(32, 127) for _ in range(tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since logs are written beside it."""
    return shutil.copytree(MODEL, tmp_path_factory.mktemp("model") / "tiny-mla")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(
        model,
        *("--chunked-prefill-size", str(CHUNK)),
        config=CONFIG,
        pool_tokens=POOL,
        tokenizer=True,
    ) as started:
        yield started


def test_every_series_is_there_from_the_first_scrape(server: Server) -> None:
    scrape = Scrape(server)
    for family in FAMILIES:
        if family.name == FALLBACK:
            continue
        assert family.name in scrape.names, family.name
        sglang = scrape.labels("sglang:num_queue_reqs")
        assert scrape.labels(family.name) == sglang | set(family.labels), family.name
    assert FALLBACK not in scrape.names, "on a CPU there is no better kernel than PyTorch"
    for name in ("dedup_collisions", "latent_divergence", "quarantined", "span_prefills"):
        assert scrape(f"tessera_{name}_total") == 0
    for kind in ("prefix", "span"):
        assert scrape("tessera_hit_tokens_total", kind=kind) == 0
    assert scrape("tessera_pages") == POOL // PAGE


def test_the_start_is_one_line(server: Server) -> None:
    (line,) = [line for line in server.log().splitlines() if "tessera serves with" in line]
    spans = server.state()["spans"]
    assert spans == {"refused": None, "link_pages": 1, "root_tokens": PAGE, "policy": "declared"}
    for pair in (
        'index="content"',
        f"page_tokens={PAGE}",
        f"pool_tokens={POOL}",
        "link_pages=1",
        f"root_tokens={PAGE}",
        'span_policy="declared"',
        'verify="latents"',
        "spans_refused=null",
        'kernel_prefill="torch"',
        'kernel_decode="torch"',
    ):
        assert f" {pair}" in line, pair


def test_prefixes_and_forks(server: Server) -> None:
    typist = Typist(1)
    prompt = typist.text(9 * PAGE)  # three chunks

    def load() -> list[Answer]:
        return [
            server.generate(prompt, steps=0),
            server.generate(prompt, steps=4),
            server.generate(prompt[: 4 * PAGE + 30] + typist.text(50), steps=4),
            server.generate(typist.text(20), steps=4),
        ]

    answers, grown = during(server, load)
    agree(grown, answers)
    assert grown("tessera_hit_tokens_total", kind="prefix") == grown.hits
    assert [answer.cached for answer in answers] == [0, 9 * PAGE - 1, 4 * PAGE + 30, 0]
    assert grown("tessera_forked_tokens_total") == PAGE - 1 + 30
    assert grown("tessera_span_prefills_total") == 0


def test_several_samples_count_as_what_sglang_sends(server: Server) -> None:
    """It first sends the prompt by itself with max_new_tokens 0, and answers nobody with that."""
    prompt = Typist(2).text(5 * PAGE)
    params = {"n": 3, "max_new_tokens": 4, "temperature": 0, "ignore_eos": True}

    def load() -> Any:
        return server.post("/generate", {"input_ids": prompt, "sampling_params": params}).json()

    answers, grown = during(server, load)
    metas = [answer["meta_info"] for answer in answers]
    assert len(metas) == 3
    assert grown.lookups == 4 * len(prompt) == grown("sglang:prompt_tokens_total")
    assert grown.hits == sum(meta["cached_tokens"] for meta in metas)
    assert grown.hits == grown("sglang:cached_tokens_total") >= 3 * 4 * PAGE


def test_spans_that_many_read_at_once(server: Server) -> None:
    typist = Typist(3)
    document = typist.text(14 * PAGE)
    items = [around(typist.text(20 + i), document, typist.text(15)) for i in range(6)]

    def load() -> list[Answer]:
        return [*server.generate_all(items, steps=4), server.generate(*items[0], steps=4)]

    answers, grown = during(server, load)
    agree(grown, answers)
    shared = 13 * PAGE
    assert grown("tessera_span_prefills_total") == 1, "five wait for the prefill of the first"
    assert grown("tessera_hit_tokens_total", kind="span") == 6 * shared
    # SGLang's own tree statistics: the hidden prefill found nothing, and neither did its reader
    tokens = "sglang:prefill_effective_tokens_total"
    assert grown(tokens, mode="device_hit") == grown.hits
    computed = grown.lookups - grown.hits
    linked_and_root = 2 * PAGE
    assert grown(tokens, mode="input") == computed + linked_and_root
    assert grown("sglang:realtime_tokens_total", mode="prefill_cache") == grown.hits


def test_readers_that_do_not_fit_together_wait(server: Server) -> None:
    typist = Typist(8)
    pages = POOL // PAGE * 9 // 16
    items = [around(typist.text(20), typist.text(pages * PAGE), typist.text(9)) for _ in range(3)]
    seen: list[float] = []

    def load() -> list[Answer]:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.generate_all, items, steps=300)
            while not asked.done():
                seen.append(Scrape(server)("tessera_waiting_readers"))
                time.sleep(0.1)
            return asked.result()

    answers, grown = during(server, load)
    agree(grown, answers)
    assert 1 <= max(seen) <= len(items), seen
    assert settled(server)("tessera_waiting_readers") == 0
    assert grown("tessera_span_prefills_total") >= 3


def test_what_ran(server: Server) -> None:
    name = "tessera_kernel_dispatch_total"
    steps = 8
    _, grown = during(server, lambda: server.generate(Typist(4).text(CHUNK + 10), steps=steps))
    assert grown(name, kernel="torch", phase="prefill") == 2, "two chunks"
    assert steps - 1 <= grown(name, kernel="torch", phase="decode") <= steps
    assert grown(name, phase="verify") == 0
    assert grown(name, kernel="torch") == grown(name)


def test_a_full_pool_evicts(server: Server) -> None:
    typist = Typist(5)
    prompts = [typist.text(1000) for _ in range(8)]  # twice the pool
    answers, grown = during(server, lambda: [server.generate(p, steps=2) for p in prompts])
    agree(grown, answers)
    evicted = grown("tessera_evicted_pages_total", tier="device")
    assert evicted > 0
    assert grown("sglang:evicted_tokens_total") == evicted * PAGE
    scrape = settled(server)
    assert scrape("tessera_pages") == POOL // PAGE, "each page once"
    assert scrape("tessera_pages", state="evictable") > POOL // PAGE // 2
    assert scrape("tessera_pages", state="in_use") == 0


def test_pages_that_two_requests_computed_differently(server: Server) -> None:
    """A decode step and a prefill round otherwise: both compute the pages of one answer."""
    server.flush()
    prompt = Typist(6).text(CHUNK)
    told = server.generate(prompt, steps=400)
    server.flush()

    def load() -> list[Answer]:
        answers: list[Answer] = []
        teller = threading.Thread(target=lambda: answers.append(server.generate(prompt, steps=400)))
        teller.start()
        while not server.state()["paged_tier"]["protected"]:  # it has its prompt, and tells
            time.sleep(0.05)
        answers.append(server.generate(prompt + told.tokens[: 4 * PAGE], steps=1))
        teller.join()
        return answers

    answers, grown = during(server, load)
    agree(grown, answers)
    assert max(answers, key=lambda answer: len(answer.tokens)).tokens == told.tokens
    assert grown("tessera_latent_divergence_total") >= 1
    assert grown("tessera_dedup_collisions_total") == 0
    assert "latent divergence: " in server.log()


def test_collisions_and_retractions(model: Path) -> None:
    """Keys of eight bits collide all the time; a test mode of SGLang retracts all the time."""
    typist = Typist(7)
    documents = [typist.text(5 * PAGE + 7) for _ in range(3)]
    items = [
        around(typist.text(40 + i), documents[i % 3], typist.text(30))
        if i % 2
        else (typist.text(300), None)
        for i in range(24)
    ]
    with Server(
        model,
        *("--chunked-prefill-size", "128"),
        config={"link_pages": 1},
        pool_tokens=16384,
        tokenizer=True,
        environment={**WEAK, **RETRACT},
    ) as weak:

        def ask(item: Any) -> Answer | None:
            try:
                return weak.generate(*item, steps=24)
            except RequestError as error:  # a span whose name is taken can not be kept
                if "pages collide" not in error.body:
                    raise
                return None

        def load() -> list[Answer]:
            with ThreadPoolExecutor(8) as pool:
                asked = [*pool.map(ask, items), *map(ask, items)]
            return [answer for answer in asked if answer is not None]

        answers, grown = during(weak, load)
        assert len(answers) > len(items)
        assert grown.lookups == sum(answer.prompt for answer in answers)
        assert grown.hits == sum(answer.cached for answer in answers) <= grown.lookups
        assert grown.hits > 0
        assert grown("tessera_dedup_collisions_total") > 0
        assert grown("sglang:num_retracted_requests_total") > 0
        assert "collisions: " in weak.log()
