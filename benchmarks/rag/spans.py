"""Shared pages of documents: how many a corpus has, and how many physical ones a server holds.

The pages of a document that readers share are those behind the linked one. Its first page is computed
in place by every reader, so copies of that are ordinary text and not counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from tessera_sglang.attention.layout import Span, lay_out
from tessera_sglang.bench.agents import Request
from tessera_sglang.config import PAGE_TOKENS, Config
from tessera_sglang.demo.client import CacheState
from tessera_sglang.memory_pool.keys import page_digest

LINK_PAGES = Config().link_pages  # of the server


def digests(corpus: Iterable[Sequence[int]]) -> set[str]:
    """Of every shared page of every document. Equal pages count once."""
    found = set()
    for document in corpus:
        for first in range(LINK_PAGES * PAGE_TOKENS, len(document) - PAGE_TOKENS + 1, PAGE_TOKENS):
            tokens = array("q", document[first : first + PAGE_TOKENS])
            found.add(page_digest(tokens.tobytes()))
    return found


def shared_pages(corpus: Iterable[Sequence[int]]) -> int:
    """Of all documents."""
    return sum(max(0, len(document) // PAGE_TOKENS - LINK_PAGES) for document in corpus)


def stored_pages(state: CacheState, known: set[str]) -> int:
    """Physical pages whose tokens are a shared page of a document: copies count."""
    return len({page for digest, page in state.cached_pages if digest in known})


def own_tokens(request: Request) -> int:
    """What the request computes and stores besides shared pages, its answer included."""
    total = len(request.input_ids) + request.output_tokens
    layout = lay_out(
        [Span(start, end) for start, end in request.spans],
        prompt_tokens=len(request.input_ids),
        page_size=PAGE_TOKENS,
        root_tokens=PAGE_TOKENS,
        linked_pages=LINK_PAGES,
    )
    return total - (layout.shared_tokens if layout is not None else 0)
