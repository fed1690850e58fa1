"""Names of pages: what differs in a name, what does not, and what is read in place (case 22)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_sglang.memory_pool.keys import (
    NO_MARK,
    TOKEN_BYTES,
    Chain,
    Namespace,
    PageKey,
    VisibleSpan,
    below_page,
    below_root,
    page_digest,
    page_key,
    sibling_order,
    xxh3_128,
)

PAGE = 4
ROOT = Namespace("model").root_key()
SPAN = VisibleSpan(at=5, body_digest=b"k" * 16, prompt_start=64, body_tokens=128, linked_pages=1)

_PRINT_KEYS = """
import json
from tessera_sglang.memory_pool.keys import Chain, Namespace, VisibleSpan, xxh3_128
from tessera_sglang.memory_pool.keys import below_page, below_root, page_key, sibling_order
root = Namespace("model", "extra", "salt", "lora").root_key()
span = VisibleSpan(at=5, body_digest=b"body", prompt_start=4, body_tokens=8, linked_pages=0)
chain = Chain(root, range(12), 4, visible=[span])
parents = [below_root(root), below_page(7), below_page(8)]
keys = [page_key(xxh3_128, p, chain.page_bytes(n), chain.mark(n)) for n, p in enumerate(parents)]
order = sibling_order(chain.page_bytes(1), chain.mark(1))
print(json.dumps([part.hex() for part in (root, *keys, order)]))
"""


def keys(tokens: list[int], *visible: VisibleSpan, root: PageKey = ROOT) -> list[PageKey]:
    """Keys of a chain whose first page is stored in physical page 0, the second in 1, ..."""
    chain = Chain(root, tokens, PAGE, visible=visible)
    return [
        page_key(
            xxh3_128,
            below_page(page - 1) if page else below_root(root),
            chain.page_bytes(page),
            chain.mark(page),
        )
        for page in range(chain.page_count)
    ]


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
    first = [keys(list(range(1, 5)), root=namespace.root_key()) for namespace in namespaces]
    for one, other in itertools.combinations(first, 2):
        assert one != other


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


# --- keys ----------------------------------------------------------------------------------------


def test_a_key_depends_on_every_token_of_its_page() -> None:
    tokens = list(range(16))
    plain = keys(tokens)
    for position in range(len(tokens)):
        changed = [*tokens]
        changed[position] += 1000
        page = position // PAGE
        assert [a != b for a, b in zip(keys(changed), plain, strict=True)] == [
            number == page for number in range(4)
        ]


def test_a_key_depends_on_the_parent() -> None:
    """On the very page, whatever its tokens: what came before is in the parent's identity."""
    parents = [below_root(ROOT), below_root(Namespace("other").root_key())]
    parents += [below_page(page_id) for page_id in (0, 1, 2**31 - 1)]
    assert len({page_key(xxh3_128, parent, b"page") for parent in parents}) == len(parents)


def test_a_page_is_no_namespace() -> None:
    """Whatever a root key is, it can not imitate the identity of a page."""
    assert below_page(7) != below_root(PageKey(below_page(7)[1:]))


# --- chains --------------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
@settings(max_examples=50, deadline=None, database=None)
def test_every_form_of_the_same_tokens_is_the_same_chain(tokens: list[int]) -> None:
    forms = (tokens, tuple(tokens), array("q", tokens), np.array(tokens, np.int64))
    for chain in (Chain(ROOT, form, PAGE) for form in forms):
        assert chain.page_count == len(tokens) // PAGE
        assert chain.token_count == len(tokens)
        assert chain.view.tobytes() == array("q", tokens).tobytes()
        for page in range(chain.page_count + 1):
            expected = array("q", tokens[page * PAGE : (page + 1) * PAGE])
            assert chain.page_bytes(page) == expected.tobytes()


def test_a_chain_reads_an_array_in_place() -> None:
    tokens = array("q", range(8))
    chain = Chain(ROOT, tokens, PAGE)
    tokens[0] = 99
    assert chain.page_bytes(0) == array("q", [99, 1, 2, 3]).tobytes()[: PAGE * 8]
    with pytest.raises(BufferError):
        tokens.append(8)
    del chain
    tokens.append(8)


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_a_partial_page_is_no_page(length: int, pages: int) -> None:
    chain = Chain(ROOT, range(length), PAGE)
    assert chain.page_count == pages
    assert len(chain.page_bytes(pages)) == (length - pages * PAGE) * TOKEN_BYTES


def test_the_digest_of_a_page_is_its_name_in_reports() -> None:
    one, same, other = (array("q", ids).tobytes() for ids in ([1, 2], [1, 2], [2, 1]))
    assert page_digest(one) == page_digest(same) != page_digest(other)
    assert len(page_digest(one)) == 16


# --- marks ---------------------------------------------------------------------------------------


def test_a_mark_changes_the_key_of_its_page() -> None:
    tokens = list(range(16))
    plain, marked = keys(tokens), keys(tokens, SPAN)
    assert [a != b for a, b in zip(plain, marked, strict=True)] == [False, True, False, False]
    chain = Chain(ROOT, tokens, PAGE, visible=[SPAN])
    assert [bool(chain.mark(page)) for page in range(4)] == [False, True, False, False]
    assert chain.mark(0) == NO_MARK


@pytest.mark.parametrize(
    "changed",
    [
        replace(SPAN, at=6),
        replace(SPAN, body_digest=b"K" * 16),
        replace(SPAN, prompt_start=65),
        replace(SPAN, body_tokens=192),
        replace(SPAN, linked_pages=0),
    ],
    ids=["at", "body_digest", "prompt_start", "body_tokens", "linked_pages"],
)
def test_every_field_of_a_visible_span_counts(changed: VisibleSpan) -> None:
    tokens = list(range(12))
    one, other = keys(tokens, SPAN), keys(tokens, changed)
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, True]


def test_spans_that_become_visible_in_one_page_are_all_in_its_mark() -> None:
    second = replace(SPAN, at=7, prompt_start=256)
    tokens = list(range(12))
    marks = ([], [SPAN], [second], [SPAN, second])
    assert len({keys(tokens, *visible)[1] for visible in marks}) == len(marks)


def test_a_span_at_a_page_boundary_belongs_to_the_page_it_opens() -> None:
    chain = Chain(ROOT, range(12), PAGE, visible=[replace(SPAN, at=8)])
    assert [bool(chain.mark(page)) for page in range(3)] == [False, False, True]


def test_the_next_mark_is_the_first_one_behind_a_page() -> None:
    visible = [replace(SPAN, at=at) for at in (0, 9, 11, 21)]  # pages 0, 2, 2 and 5, a partial one
    chain = Chain(ROOT, range(22), PAGE, visible=visible)
    assert [chain.next_mark(page) for page in range(-1, 6)] == [0, 2, 2, 5, 5, 5, 6]


@given(data=st.data())
@settings(max_examples=200, deadline=None, database=None)
def test_pages_that_begin_alike_are_neighbours_among_siblings(data: st.DataObject) -> None:
    """Marks included: of all siblings one next to a page shares the most leading rows with it."""
    page = st.tuples(
        st.lists(st.integers(-1, 1), min_size=PAGE, max_size=PAGE).map(tuple),
        st.sets(st.tuples(st.integers(0, PAGE - 1), st.sampled_from([b"a", b"b"])), max_size=2).map(
            lambda mark: tuple(sorted(mark))
        ),
    )

    def alike(one: tuple, other: tuple) -> int:
        (a, marks), (b, other_marks) = one, other
        same = [
            a[: n + 1] == b[: n + 1]
            and [m for m in marks if m[0] <= n] == [m for m in other_marks if m[0] <= n]
            for n in range(PAGE)
        ]
        return sum(same)

    pages = data.draw(st.lists(page, unique=True, min_size=2, max_size=12))
    wanted = pages.pop()

    def order(page: tuple) -> bytes:
        return sibling_order(array("q", page[0]).tobytes(), page[1])

    ordered = sorted(pages, key=order)
    place = sum(order(other) < order(wanted) for other in ordered)
    nearest = ordered[max(place - 1, 0) : place + 1]
    assert max(alike(p, wanted) for p in nearest) == max(alike(p, wanted) for p in pages)


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
    assert len(set(printed[0])) == 5
