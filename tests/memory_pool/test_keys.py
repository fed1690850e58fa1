"""Names of pages: what differs in a name, what does not, and what a name costs (case 22)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest

from tessera_sglang.memory_pool.keys import (
    NO_MARK,
    TOKEN_BYTES,
    Chain,
    Namespace,
    PageKey,
    VisibleSpan,
    xxh3_128,
)

PAGE = 4
ROOT = Namespace("model").root_key()
SPAN = VisibleSpan(
    at=5, body_digest=PageKey(b"k" * 16), prompt_start=64, body_tokens=128, linked_pages=1
)

_PRINT_KEYS = """
import json
from tessera_sglang.memory_pool.keys import Chain, Namespace, VisibleSpan
root = Namespace("model", "extra", "salt", "lora").root_key()
body = Chain(root, range(100, 108), 4)
span = VisibleSpan(at=5, body_digest=body.key(1), prompt_start=4, body_tokens=8, linked_pages=0)
chain = Chain(root, range(12), 4, visible=[span])
print(json.dumps([root.hex(), *(chain.key(page).hex() for page in range(3))]))
"""


def keys(tokens: list[int], *visible: VisibleSpan, root: PageKey = ROOT) -> list[PageKey]:
    chain = Chain(root, tokens, PAGE, visible=visible)
    return [chain.key(page) for page in range(chain.page_count)]


class CountingHash:
    """The default hash, counting its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, data: bytes) -> bytes:
        self.calls += 1
        return xxh3_128(data)


# --- namespaces ----------------------------------------------------------------------------------


def test_requests_in_different_namespaces_never_meet() -> None:
    namespaces = [
        Namespace("model"),
        Namespace("model", cache_salt="t1"),
        Namespace("model", cache_salt="t2"),
        Namespace("model", lora_id="t1"),
        Namespace("model", extra_key="t1"),
        Namespace("model", extra_key="ab", cache_salt="c"),
        Namespace("model", extra_key="a", cache_salt="bc"),
        Namespace("modelab", cache_salt="c"),
        Namespace("model", extra_key="abc"),
        Namespace("model", cache_salt="abc"),
        Namespace("other"),
    ]
    tokens = list(range(1, 9))
    per_namespace = [keys(tokens, root=namespace.root_key()) for namespace in namespaces]
    for one, other in itertools.combinations(per_namespace, 2):
        assert not set(one) & set(other)


def test_a_namespace_is_its_fields_and_nothing_else() -> None:
    one = Namespace("m", extra_key="e", cache_salt="s", lora_id="l")
    assert one.root_key() == Namespace("m", "e", "s", "l").root_key()
    assert Namespace("m", "").root_key() != Namespace("m", None).root_key()


@pytest.mark.parametrize("joint", ["\x00", "\x01", "\x00\x01", "\x01" + "\x00" * 8])
def test_a_field_can_not_imitate_the_frame_between_two(joint: str) -> None:
    early, late = Namespace("m", f"a{joint}b", "c"), Namespace("m", "a", f"b{joint}c")
    assert early.root_key() != late.root_key()
    assert Namespace("m", f"a{joint}").root_key() != Namespace("m", "a", "").root_key()
    assert Namespace(f"m{joint}a").root_key() != Namespace("m", "a").root_key()


def test_text_beyond_ascii_names_a_namespace() -> None:
    assert Namespace("m", "ä").root_key() != Namespace("m", "a").root_key()


# --- chains --------------------------------------------------------------------------------------


def test_a_key_depends_on_every_token_before_it() -> None:
    tokens = list(range(16))
    plain = keys(tokens)
    for position in range(len(tokens)):
        changed = [*tokens]
        changed[position] += 1000
        page = position // PAGE
        other = keys(changed)
        assert other[:page] == plain[:page]
        assert all(a != b for a, b in zip(other[page:], plain[page:], strict=True))


def test_equal_pages_at_different_depths_have_different_keys() -> None:
    assert len(set(keys([7] * 4 * PAGE))) == 4


def test_a_key_depends_on_the_root() -> None:
    assert not set(keys(list(range(8)))) & set(
        keys(list(range(8)), root=Namespace("other").root_key())
    )


def test_an_array_and_a_list_of_the_same_tokens_have_the_same_keys() -> None:
    tokens = [0, 1, 2**40, 3, 128_000, 5, 6, 7]
    chain = Chain(ROOT, array("q", tokens), PAGE)
    assert [chain.key(0), chain.key(1)] == keys(tokens)
    assert chain.tokens(1) == array("q", tokens[4:]).tobytes()
    assert len(chain.tokens(0)) == PAGE * TOKEN_BYTES


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_a_partial_page_has_no_name(length: int, pages: int) -> None:
    chain = Chain(ROOT, range(length), PAGE)
    assert chain.page_count == pages
    whole = Chain(ROOT, range(pages * PAGE), PAGE)
    assert [chain.key(p) for p in range(pages)] == [whole.key(p) for p in range(pages)]


def test_only_the_pages_that_were_asked_for_are_hashed_and_each_once() -> None:
    counting = CountingHash()
    chain = Chain(ROOT, range(400), PAGE, hash_function=counting)
    assert counting.calls == 0
    chain.key(0)
    assert counting.calls == 1
    chain.key(9)
    assert counting.calls == 10
    chain.key(3)
    chain.tokens(50)
    chain.mark(50)
    assert counting.calls == 10


# --- marks ---------------------------------------------------------------------------------------


def test_a_mark_changes_keys_from_its_page_on() -> None:
    tokens = list(range(16))
    plain, marked = keys(tokens), keys(tokens, SPAN)
    assert marked[0] == plain[0]
    assert all(a != b for a, b in zip(marked[1:], plain[1:], strict=True))
    chain = Chain(ROOT, tokens, PAGE, visible=[SPAN])
    assert [bool(chain.mark(page)) for page in range(4)] == [False, True, False, False]
    assert chain.mark(0) == NO_MARK


@pytest.mark.parametrize(
    "changed",
    [
        replace(SPAN, at=6),
        replace(SPAN, body_digest=PageKey(b"K" * 16)),
        replace(SPAN, prompt_start=65),
        replace(SPAN, body_tokens=192),
        replace(SPAN, linked_pages=0),
    ],
    ids=["at", "body_digest", "prompt_start", "body_tokens", "linked_pages"],
)
def test_every_field_of_a_visible_span_counts(changed: VisibleSpan) -> None:
    tokens = list(range(12))
    one, other = keys(tokens, SPAN), keys(tokens, changed)
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_spans_that_become_visible_in_one_page_are_all_in_its_mark() -> None:
    second = replace(SPAN, at=7, prompt_start=256)
    tokens = list(range(12))
    both = keys(tokens, SPAN, second)
    assert both[0] == keys(tokens)[0]
    alone = {*keys(tokens, SPAN)[1:], *keys(tokens, second)[1:], *keys(tokens)[1:]}
    assert not alone & set(both[1:])


def test_a_span_at_a_page_boundary_belongs_to_the_page_it_opens() -> None:
    opening = replace(SPAN, at=8)
    plain, marked = keys(list(range(12))), keys(list(range(12)), opening)
    assert marked[:2] == plain[:2]
    assert marked[2] != plain[2]


def test_a_span_that_becomes_visible_behind_the_last_page_changes_no_key() -> None:
    tokens = list(range(10))
    assert keys(tokens, replace(SPAN, at=9)) == keys(tokens)


# --- processes -----------------------------------------------------------------------------------


def test_every_process_gives_the_same_names() -> None:
    """Ranks of one server compare nothing but must agree; Python's own hash would differ."""
    printed = []
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", _PRINT_KEYS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        printed.append(json.loads(result.stdout))
    assert printed[0] == printed[1]
    assert len(set(printed[0])) == 4
