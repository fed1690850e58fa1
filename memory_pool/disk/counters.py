"""What happened in a disk store, as plain numbers that only grow, and whether it is writing now."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Of one process since it opened the store. Records are pages with their headers."""

    written_records: int = 0
    written_bytes: int = 0  # headers and padding included
    read_records: int = 0
    read_bytes: int = 0  # payload
    missed: int = 0  # names asked for by read that did not land, for whatever reason
    collisions: int = 0  # a record has the key and another name: a security signal
    vanished: int = 0  # evicted, here or by another process, between look-up and read
    missing_segments: int = 0  # opened for a record and not there
    retries: int = 0  # of reads and writes that failed for reasons that may pass
    io_errors: int = 0  # given up: a miss, or a page not stored; nothing is deleted
    index_errors: int = 0  # sqlite could not answer: misses
    index_rebuilds: int = 0
    evicted_records: int = 0
    evicted_bytes: int = 0
    refused: int = 0  # pages that no eviction makes room for
    write_stopped: int = 0  # times writing was given up for a while
    syncs: int = 0
    sync_errors: int = 0
    recovered_records: int = 0  # found in segments, not in the index
    dropped_rows: int = 0  # index rows whose record can not be there
    torn_bytes: int = 0  # cut off segments of dead writers
    reclaimed_bytes: int = 0  # of orphans: dead segments, unindexed records, left-over files
    quarantined: Counter[str] = field(default_factory=Counter)  # records by reason
    writing: bool = True
    reason: str = ""  # why it is not writing
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **amounts: int) -> None:
        """Add to counters by name. Any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def quarantine(self, reason: str) -> None:
        """Count a damaged record. Any thread."""
        with self._lock:
            self.quarantined[reason] += 1

    def as_dict(self) -> dict[str, object]:
        """For reports: plain JSON."""
        with self._lock:
            found = {
                name: getattr(self, name)
                for name in self.__dataclass_fields__
                if name not in ("_lock", "quarantined")
            }
            return {**found, "quarantined": dict(self.quarantined)}
