"""What pages are called outside the device: names that another process finds again.

The key of a page is the blake2b-256 digest of the key before it, its token bytes and its framed mark;
the first page's parent is the namespace's root key. So a key stands for everything that the page was
computed from, as far as a digest can: whoever reads by it compares namespace, parent, tokens and mark
(:class:`~memory_pool.lower.PageName`) before believing it.

The index names pages by physical page and hashes once a run (:mod:`memory_pool.keys`); that dies with
the process. Here every page costs a digest, which is why nothing here is called unless lower tiers are
configured: about 1 us a page of 64 tokens for the digest, and as much again for the record, on one core
of a server. A request computes each name once
(:class:`NamedChain`), and so does a run of the index (:func:`run_keys`), in 32 bytes a page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from .keys import NO_MARK, TOKEN_BYTES, Chain, HashFunction, framed
from .lower import KEY_BYTES, PageName, TierKey
from .runs import Run

_PERSON = b"tessera-page-1"  # no other digest of the same bytes is a page's


def blake2b_256(data: bytes) -> bytes:
    """The default digest: 32 bytes, collision resistant."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=_PERSON).digest()


def names_of(
    chain: Chain,
    first_page: int,
    count: int,
    parent: TierKey | None,
    digest: HashFunction = blake2b_256,
) -> list[PageName]:
    """Names of pages ``first_page .. first_page + count`` of a chain. One digest a page.

    Args:
        chain: of a namespace whose root key has 32 bytes.
        first_page: of the chain.
        count: whole pages, no more than the chain has.
        parent: key of the page before the first; None where that is the namespace.
        digest: 32 bytes of any; another one is for tests that want collisions.
    """
    end = first_page + count
    assert 0 <= first_page <= end <= chain.page_count, "no such pages in the chain"
    assert (parent is None) == (first_page == 0), "only a first page hangs below the namespace"
    width = chain.page_size * TOKEN_BYTES
    marks = {page - first_page: framed(mark) for page, mark in chain.marks.items()}
    return _named(
        bytes(chain.root_key),
        bytes(chain.root_key) if parent is None else parent,
        chain.view[first_page * width : end * width].tobytes(),
        width,
        marks,
        digest,
    )


def run_keys(run: Run, page_size: int, digest: HashFunction = blake2b_256) -> bytes:
    """Tier keys of a run's pages, ``KEY_BYTES`` each, kept on the run and on those above it.

    Works for a run that was just evicted, too. O(pages up to the first run that has names).
    """
    unnamed: list[Run] = []
    at = run
    while at.names is None and at.page_count:
        unnamed.append(at)
        assert at.parent is not None
        at = at.parent
    above = at.names[-KEY_BYTES:] if at.names else bytes(at.root_key)
    width = page_size * TOKEN_BYTES
    for one in reversed(unnamed):
        named = _named(bytes(one.root_key), above, one.raw, width, _first_mark(one), digest)
        one.names = b"".join(name.key for name in named)
        above = named[-1].key
    return run.names or b""


def run_names(
    run: Run,
    page_size: int,
    first_page: int | None = None,
    end_page: int | None = None,
    digest: HashFunction = blake2b_256,
) -> list[PageName]:
    """Names of pages ``first_page .. end_page`` of a chain that lie in ``run``; None for all of it.

    From keys that are computed once a page and kept right by cuts and trims (:func:`run_keys`).
    """
    first = run.start if first_page is None else first_page
    end = run.end if end_page is None else end_page
    assert run.start <= first <= end <= run.end, "pages of another run"
    keys = run_keys(run, page_size, digest)
    namespace = bytes(run.root_key)
    width = page_size * TOKEN_BYTES
    at = first - run.start
    if at:
        above = keys[(at - 1) * KEY_BYTES : at * KEY_BYTES]
    elif first:
        assert run.parent is not None and run.parent.names, "a run without names above"
        above = run.parent.names[-KEY_BYTES:]
    else:
        above = namespace
    marks = _first_mark(run)
    names = []
    for number in range(at, end - run.start):
        key = keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
        tokens = run.raw[number * width : (number + 1) * width]
        mark = marks.get(number, b"")
        names.append(PageName(namespace, TierKey(above), TierKey(key), tokens, mark))
        above = key
    return names


class NamedChain:
    """A chain whose pages have names: asked for as needed, each computed once.

    Kept by the request as long as its tokens stand. Reads the chain's tokens, so what holds for a
    :class:`~memory_pool.keys.Chain` over an array holds for this.
    """

    __slots__ = ("_begin", "_digest", "_names", "chain")

    def __init__(self, chain: Chain, digest: HashFunction = blake2b_256) -> None:
        self.chain = chain
        self._digest = digest
        self._begin = 0
        self._names: list[PageName] = []  # of the pages from _begin on

    def names(self, first_page: int, end_page: int, above: Run | None = None) -> list[PageName]:
        """Names of pages ``first_page .. end_page`` of the chain.

        ``above`` is a run of the index that a look-up of this chain led to: where it ends at or before
        ``first_page``, its pages need not be named again for their successors.
        """
        if not self._names:
            self._begin = self._start(first_page, above)[0]
        elif first_page < self._begin:
            begin, parent = self._start(first_page, above)
            count = self._begin - begin
            before = names_of(self.chain, begin, count, parent, self._digest)
            self._names = before + self._names
            self._begin = begin
        known = self._begin + len(self._names)
        if known < end_page:
            parent = self._names[-1].key if self._names else self._start(known, above)[1]
            self._names += names_of(self.chain, known, end_page - known, parent, self._digest)
        return self._names[first_page - self._begin : max(end_page, first_page) - self._begin]

    def _start(self, first_page: int, above: Run | None) -> tuple[int, TierKey | None]:
        """Where to begin so that ``first_page`` gets a name, and the key before that."""
        if above is None or not 0 < above.end <= first_page:
            return 0, None
        return above.end, TierKey(run_keys(above, self.chain.page_size, self._digest)[-KEY_BYTES:])


def _first_mark(run: Run) -> Mapping[int, bytes]:
    return {0: framed(run.mark)} if run.mark != NO_MARK else {}


def _named(
    namespace: bytes,
    above: bytes,
    raw: bytes,
    width: int,
    marks: Mapping[int, bytes],
    digest: HashFunction,
) -> list[PageName]:
    """Names of the pages of ``raw``, ``width`` bytes each; ``marks`` by number, framed."""
    assert len(namespace) == KEY_BYTES, "a namespace of lower tiers has a root key of 32 bytes"
    names = []
    for number in range(len(raw) // width):
        tokens = raw[number * width : (number + 1) * width]
        mark = marks.get(number, b"")
        key = digest(above + tokens + mark)
        assert len(key) == KEY_BYTES
        names.append(PageName(namespace, TierKey(above), TierKey(key), tokens, mark))
        above = key
    return names
