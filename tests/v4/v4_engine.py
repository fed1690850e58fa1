"""A scheduler in small: the content index, the two-tier pool and the model, requests that come and go.

Every request has a twin on transformers' own cache, whose logits are compared at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache
from v4_model import PAGE, TOLERANCE, Twin, poison

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import Namespace
from tessera_sglang.memory_pool.runs import Path
from tessera_sglang.v4 import LayerStorage

ROOT = Namespace("tiny-v4").root_key()
# Where every request is cut, so that equal prefixes are computed with equal shapes.
CUTS = sorted(
    {0, 17, 34, 51, 100, *range(PAGE, 9 * PAGE, PAGE), 150, 205, 206, 300, 391, 600, 1100}
)


@dataclass
class Running:
    twin: Twin
    ids: torch.Tensor  # all that it will be given
    path: Path  # locked
    hit_pages: int


@dataclass
class Engine:
    store: LayerStorage
    index: ContentIndex = field(default_factory=lambda: ContentIndex(PAGE))
    running: list[Running] = field(default_factory=list)
    saved: dict[int, DynamicCache] = field(default_factory=dict)  # the twin of a state, by page
    hit_pages: int = 0
    refused: int = 0
    evicted: int = 0
    dropped: int = 0

    def start(self, ids: torch.Tensor) -> Running | None:
        """Behind the longest prefix that can be gone on from; None where there is no room."""
        match = self.index.match(self.index.chain(ROOT, ids.tolist()), limit=len(ids) - 1)
        found = self.index.path(match.segments()).page_ids()
        usable = self.store.pool.match_limit(found)
        prefix = found[:usable].astype(np.int64)
        again = self.index.match(self.index.chain(ROOT, ids.tolist()), limit=usable * PAGE)
        path = self.index.path(again.segments())
        self.index.lock(path)
        if not self._room(slots=1, keep=prefix):
            self.index.unlock(path)
            return None
        twin = Twin.open(self.store, prefix, self.saved)
        assert twin is not None
        running = Running(twin, ids, path, usable)
        self.running.append(running)
        self.hit_pages += usable
        return running

    def step(self, running: Running) -> bool:
        """The next piece; False where it was the last, or where there are no pages for it."""
        length = running.twin.request.length
        ends = [end for end in (*CUTS, len(running.ids)) if end > length]
        piece = running.ids[length : min(*ends, len(running.ids)) if ends else length]
        if not len(piece):
            return False
        geometry = self.store.pool.geometry
        missing = geometry.pages(length + len(piece)) - len(running.twin.request.pages)
        if missing > 0 and not self._room(pages=missing):
            return False
        assert running.twin.feed(piece, save_every=PAGE) <= TOLERANCE
        return True

    def finish(self, running: Running, *, publish: bool = True) -> None:
        """Publish whole pages, or none; everything else is free, and NaN, from then on."""
        request, pool = running.twin.request, self.store.pool
        whole = request.length // PAGE if publish else 0
        pages, shared = request.pages, request.shared_pages
        pool.arena.free(np.array([request.slot]))
        chain = self.index.chain(ROOT, running.ids[: request.length].tolist())
        published = self.index.publish(chain, pages[:whole])
        pool.free(published.duplicate_ids)
        pool.free(pages[max(whole, shared) :])
        self.index.unlock(running.path)
        self.running.remove(running)
        poison(pool)

    def check(self) -> None:
        """Everything adds up, and no page has two owners."""
        sealed = np.concatenate([np.empty(0, np.int64), *self._sealed()])
        self.store.pool.check_invariants(self.index, sealed)
        self.index.check_invariants()
        own = [one.twin.request.own_pages for one in self.running]
        everything = np.concatenate([sealed, *own])
        assert len(np.unique(everything)) == len(everything)
        assert len(everything) + self.store.pool.paged.available == self.store.pool.paged.size

    def _sealed(self) -> Iterator[np.ndarray]:
        for run in self.index.runs():
            yield run.page_ids.astype(np.int64)

    def _room(self, **wanted: object) -> bool:
        relief = self.store.pool.relieve(self.index, **wanted)  # type: ignore[arg-type]
        self.refused += not relief.enough
        self.evicted += len(relief.evicted)
        self.dropped += relief.dropped_states
        if len(relief.evicted) or relief.dropped_states:
            poison(self.store.pool)
        return relief.enough
