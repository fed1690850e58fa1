"""Names of pages outside the device: what they stand for, where they are kept, what they cost."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import time
from array import array
from dataclasses import replace

import numpy as np
import pytest
from index_helpers import chain, evict, find, mark, publish, store
from tier_helpers import PAGE, ROOT, chain_names, weak

from tessera_sglang.memory_pool import names as names_module
from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import (
    Chain,
    Namespace,
    VisibleSpan,
    framed,
    page_key,
    xxh3_128,
)
from tessera_sglang.memory_pool.names import NamedChain, blake2b_256, names_of, run_keys, run_names

SPAN = VisibleSpan(6, b"k" * 16, prompt_start=64, body_tokens=128, linked_pages=1)


class Digest:
    """Counts what is hashed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, data: bytes) -> bytes:
        self.calls += 1
        return blake2b_256(data)


# --- what a name stands for ----------------------------------------------------------------------


def test_a_key_is_a_digest_of_parent_tokens_and_mark() -> None:
    """Spelled out, since other processes and later versions read it."""
    tokens = list(range(8))
    first, second = chain_names(tokens, SPAN)
    span = b"k" * 16 + struct.pack("<QQQ", 64, 128, 1)
    expected_mark = struct.pack("<QQ", 2, len(span)) + span

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=32, person=b"tessera-page-1").digest()

    assert first.namespace == first.parent == ROOT
    assert first.tokens == array("q", tokens[:4]).tobytes()
    assert first.mark == b""
    assert first.key == digest(ROOT + first.tokens)
    assert (second.namespace, second.parent) == (ROOT, first.key)
    assert second.mark == expected_mark
    assert second.key == digest(first.key + array("q", tokens[4:]).tobytes() + expected_mark)


def test_the_frame_of_a_mark_is_that_of_the_index() -> None:
    what = ((2, b"body"), (3, b"other"))
    assert page_key(xxh3_128, b"above", b"page", what) == xxh3_128(b"abovepage" + framed(what))
    frames = {
        framed(m) for m in [(), what, what[:1], ((2, b"bod"), (3, b"yother")), ((3, b"body"),)]
    }
    assert len(frames) == 5


def test_a_change_of_a_token_changes_its_page_and_all_behind_it() -> None:
    tokens = list(range(16))
    plain = chain_names(tokens)
    for position in range(16):
        changed = [*tokens]
        changed[position] += 1
        differs = [a.key != b.key for a, b in zip(plain, chain_names(changed), strict=True)]
        assert differs == [number >= position // PAGE for number in range(4)]


@pytest.mark.parametrize(
    "namespace",
    [
        Namespace("other"),
        Namespace("model", extra_key="t1"),
        Namespace("model", cache_salt="t1"),
        Namespace("model", lora_id="t1"),
        Namespace("model", "ab", "c"),
        Namespace("model", "a", "bc"),
    ],
    ids=str,
)
def test_namespaces_share_no_name(namespace: Namespace) -> None:
    here, there = chain_names(range(8)), chain_names(range(8), root=namespace.root_key())
    assert not {name.key for name in here} & {name.key for name in there}


@pytest.mark.parametrize(
    "changed",
    [
        replace(SPAN, at=7),
        replace(SPAN, body_digest=b"K" * 16),
        replace(SPAN, prompt_start=65),
        replace(SPAN, body_tokens=192),
        replace(SPAN, linked_pages=0),
    ],
    ids=["at", "body_digest", "prompt_start", "body_tokens", "linked_pages"],
)
def test_every_field_of_a_visible_span_counts(changed: VisibleSpan) -> None:
    one, other = chain_names(range(12), SPAN), chain_names(range(12), changed)
    assert [a.key == b.key for a, b in zip(one, other, strict=True)] == [True, False, False]


def test_a_chain_can_be_named_from_any_page_on() -> None:
    visible = [mark(at) for at in (5, 17)]
    whole = chain_names(range(24), *visible)
    named = Chain(ROOT, range(24), PAGE, visible=visible)
    for first in range(6):
        parent = whole[first - 1].key if first else None
        for count in range(6 - first + 1):
            assert names_of(named, first, count, parent) == whole[first : first + count]
    with pytest.raises(AssertionError, match="first page"):
        names_of(named, 1, 1, None)
    with pytest.raises(AssertionError, match="no such pages"):
        names_of(named, 0, 7, None)


def test_every_process_gives_the_same_names() -> None:
    """Case 20: what one process wrote, another one finds, whatever its hash seed."""
    program = (
        "import json\n"
        "from index_helpers import mark\n"
        "from tier_helpers import chain_names\n"
        "print(json.dumps([name.key.hex() for name in chain_names(range(64), mark(9))]))"
    )
    found = []
    for seed in ("1", "2"):
        path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found.append(json.loads(result.stdout))
    assert found[0] == found[1] == [name.key.hex() for name in chain_names(range(64), mark(9))]
    assert len(set(found[0])) == 16


# --- runs of the index ---------------------------------------------------------------------------


def test_the_names_of_runs_are_those_of_their_chains() -> None:
    index = ContentIndex(PAGE)
    visible = [mark(at) for at in (6, 13)]
    path = store(index, range(24), range(1, 7), *visible)
    run = path.segments[0].run
    assert run.start > 0, "marks cut runs"
    expected = chain_names(range(24), *visible)
    found = []
    for run, page_ids in path.segments[0].parts():
        assert len(page_ids) == run.page_count
        found += run_names(run, PAGE)
        assert run_names(run, PAGE, run.end, run.end) == []
    assert found == expected
    assert run_names(run, PAGE, 4, 5) == expected[4:5]


def test_names_of_runs_survive_random_cuts_trims_and_growth() -> None:
    rng = random.Random(7)
    digest = Digest()
    index = ContentIndex(PAGE)
    free = list(range(400))
    texts = [[rng.randrange(2) for _ in range(40)] for _ in range(12)]
    for _ in range(300):
        text = rng.choice(texts)[: rng.randrange(1, 11) * PAGE]
        length = len(text) // PAGE
        action = rng.random()
        if action < 0.4:
            found = find(index, text)
            own = [int(page) for page in found.page_ids()]
            new = [free.pop() for _ in range(length - len(own))]
            publish(index, text, own + new)
        elif action < 0.7:
            find(index, text)
        else:
            free += evict(index, rng.randrange(4))
        run = rng.choice([*index.runs(), None])
        if run is not None and rng.random() < 0.5:
            run_keys(run, PAGE, digest)
        index.check_invariants()
    for run in index.runs():
        tokens: list[int] = []
        at = run
        while at is not None:
            tokens = at.tokens.tolist() + tokens
            at = at.parent
        assert run_names(run, PAGE, digest=digest) == chain_names(tokens)[run.start :]
    before = digest.calls
    assert before > 0
    for run in index.runs():
        run_names(run, PAGE, digest=digest)
    assert digest.calls == before, "a run's names are computed once"


def test_a_run_is_named_only_when_asked_and_only_once() -> None:
    index, digest = ContentIndex(PAGE), Digest()
    store(index, range(400), range(100))
    run = find(index, range(400)).segments[0].run
    assert run.names is None
    assert len(run_keys(run, PAGE, digest)) == 100 * 32
    assert digest.calls == 100
    find(index, range(200))  # cuts it
    store(index, range(480), [*range(100), *range(200, 220)])
    evict(index, 5)
    last = find(index, range(480)).segments[0].run
    run_names(last, PAGE, digest=digest)
    assert digest.calls == 115


def test_names_of_an_evicted_run_can_still_be_had() -> None:
    index = ContentIndex(PAGE)
    store(index, range(24), range(6))
    find(index, range(8))
    run = find(index, range(24)).segments[0].run
    evict(index, 6)
    assert not run.alive
    assert run_names(run, PAGE) == chain_names(range(24))[2:]


# --- chains of requests --------------------------------------------------------------------------


def test_a_named_chain_computes_each_name_once() -> None:
    digest = Digest()
    named = NamedChain(Chain(ROOT, range(80), PAGE), digest)
    expected = chain_names(range(80))
    for first, end in [(3, 5), (0, 2), (2, 2), (4, 9), (0, 20), (19, 20), (7, 3)]:
        assert named.names(first, end) == expected[first:end]
        assert digest.calls <= 20
    assert digest.calls == 20


def test_a_named_chain_goes_on_from_the_names_of_a_run() -> None:
    digest = Digest()
    index = ContentIndex(PAGE)
    store(index, range(40), range(10))
    expected = chain_names(range(80))
    run = find(index, range(40)).segments[0].run
    run_keys(run, PAGE, digest)
    named = NamedChain(chain(index, range(80)), digest)
    assert named.names(12, 15, run) == expected[12:15]
    assert digest.calls == 15, "nothing of what the run knows is hashed again"
    shorter = find(index, range(16)).segments[0].run
    assert named.names(6, 15, shorter) == expected[6:15]
    assert digest.calls == 21, "the run begins earlier: what lies between is named"
    assert named.names(0, 20) == expected
    assert digest.calls == 30


def test_keys_can_be_made_to_collide() -> None:
    keys = {name.key for name in chain_names(range(4000), digest=weak)}
    assert len(keys) <= 256


def test_a_name_costs_microseconds() -> None:
    """A bound against accidents; the figures are in the module's docstring."""
    count, size = 512, 64
    named = Chain(ROOT, np.arange(count * size), size)
    spent = []
    for _ in range(5):
        started = time.perf_counter()
        assert len(names_module.names_of(named, 0, count, None)) == count
        spent.append(time.perf_counter() - started)
    assert min(spent) / count < 50e-6
