"""What a running request owns in the pool, and how it starts behind a prefix.

A request has an arena slot and a row of pages. The first of them may be shared: they belong to whoever
found them (the index), are read and never written. A request starts empty, or at a page boundary whose
state was saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera_sglang.memory_pool.paged import NO_PAGES, PageIds
from tessera_sglang.memory_pool.pool import TwoTierPool

from .parts import Parts, StateMissing, pages_of


@dataclass(slots=True)
class Request:
    """Mutable: ``pages`` grows, ``length`` follows the forward passes."""

    pool: TwoTierPool
    slot: int
    pages: PageIds  # int64, in row order
    shared_pages: int  # of these, how many are somebody else's
    length: int  # tokens whose KV is in the pool, those of parts included
    parts: Parts = ()  # read besides, see `parts.read`; not among ``pages``

    @classmethod
    def open(cls, pool: TwoTierPool, prefix: PageIds = NO_PAGES) -> Request | None:
        """Start behind ``prefix``, int64 [n], pages that stay owned for as long as the request runs.

        None, and nothing changes, where no slot is free: relieve the pool. Raises ``StateMissing`` where
        no state was saved with the last page: cut the prefix to ``pool.match_limit``.
        """
        slots = pool.arena.allocate(1)
        if slots is None:
            return None
        slot = int(slots[0])
        if len(prefix) and not pool.restore(int(prefix[-1]), slot):
            pool.arena.free(slots)
            raise StateMissing(
                f"no state was saved with page {prefix[-1]}: go on from the last of the "
                f"{len(prefix)} pages that has one, see TwoTierPool.match_limit"
            )
        pages = prefix.astype(np.int64)
        return cls(pool, slot, pages, len(pages), len(pages) * pool.geometry.page_tokens)

    def reserve(self, tokens: int) -> bool:
        """Own pages for so many more tokens. False, and nothing changes, where there are too few."""
        missing = self.pool.geometry.pages(self.own_length + tokens) - len(self.pages)
        if missing <= 0:
            return True
        more = self.pool.paged.allocate(missing)
        if more is None:
            return False
        self.pages = np.concatenate([self.pages, more])
        return True

    def save(self) -> bool:
        """Keep the state at the present length, a page boundary, with the page that ends there.

        Whether it was kept: requests may run in all slots, and nobody could go on from the state of a
        request that reads parts.
        """
        if self.parts:
            return False
        last = self.length // self.pool.geometry.page_tokens - 1
        return self.pool.save(self.slot, int(self.pages[last]), self.length)

    @property
    def own_length(self) -> int:
        """Tokens that are in :attr:`pages`: all but those of parts."""
        return self.length - pages_of(self.parts) * self.pool.geometry.page_tokens

    @property
    def own_pages(self) -> PageIds:
        """Those that this request allocated, int64."""
        return self.pages[self.shared_pages :]

    def close(self) -> PageIds:
        """Give the slot back. Returns :attr:`own_pages`, the caller's to publish or to free."""
        self.pool.arena.free(np.array([self.slot]))
        own = self.own_pages
        self.pages, self.shared_pages = NO_PAGES, 0
        return own
