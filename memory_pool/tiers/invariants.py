"""What must hold between two operations on the tiers. For tests; nothing here is fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..host import HostTier
from ..worth import Entry
from .jobs import Fill, Read, Write
from .lease import Lease
from .ticket import Ticket


def check(
    host: HostTier,
    tickets: Iterable[Ticket],
    leases: Iterable[Lease],
    jobs: Iterable[Fill | Read | Write],
) -> None:
    """Assert that every pin is somebody's, and that a page is filled by exactly one job."""
    host.check_invariants()
    pins: Counter[Entry] = Counter()
    for holder in (*tickets, *leases, *jobs):
        pins.update(holder.entries)
    fillers = Counter(entry for job in jobs if not isinstance(job, Write) for entry in job.entries)
    for entry in host.slots():
        assert entry.pins == pins[entry], "a pin that is nobody's"
        assert fillers[entry] == (not entry.ready and entry.alive) or not entry.alive
    assert set(pins) <= set(host.slots()), "somebody keeps a page that has no slot"
