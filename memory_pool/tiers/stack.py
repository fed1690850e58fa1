"""Moves pages between the device's owner, host memory and a store.

Down: pages that leave the device (or are written through) get slots in host memory; a thread copies
them there and seals them; from there they are written to the store, as far as its queue has room, and
the others stay dirty in host memory and are written when it has. A dirty page that host memory must
give up is written first where there is room for that, and lost where there is none.

Up: a request that waits takes a ticket for the leading pages that it lacks; threads read them from the
store into reserved slots, and when the ticket is done it leases the pages and copies them to the device.

The scheduler's thread owns all of it and calls everything here; threads touch bytes of pinned slots
only, and :meth:`TierStack.poll` takes up what they did. Nothing waits for I/O but
:meth:`TierStack.drain` and :meth:`TierStack.close`. Queues are bounded: a read that does not fit is
refused (the request computes), a write that does not fit stays dirty, and a copy that does not fit is
done on the spot, since that is memory and not a disk.

*Tensor parallel ranks.* When a read lands depends on the disk, so two ranks that ran this side by side
would hit different lengths and then schedule different batches. They would have to agree: rank 0
decides what is held and evicted, as of a step, and the others follow; or each look-up takes the least
of what all ranks hold, by a collective, and slots are given and taken by agreed operations only
(priorities are free of wall time already). Neither is here: more than one rank is the caller's to
refuse.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from ..host import HostTier
from ..lower import PageName, Store, Worth
from ..worth import Entry
from .invariants import check
from .jobs import Fill, Read, Write
from .lanes import Finished, Lane, attempt
from .lease import Lease
from .reader import Reader
from .records import Sizes, TierCounters
from .ticket import Ticket
from .writer import Writer

logger = logging.getLogger(__name__)

QUEUE_BYTES = 1 << 30  # of outstanding reads
FILL_BYTES = 256 << 20  # of copies from the device that wait for the thread
WRITE_BYTES = 256 << 20  # of outstanding writes
JOINED_S = 5.0  # that threads get to end in


class TierStack:
    """Host memory over a store, or over nothing. See the module for who may call what."""

    def __init__(
        self,
        host: HostTier,
        store: Store | None = None,
        *,
        workers: int = 2,
        queue_pages: int | None = None,
        write_queue_pages: int | None = None,
    ) -> None:
        """Starts threads: one that copies, and with a store one that writes and some that read.

        Args:
            host: its pages are the stack's from here on.
            store: likewise; closed by :meth:`close`.
            workers: threads that read.
            queue_pages: most pages whose reads may be outstanding; by default what 1 GiB holds, and
                never more than host memory.
            write_queue_pages: likewise of writes; by default 256 MiB, and never more than half of host
                memory, since a page that is being written can not be evicted.

        Raises:
            ValueError: a number is not positive.
        """
        numbers = {
            "workers": workers,
            "queue_pages": queue_pages,
            "write_queue_pages": write_queue_pages,
        }
        for field, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}; leave it out")
        size, pages = host.page_bytes, host.page_count
        self.host = host
        self.store = store
        self.counters = TierCounters()
        self._finished = Finished()
        self._copies = Lane("copy", 1, self._finished)
        self._most_filling = min(max(1, FILL_BYTES // size), pages)
        self._filling = 0  # pages
        self._fills: set[Fill] = set()
        self._leases: set[Lease] = set()
        most = min(queue_pages or max(1, QUEUE_BYTES // size), pages)
        self._reader = Reader(
            host, store, self._finished, self.counters, most=most, threads=workers
        )
        self._writer: Writer | None = None
        if store is not None:
            most = min(write_queue_pages or max(1, WRITE_BYTES // size), max(1, pages // 2))
            self._writer = Writer(host, store, self._finished, self.counters, most)
            host.rescue = self._writer.rescue

    # --- look-up ---------------------------------------------------------------------------------

    def held(self, names: Sequence[PageName]) -> int:
        """Leading pages that are in host memory under exactly these names."""
        return sum(1 for _ in self.host.leading(names))

    def holds(self, names: Sequence[PageName], worth: Sequence[Worth] | None = None) -> list[bool]:
        """Which pages host memory has or is being given: they need not be demoted.

        With ``worth`` those count as used now, as they must when they leave the device.
        """
        found = [self.host.entry(name) for name in names]
        for entry, now in zip(found, worth or (), strict=False):
            if entry is not None:
                self.host.use(entry, now)
        return [entry is not None for entry in found]

    def known(self, names: Sequence[PageName]) -> int:
        """Leading pages that host memory has or is being given, or that the store says it has.

        The store is asked by ``contains``, once in a while for each page.
        """
        return self._reader.known(names)

    # --- up --------------------------------------------------------------------------------------

    def prefetch(
        self, names: Sequence[PageName], owner: str, *, start: int = 0, shared: bool = False
    ) -> Ticket | None:
        """Bring the leading pages that a lower tier has into host memory.

        Pages that are there already, or on their way for somebody else, are part of the ticket. It
        keeps all of them until it is cancelled, which is the caller's to do: once it has leased them,
        or when the request is aborted. Where nothing is queued and yet more is missing than the queue
        has places, the ticket is for as many pages as it has.

        Args:
            names: pages one behind the other.
            owner: the request, for :meth:`cancel`.
            start: tokens before the first of them, and ``shared``: whether they are of a span's body;
                what their worth goes by.

        Returns:
            None when refused: nothing of it is known, or the queue or host memory has no room.
        """
        return self._reader.ticket(names, owner, start, shared)

    def cancel(self, owner: str) -> None:
        """Cancel all tickets of a request."""
        self._reader.cancel(owner)

    def lease(self, names: Sequence[PageName], pages: int) -> Lease | None:
        """Pin up to ``pages`` leading pages that host memory has, to be copied to the device.

        None when it has not even the first.
        """
        entries = list(self.host.leading(names[:pages]))
        if not entries:
            return None
        lease = Lease(self.host, entries, self.counters, self._leases.remove)
        self._leases.add(lease)
        return lease

    # --- down ------------------------------------------------------------------------------------

    def accepts(self) -> bool:
        """Whether pages that are in no hurry to go down would go on at once."""
        behind = self._writer is not None and self._writer.behind
        return self._filling < self._most_filling and not behind

    def demote(self, names: Sequence[PageName], worth: Sequence[Worth], data: torch.Tensor) -> int:
        """Keep pages that leave the device, or copies of ones that stay. Returns how many are kept.

        ``data`` is uint8 [n, page_bytes], contiguous, a page a row, and the stack's from here on. On a
        CUDA device it may still be written on the current stream. Pages come in the order in which
        they leave the device: where not all have room, the first are dropped.
        """
        assert data.dtype == torch.uint8 and data.is_contiguous()
        assert data.shape == (len(names), self.host.page_bytes) and len(worth) == len(names)
        entries: list[Entry] = []
        rows: list[int] = []
        kept = 0
        for row in range(len(names) - 1, -1, -1):
            entry = self.host.entry(names[row])
            if entry is not None:
                self.host.use(entry, worth[row])
                self.counters.already_held += 1
                kept += 1
                continue
            entry = self.host.reserve(names[row], worth[row], dirty=self.store is not None)
            if entry is None:
                self.counters.dropped += 1
                continue
            entries.append(entry)
            rows.append(row)
        if entries:
            self._fill(entries, rows, data)
        self.counters.demoted += len(entries)
        return kept + len(entries)

    def _fill(self, entries: list[Entry], rows: list[int], data: torch.Tensor) -> None:
        ready = None
        if data.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(data.device))
        job = Fill(self.host, entries, rows, data, ready)
        fits = self._filling + len(entries) <= self._most_filling
        self._fills.add(job)
        self._filling += len(entries)
        if fits:
            self._copies.submit(job)
        else:
            attempt(job)
            self._finished.put(job)

    def _filled(self, job: Fill) -> None:
        self._fills.remove(job)
        self._filling -= len(job.entries)
        for number, entry in enumerate(job.entries):
            if entry.alive and job.failed:
                self.host.drop(entry)
            elif entry.alive:
                self.host.seal(entry, job.checksums[number])
                if self._writer is not None:
                    self._writer.add(entry)
            self.host.unpin(entry)

    # --- steps -----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take up what threads finished, and queue writes that have room now. O(what finished)."""
        while (job := self._finished.take()) is not None:
            self.counters.worker_faults += job.failed
            if isinstance(job, Fill):
                self._filled(job)
            elif isinstance(job, Read):
                self._reader.landed(job)
            elif isinstance(job, Write):
                assert self._writer is not None
                self._reader.stored(self._writer.written(job))
        if self._writer is not None:
            self._writer.feed()
        self._reader.tick()

    @property
    def busy(self) -> bool:
        """Whether threads have something to do, or did something that is not taken up yet."""
        writing = self._writer is not None and self._writer.busy
        return bool(self._filling or self._reader.reading) or writing

    def drain(self, timeout: float) -> bool:
        """Wait, ``timeout`` seconds at most, until all that is queued is done; whether it is."""
        deadline = time.monotonic() + timeout
        self.poll()
        while self.busy:
            if not self._finished.wait(deadline):
                return False
            self.poll()
        return True

    def close(self, timeout: float = 60.0) -> bool:
        """Drop queued reads, write what is dirty, end the threads, close the store.

        Returns whether everything that the store takes was written within ``timeout`` seconds.
        """
        self._reader.cancel()
        drained = self.drain(timeout)
        if not drained:
            logger.warning("lower tiers: closed while pages are not written: %s", self.sizes())
        deadline = time.monotonic() + JOINED_S
        lanes = (self._copies, self._reader.lane, self._writer.lane if self._writer else None)
        ended = [lane.close(deadline) for lane in lanes if lane is not None]
        if self.store is not None:
            if all(ended):
                self.store.close()
            else:
                logger.warning("lower tiers: the store does not answer and is left as it is")
        return drained and all(ended)

    def clear(self) -> None:
        """Empty host memory, for a flush. What threads are at comes to nothing; the store stays."""
        self._reader.cancel()
        if self._writer is not None:
            self._writer.clear()
        self.host.clear()

    def sizes(self) -> Sizes:
        """What is where. O(pages)."""
        return Sizes(
            host_pages=len(self.host),
            host_bytes=len(self.host) * self.host.page_bytes,
            dirty_pages=sum(entry.dirty for entry in self.host.entries()),
            filling_pages=self._filling,
            reading_pages=self._reader.reading,
            writing_pages=self._writer.writing if self._writer is not None else 0,
        )

    def check_invariants(self) -> None:
        """Assert everything that must hold between operations. O(pages)."""
        jobs: list[Fill | Read | Write] = [*self._fills, *self._reader.jobs]
        if self._writer is not None:
            self._writer.check_invariants()
            jobs += self._writer.jobs
        self._reader.check_invariants()
        assert self._filling == sum(len(job.entries) for job in self._fills)
        check(self.host, self._reader.tickets, self._leases, jobs)
