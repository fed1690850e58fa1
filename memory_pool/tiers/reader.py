"""Which pages are read from the store into host memory, for whom, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..host import HostTier
from ..keys import TOKEN_BYTES
from ..lower import PageName, Store, Worth
from ..worth import Entry
from .jobs import Read
from .lanes import Finished, Lane
from .presence import Presence
from .records import TierCounters
from .ticket import Ticket

JOB_BYTES = 8 << 20  # more than one thread may serve a request, and what is queued be given up
JOB_PAGES = (
    16  # small pages too: a slow store gives a request that stops waiting a part of its pages
)


class Reader:
    """Tickets, and the reads behind them: not more than ``most`` pages at a time.

    Without a store, tickets are for pages that are in host memory or being copied there.
    """

    def __init__(
        self,
        host: HostTier,
        store: Store | None,
        finished: Finished,
        counters: TierCounters,
        *,
        most: int,
        threads: int,
    ) -> None:
        self.lane = Lane("read", threads, finished) if store is not None else None
        self.reading = 0  # pages
        self.most = most
        self._host = host
        self._store = store
        self._presence = Presence(store) if store is not None else None
        self._counters = counters
        self._job_pages = max(1, min(JOB_BYTES // host.page_bytes, JOB_PAGES))
        self._reads: dict[Entry, Read] = {}
        self._tickets: dict[str, set[Ticket]] = {}

    def known(self, names: Sequence[PageName]) -> int:
        """Leading pages that host memory has or gets, or that the store says it has."""
        lacking = [number for number, name in enumerate(names) if self._host.entry(name) is None]
        if not lacking:
            return len(names)
        if self._presence is None:
            return lacking[0]
        stored = self._presence.leading([names[number] for number in lacking])
        return lacking[stored] if stored < len(lacking) else len(names)

    def ticket(
        self, names: Sequence[PageName], owner: str, start: int, shared: bool
    ) -> Ticket | None:
        """See :meth:`TierStack.prefetch`."""
        wanted = names[: self.known(names)]
        there = [self._host.entry(name) for name in wanted]
        missing = sum(entry is None for entry in there)
        entries: list[Entry] = []
        if missing <= self.most - self.reading or not self.reading:
            entries = self._gather(wanted, there, start, shared)
        if not entries:
            self._counters.prefetches_refused += 1
            return None
        ticket = Ticket(self._host, owner, entries, self._on_cancel)
        self._tickets.setdefault(owner, set()).add(ticket)
        return ticket

    def _gather(
        self, names: Sequence[PageName], there: list[Entry | None], start: int, shared: bool
    ) -> list[Entry]:
        """Pin what is there and reserve slots for the rest, as far as room goes."""
        host = self._host
        for entry in there:
            if entry is not None:  # before room is made for others
                host.pin(entry)
        entries: list[Entry] = []
        reading: list[Entry] = []
        for number, (name, entry) in enumerate(zip(names, there, strict=True)):
            if entry is None:
                full = self.reading + len(reading) == self.most
                entry = None if full else host.reserve(name, Worth(start, shared, 0))
                if entry is None:
                    self._unpin(late for late in there[number:] if late is not None)
                    break
                reading.append(entry)
                host.pin(entry)  # the ticket's pin, beside that of the read
            entries.append(entry)
            start += len(name.tokens) // TOKEN_BYTES
        self._submit(reading)
        return entries

    def _submit(self, entries: list[Entry]) -> None:
        for at in range(0, len(entries), self._job_pages):
            assert self._store is not None and self.lane is not None
            job = Read(self._host, self._store, entries[at : at + self._job_pages])
            self._reads.update(dict.fromkeys(job.entries, job))
            self.reading += len(job.entries)
            self.lane.submit(job)

    def landed(self, job: Read) -> None:
        """Take up what a job did."""
        assert self._presence is not None
        self.reading -= len(job.entries)
        for entry in job.entries:
            del self._reads[entry]
            if entry.alive and entry in job.landed:
                self._host.seal(entry, job.landed[entry])
                self._counters.from_store += 1
            elif entry.alive:
                self._counters.read_misses += 1
                self._presence.note(entry.name.key, False)
                self._host.drop(entry)
            self._host.unpin(entry)

    def stored(self, entries: Iterable[Entry]) -> None:
        """The store took pages."""
        assert self._presence is not None
        for entry in entries:
            self._presence.note(entry.name.key, True)

    def tick(self) -> None:
        """A step went by."""
        if self._presence is not None:
            self._presence.tick()

    def cancel(self, owner: str | None = None) -> None:
        """Cancel the tickets of one request; None for all."""
        for name in [owner] if owner is not None else list(self._tickets):
            for ticket in list(self._tickets.get(name, ())):
                ticket.cancel()

    def _on_cancel(self, ticket: Ticket) -> None:
        tickets = self._tickets[ticket.owner]
        tickets.remove(ticket)
        if not tickets:
            del self._tickets[ticket.owner]
        for job in {self._reads[entry]: None for entry in ticket.entries if entry in self._reads}:
            assert self.lane is not None
            wanted = any(entry.pins > 1 for entry in job.entries)  # one pin is the read's
            if wanted or not self.lane.withdraw(job):
                continue
            self.reading -= len(job.entries)
            self._counters.prefetch_cancelled += len(job.entries)
            for entry in job.entries:
                del self._reads[entry]
                if entry.alive:
                    self._host.drop(entry)
                self._host.unpin(entry)

    def _unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._host.unpin(entry)

    @property
    def tickets(self) -> list[Ticket]:
        """All that are not cancelled."""
        return [ticket for tickets in self._tickets.values() for ticket in tickets]

    @property
    def jobs(self) -> set[Read]:
        """Reads that are queued, begun, or not taken up yet."""
        return set(self._reads.values())

    def check_invariants(self) -> None:
        """Assert that no more is read than there is room for."""
        assert self.reading == len(self._reads) <= self.most
        assert self.reading == sum(len(job.entries) for job in self.jobs)
