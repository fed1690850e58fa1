"""Pages below the device, as the cache and the waiting queue see them.

Down: a page that the index evicts is copied to host memory first, if it is not there. With a store (a
disk) below, pages go down soon after they are sealed too, a few in each scheduling pass and in idle
time, so that a server that is killed leaves them behind.

Up: a request whose match ends before pages that a lower tier has waits in the queue until they are in
host memory, or are known not to come; nobody else waits for that. At its admission they are copied into
pages of its own, in the way of a host hit (decision 6), and it publishes them like computed ones. A span
is loaded by its prefill, which then computes one token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera_sglang.memory_pool.keys import Chain
from tessera_sglang.memory_pool.lower import PageName, Worth
from tessera_sglang.memory_pool.names import NamedChain, run_names
from tessera_sglang.memory_pool.runs import Load, Match, PageIds, Run, Segment
from tessera_sglang.memory_pool.tiers import Ticket, TierStack

from .kv_memory import KvMemory

BELOW = "tessera_below"  # attribute of a Req
PATIENCE_S = 10.0  # that a request waits for a store
DOWN_BYTES = 16 << 20  # written down between two scheduling passes


@dataclass(slots=True)
class Wanted:
    """What a request that waits has below the device: names of the pages behind its first match."""

    key: tuple[bytes, int]  # namespace and tokens that the names are of
    first: int  # page of its chain
    names: list[PageName]
    on_host: int = 0  # the chain's pages before this one were there when it was first asked for
    ticket: Ticket | None = None
    until_s: float = 0.0  # of the monotonic clock: no longer is it waited for


@dataclass(slots=True)
class LoadedTokens:
    """Only grow."""

    host: int = 0
    store: int = 0


class Below:
    """One per cache. Scheduler thread only."""

    def __init__(self, stack: TierStack, memory: KvMemory, page_tokens: int) -> None:
        self.stack = stack
        self.loaded = LoadedTokens()
        self.gave_up = 0  # requests that waited too long for a store; only grows
        self._memory = memory
        self._page_tokens = page_tokens
        self._leaving: list[tuple[list[PageName], list[Worth], PageIds]] = []
        self._unwritten: deque[Segment] = deque()
        self._waiting: dict[int, tuple[Any, Wanted]] = {}  # by id of the request

    # --- down ------------------------------------------------------------------------------------

    def leaving(self, run: Run, first: int, page_ids: PageIds) -> None:
        """The index's ``on_evict``: pages that go with its present call of ``evict``."""
        names = run_names(run, self._page_tokens, first, first + len(page_ids))
        self._leaving.append((names, self._worth(run, first, len(names)), page_ids.copy()))

    def take(self) -> None:
        """Copy what is leaving, before its pages are anybody else's."""
        leaving, self._leaving = self._leaving, []
        if leaving:
            self._put(
                [name for names, _, _ in leaving for name in names],
                [worth for _, some, _ in leaving for worth in some],
                np.concatenate([pages for _, _, pages in leaving]),
            )

    def sealed(self, run: Run | None, first: int, end: int) -> None:
        """Pages of a chain were published; with a store, they are to be written there."""
        if self.stack.store is not None and run is not None and end > first:
            self._unwritten.append(Segment(run, first, end))

    def work(self, most_bytes: int = DOWN_BYTES) -> bool:
        """Take up what threads finished, and write some of what was sealed. Whether more is left."""
        self.stack.poll()
        left = max(1, most_bytes // self._memory.page_bytes)
        while self._unwritten and left > 0 and self.stack.accepts():
            segment = self._unwritten.popleft()
            end = min(segment.end, segment.run.end)  # what was evicted since went down already
            if segment.run.alive and segment.first < end:
                left -= self._write_down(Segment(segment.run, segment.first, end), left)
        return bool(self._unwritten)

    def _write_down(self, segment: Segment, most: int) -> int:
        """Pages of a segment, up to ``most``; the rest is queued again. Returns how many."""
        runs: list[Run] = [segment.run]
        while runs[-1].start > segment.first and runs[-1].parent is not None:
            runs.append(runs[-1].parent)
        done = 0
        for run in reversed(runs):
            first = max(run.start, segment.first)
            end = min(run.end, first + most - done)
            names = run_names(run, self._page_tokens, first, end)
            pages = run.page_ids[first - run.start : end - run.start]
            self._put(names, self._worth(run, first, len(names)), pages)
            done += end - first
            if end < run.end or done == most:
                if end < segment.end:
                    self._unwritten.appendleft(Segment(segment.run, end, segment.end))
                break
        return done

    def _put(self, names: list[PageName], worth: list[Worth], page_ids: PageIds) -> None:
        lacking = np.flatnonzero(~np.array(self.stack.holds(names, worth), dtype=np.bool_))
        if len(lacking):
            data = self._memory.read(page_ids[lacking].astype(np.int64))
            self.stack.demote([names[at] for at in lacking], [worth[at] for at in lacking], data)

    def _worth(self, run: Run, first: int, pages: int) -> list[Worth]:
        size = self._page_tokens
        return [
            Worth(start=page * size, shared=run.shared, hits=run.hits)
            for page in range(first, first + pages)
        ]

    # --- up --------------------------------------------------------------------------------------

    def asked(self, req: Any) -> bool:
        """Whether a queued request was looked at since it came into the queue."""
        return id(req) in self._waiting

    def fetch(self, req: Any, chain: Chain, found: Match, *, shared: bool) -> None:
        """Begin to bring what a queued request lacks into host memory, as far as it is known below.

        What comes stays until it is admitted. ``shared`` says that the chain is a span's body.
        """
        wanted = self._wanted(req, chain, found)
        self._waiting[id(req)] = req, wanted
        names = wanted.names[found.pages - wanted.first :]
        wanted.on_host = found.pages + self.stack.held(names)
        known = self.stack.known(names)
        wanted.until_s = time.monotonic() + PATIENCE_S
        if known:
            start = found.pages * self._page_tokens
            wanted.ticket = self.stack.prefetch(
                names[:known], str(req.rid), start=start, shared=shared
            )

    def waits(self, req: Any) -> bool:
        """Whether a queued request should wait for pages that are on their way to host memory."""
        entry = self._waiting.get(id(req))
        if entry is None or entry[1].ticket is None or entry[1].ticket.done:
            return False
        if time.monotonic() < entry[1].until_s:
            return True
        entry[1].ticket.cancel()  # a disk that hangs: what came is used, the rest is computed
        entry[1].ticket = None
        self.gave_up += 1
        return False

    def offer(self, req: Any, chain: Chain, found: Match, limit: int) -> Load | None:
        """What of a request's chain, up to ``limit`` tokens, host memory has behind a match."""
        size = self._page_tokens
        first, end = found.pages, min(chain.page_count, -(-limit // size))
        if end <= first:
            return None
        wanted = self._wanted(req, chain, found)
        names = wanted.names[first - wanted.first : end - wanted.first]
        held = self.stack.held(names)
        rows = min(limit, (first + held) * size) - first * size
        return Load(names[:held], first, rows) if held else None

    def load(self, req: Any, load: Load, page_ids: npt.NDArray[np.int64], row_start: int) -> bool:
        """Copy pages from host memory into a request's own, which begin at ``row_start`` of its row.

        False where some of them went, or are damaged: nothing of them may then be used.
        """
        lease = self.stack.lease(load.names, len(load.names))
        if lease is None:
            return False
        try:
            data = lease.data()
            if len(data) < len(load.names):
                return False
            self._memory.write(page_ids, data)
        finally:
            lease.release()
        self._account(req, load, row_start)
        return True

    def _account(self, req: Any, load: Load, row_start: int) -> None:
        waiting = self._waiting.get(id(req))
        on_host = load.rows
        if waiting is not None:
            before = max(0, waiting[1].on_host - load.page)
            on_host = min(load.rows, before * self._page_tokens)
        stored = load.rows - on_host
        self.loaded.host += on_host
        self.loaded.store += stored
        if stored:  # SGLang reports them as coming from storage
            req.storage_hit_start, req.storage_hit_length = row_start + on_host, stored

    def keep_only(self, queue: Sequence[Any]) -> None:
        """Let go of what was fetched for requests that are no longer in the queue."""
        there = {id(req) for req in queue}
        for key in [key for key in self._waiting if key not in there]:
            self.forget(self._waiting[key][0])

    def forget(self, req: Any) -> None:
        """The request was admitted, or is gone."""
        entry = self._waiting.pop(id(req), None)
        if entry is None:
            return
        if entry[1].ticket is not None:
            entry[1].ticket.cancel()
        setattr(req, BELOW, None)

    @property
    def busy(self) -> bool:
        """Whether requests wait for pages, or hold some."""
        return bool(self._waiting)

    def _wanted(self, req: Any, chain: Chain, found: Match) -> Wanted:
        kept: Wanted | None = getattr(req, BELOW, None)
        key = bytes(chain.root_key), chain.token_count
        if kept is None or kept.key != key or kept.first > found.pages:
            self.forget(req)
            names = NamedChain(chain).names(found.pages, chain.page_count, found.run)
            kept = Wanted(key, found.pages, names)
            setattr(req, BELOW, kept)
        return kept

    @property
    def damaged(self) -> int:
        """Pages that were not what they had been when they were put there, in any tier; only grows."""
        store = self.stack.store
        return self.stack.host.damaged + (store.damaged if store is not None else 0)

    @property
    def evicted(self) -> dict[str, int]:
        """Pages that were dropped to make room, by tier; only grow."""
        store = self.stack.store
        found = {"host": self.stack.host.evicted}
        return found if store is None else {**found, "store": store.evicted}

    def state(self) -> dict[str, Any]:
        """What ``/server_info`` tells of the lower tiers."""
        host, stack = self.stack.host, self.stack
        return {
            "loaded_tokens": asdict(self.loaded),
            "host": {
                "pages": host.page_count,
                "evicted": host.evicted,
                "damaged": host.damaged,
                "collisions": host.collisions,
            },
            "counters": asdict(stack.counters),
            "sizes": asdict(stack.sizes()),
            "unwritten": len(self._unwritten),
            "gave_up": self.gave_up,
            **({"store": stack.store.state()} if stack.store is not None else {}),
        }

    def clear(self) -> None:
        """For a flush: host memory is emptied, and nothing that waits is fetched or written any more."""
        for req, _ in list(self._waiting.values()):
            self.forget(req)
        self._unwritten.clear()
        self._leaving.clear()
        self.stack.clear()
