"""The writing side of a disk store: room under the cap, the segment, the index, syncs, full disks."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..lower import PageName, Worth
from . import files
from .directory import Directory
from .identity import Identity
from .index import Place, damaged
from .reconcile import open_and_reconcile, rebuild, reconcile
from .record import BLOCK, Header, header_size, pack, rounded
from .segments import Appended

_BATCH_BYTES = 64 << 20  # records that become visible together, at most


@dataclass(frozen=True, slots=True)
class Sync:
    """When a segment is synced on the way: at the first write past either."""

    bytes: int = 64 << 20
    seconds: float = 5.0


NO_SYNC = Sync(1 << 62, float("inf"))  # only by flush


class Writer:
    """What a process writes by. Its methods are called with ``lock`` held."""

    def __init__(
        self,
        directory: Directory,
        identity: Identity,
        room: int,
        segment_bytes: int,
        sync: Sync,
        retry_s: float,
    ) -> None:
        self.lock = threading.RLock()
        self.room = room  # bytes for segments, of all processes
        self._directory = directory
        self._identity = identity
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._retry_s = retry_s
        self._own: Appended | None = None
        self._synced_at = time.monotonic()
        self._stopped_at = 0.0

    # --- whether it writes -----------------------------------------------------------------------

    def may_write(self) -> bool:
        """Whether to try; after a stop not before ``retry_s`` has passed."""
        counters = self._directory.counters
        if counters.writing:
            return True
        if time.monotonic() - self._stopped_at < self._retry_s:
            return False
        if not self._directory.segments_path.is_dir() or self._directory.superseded():
            try:
                self._directory.make()
                self.seal()
                self.reopen(damaged=False)
            except (OSError, sqlite3.Error) as error:
                self.stop(error)
                return False
        counters.writing, counters.reason = True, ""
        return True

    def stop(self, error: Exception) -> None:
        """Write no more for a while, and say so once; reading goes on."""
        counters = self._directory.counters
        reason = (
            os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        )
        if counters.writing:
            counters.add(write_stopped=1)
        if counters.reason != reason:
            self._directory.say(
                f"stopped {reason}",
                f"{self._directory.path}: writing stops ({reason}) and is tried again every "
                f"{self._retry_s:g} s; reading goes on",
            )
        counters.writing, counters.reason = False, reason
        self._stopped_at = time.monotonic()

    # --- records ---------------------------------------------------------------------------------

    def write(
        self, names: Sequence[PageName], pages: Sequence[memoryview], worth: Sequence[Worth]
    ) -> None:
        """Store pages whose keys the index does not have. What fails is counted, and writing stops.

        Raises:
            INDEX_ERRORS: the index is damaged.
        """
        sizes = [header_size(name, self._identity.layout) + rounded(len(page))
                 for name, page in zip(names, pages, strict=True)]  # fmt: skip
        for batch in self._batches(sizes):
            try:
                if not self._room_for(sum(sizes[n] for n in batch)):
                    self._directory.counters.add(refused=len(batch))
                    return
                self._append(batch, names, pages, worth)
            except OSError as error:
                self._directory.counters.add(io_errors=int(error.errno not in files.FULL))
                self.stop(error)
                return
            except sqlite3.OperationalError as error:  # full, read-only, busy for too long
                if damaged(error):
                    raise
                self.stop(error)
                self._give_up()
                return
            if not self._directory.counters.writing:
                return
        self._sync_by_policy()

    def _append(
        self,
        batch: Sequence[int],
        names: Sequence[PageName],
        pages: Sequence[memoryview],
        worth: Sequence[Worth],
    ) -> None:
        own = self._own
        assert own is not None, "room was made in a segment"
        counters = self._directory.counters
        headers: list[Header] = []
        total = 0
        for number in batch:
            name, page = names[number], pages[number]
            block = pack(
                name,
                worth[number],
                page,
                segment=own.id,
                offset=own.end,
                manifest=self._identity.digest,
                layout=self._identity.layout,
            )
            at = own.end
            try:
                total += files.retried(
                    lambda block=block, page=page: own.append(memoryview(block), page),  # type: ignore[misc]
                    lambda: counters.add(retries=1),
                )
            except OSError as error:
                counters.add(io_errors=int(error.errno not in files.FULL))
                self.stop(error)
                break
            headers.append(
                Header(
                    len(block),
                    len(page),
                    at,
                    own.id,
                    self._identity.digest,
                    name,
                    self._identity.layout,
                    worth[number],
                    bytes(block[8:24]),
                )
            )
        kept_out = self._directory.index.add(own.name, headers, own.end)
        for header in kept_out:  # another process was faster
            size = header.record_bytes
            self._directory.punch(Place(0, 0, own.name, header.offset, size))
            total -= size
        counters.add(written_records=len(headers) - len(kept_out), written_bytes=total)

    def _batches(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of records that are reserved, written and shown at once."""
        most = min(_BATCH_BYTES, self.room // 4, max(BLOCK, self._segment_bytes - BLOCK))
        batch: list[int] = []
        total = 0
        for number, size in enumerate(sizes):
            if batch and total + size > most:
                yield batch
                batch, total = [], 0
            batch.append(number)
            total += size
        if batch:
            yield batch

    # --- room ------------------------------------------------------------------------------------

    def _room_for(self, size: int) -> bool:
        """Have a segment for so many bytes and room under the cap; False where none can be made."""
        own = self._own
        if own is not None and os.fstat(own.fd).st_nlink == 0:
            self.seal()  # somebody removed the file
        elif own is not None and own.end > BLOCK and own.end + size > self._segment_bytes:
            self.seal()
        if self._own is None:
            if not self._evict_for("", size + BLOCK):
                return False
            with self._directory.locked():
                self._own = Appended(self._directory.segments_path)
                files.sync_directory(self._directory.segments_path)
                self._directory.index.add_segment(self._own.name)
        return self._evict_for(self._own.name, size)

    def _evict_for(self, segment: str, size: int) -> bool:
        """Make room for so many bytes and reserve them for the segment, in one transaction.

        Blocks are given back before the transaction ends: no other process counts on them while they
        are still taken. If this one dies in between, a row leads to a hole, which is a miss.
        """
        index, punches = self._directory.index, self._directory.punches
        gone: list[Place] = []
        with index.change() as sql:
            index.reserve(sql, segment, 0)
            while index.used_in(sql) + size > self.room:
                victims = index.victims(sql, not punches, segment)
                if not victims:
                    return False
                short = index.used_in(sql) + size - self.room
                if punches:
                    victims = _enough(victims, short)
                index.evict(sql, victims)
                for place in victims:
                    self._directory.punch(place)
                gone += victims
            index.reserve(sql, segment, size)
        self._directory.counters.add(
            evicted_records=len(gone), evicted_bytes=sum(place.bytes for place in gone)
        )
        for name in {place.segment for place in gone} - {segment}:
            self._directory.remove_if_dead(name)
        return True

    # --- segments --------------------------------------------------------------------------------

    def sync(self) -> bool:
        """Make the segment durable; whether it is. A failure is counted, and writing stops."""
        self._synced_at = time.monotonic()
        if self._own is None or not self._own.unsynced:
            return True
        try:
            self._own.sync()
        except OSError as error:
            self._directory.counters.add(sync_errors=1)
            self.stop(error)
            return False
        self._directory.counters.add(syncs=1)
        return True

    def _sync_by_policy(self) -> None:
        own, waited = self._own, time.monotonic() - self._synced_at
        if own is not None and (own.unsynced >= self._sync.bytes or waited >= self._sync.seconds):
            self.sync()

    def seal(self) -> None:
        """Append no more to the segment; the next write begins another. Synced, whatever the policy."""
        self.sync()
        self._give_up()

    def _give_up(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def reopen(self, *, damaged: bool) -> None:
        """Open the generation of the index that counts, or make one; the segment is sealed.

        Raises:
            OSError, sqlite3.Error.
        """
        directory = self._directory
        if damaged:
            with directory.locked():
                if directory.superseded() and directory.open_index():
                    reconcile(directory)
                else:
                    rebuild(directory)
        else:
            open_and_reconcile(directory)


def _enough(victims: list[Place], size: int) -> list[Place]:
    """The first of them that make up so many bytes; all if they do not."""
    total = 0
    for number, place in enumerate(victims):
        total += place.bytes
        if total >= size:
            return victims[: number + 1]
    return victims
