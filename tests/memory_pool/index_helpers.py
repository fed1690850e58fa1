"""What the index tests do all the time, by short names."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import Chain, HashFunction, Namespace, PageKey, VisibleSpan
from tessera_sglang.memory_pool.runs import Match, Path, Published

ROOT = Namespace("model").root_key()


def short_hash(bits: int = 8, seed: int = 0) -> HashFunction:
    """The last bits of xxh3: collides all the time."""
    mask = (1 << bits) - 1
    return lambda data: bytes([xxhash.xxh3_64_intdigest(data, seed=seed) & mask])


def mark(at: int, prompt_start: int = 0) -> VisibleSpan:
    """A span that becomes visible at a token; another ``prompt_start`` makes another mark."""
    return VisibleSpan(at, b"body", prompt_start, body_tokens=8, linked_pages=0)


def chain(
    index: ContentIndex,
    tokens: Iterable[int],
    visible: Iterable[VisibleSpan] = (),
    root: PageKey = ROOT,
) -> Chain:
    return index.chain(root, list(tokens), visible)


def publish(
    index: ContentIndex, tokens: Iterable[int], page_ids: Iterable[int], *visible: VisibleSpan
) -> Published:
    return index.publish(chain(index, tokens, visible), list(page_ids))


def store(
    index: ContentIndex, tokens: Iterable[int], page_ids: Iterable[int], *visible: VisibleSpan
) -> Path:
    """Publish, as a path."""
    return index.path(publish(index, tokens, page_ids, *visible).segments())


def match(
    index: ContentIndex, tokens: Iterable[int], limit: int | None = None, *visible: VisibleSpan
) -> Match:
    return index.match(chain(index, tokens, visible), limit)


def find(
    index: ContentIndex, tokens: Iterable[int], limit: int | None = None, *visible: VisibleSpan
) -> Path:
    """Look up, as a path."""
    return index.path(match(index, tokens, limit, *visible).segments())


def pages(path: Path) -> list[int]:
    """Physical pages of a path."""
    return path.page_ids().tolist()


def hit(
    index: ContentIndex, tokens: Iterable[int], limit: int | None = None, *visible: VisibleSpan
) -> list[int]:
    """Physical pages that a look-up finds."""
    return pages(find(index, tokens, limit, *visible))


def evict(index: ContentIndex, page_count: int, *, break_holds: bool = False) -> list[int]:
    return index.evict(page_count, break_holds=break_holds).tolist()


def sizes(index: ContentIndex) -> tuple[int, int, int]:
    """Locked, held and evictable pages of a sound index."""
    index.check_invariants()
    return index.locked_pages, index.held_pages, index.evictable_pages
