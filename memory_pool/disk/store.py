"""Pages of KV in a directory: found by name, verified when read, evicted by what they are worth.

    store = DiskStore.open(path, manifest=b"{...}", page_bytes=n, layout=b"{...}", capacity_bytes=c)
    store.write(names, pages, worth)
    landed = store.read(names, into)

*A record is visible when it is whole*: it is written to the end of this process's segment, then its row
is added to the index. What ``write`` returned True for survives kill -9, since the system has it. It
survives power loss once ``flush`` returned True, or the segment was synced by policy (:class:`Sync`);
later records may be gone or torn then, which their checksums tell.

*The cap* covers segments and quarantine of the directory, whoever wrote them, in blocks of the disk.
Whoever writes counts in one transaction of the index what there is, evicts, gives the blocks back by
punching holes and reserves its own, so that no sum of writers passes it. Holes rather than whole
segments: worth is that of single pages, and a segment that holds a few dear ones would keep, or take
along, everything beside them. Where holes can not be punched, whole segments go, and they are small. The
index itself, some 300 bytes a record, is not counted.

*Who goes*: GreedyDual-Size-Frequency over all records of the directory, as in host memory
(:mod:`memory_pool.worth`); pages of spans cost four times as much to miss.

*Threads*: reads run side by side, and beside a write. Look-ups hold a lock for the time of a query,
about 4 us a name; writes are one at a time. Nothing here starts a thread: checksums are taken piece by
piece as a page comes, out of the cache, and a second thread for them made reading slower on two cores.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..lower import PageName, Worth
from . import files
from .counters import Counters
from .directory import Directory
from .identity import Identity
from .index import INDEX_ERRORS, Index, Place, damaged
from .reconcile import discard, open_and_reconcile, verify_sample
from .record import BLOCK, Damaged, Header, header_size, name_tag, rounded
from .segments import Segment
from .writing import Sync, Writer

SEGMENT_BYTES = 256 << 20
_TOUCHED_AT_MOST = 1024  # rows whose uses are written down with the next write, or when so many
_QUARANTINE_BYTES = 64 << 20
_T = TypeVar("_T")


class DiskStore:
    """A :class:`~memory_pool.lower.Store` in a directory that several processes may share."""

    def __init__(self, directory: Directory, identity: Identity, writer: Writer) -> None:
        """Use :meth:`open`."""
        self._directory = directory
        self._identity = identity
        self._writer = writer
        self._manifest: tuple[Index, int] | None = None  # its number in a generation of the index
        self._touched: Counter[int] = Counter()
        self._touching = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        manifest: bytes,
        page_bytes: int,
        layout: bytes,
        capacity_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        fsync: Sync | None = None,
        retry_s: float = 30.0,
        sample: int = 8,
    ) -> DiskStore:
        """Open a directory, or make one; index and segments agree afterwards.

        Args:
            manifest: JSON; what KV is computed by: model, weights, dtype, ranks.
            page_bytes: of a page.
            layout: small JSON: regions and dtypes of a page, in every record.
            capacity_bytes: of all segments and quarantine in the directory.
            segment_bytes: after which a new segment is begun.
            fsync: when segments are synced on the way; None for the defaults of :class:`Sync`.
            retry_s: after which writing is tried again when it had to stop.
            sample: records that are read whole, chosen at random.

        Raises:
            ValueError: a setting is wrong, or the directory can not be used; with the remedy.
        """
        identity = Identity.of(manifest, page_bytes, layout)
        quarantine = min(_QUARANTINE_BYTES, capacity_bytes // 16)
        room = capacity_bytes - quarantine
        least = rounded(page_bytes) + 4 * BLOCK
        if page_bytes < 1 or room < least:
            raise ValueError(
                f"disk_tier_bytes = {capacity_bytes} holds no page of {page_bytes} bytes; give at "
                f"least {2 * least}"
            )
        directory = Directory(Path(path), create=True, quarantine_bytes=quarantine)
        if not directory.punches:  # whole segments are evicted: several have to fit
            segment_bytes = max(least, min(segment_bytes, room // 8))
        try:
            open_and_reconcile(directory)
            with directory.locked():
                identity.save(directory.manifests_path)
        except (OSError, sqlite3.Error) as error:
            directory.close()
            raise ValueError(
                f"disk_tier_path = {str(path)!r} can not be used ({error}); name a directory that "
                "this user may read and write"
            ) from error
        sync = Sync() if fsync is None else fsync
        writer = Writer(directory, identity, room, segment_bytes, sync, retry_s)
        store = cls(directory, identity, writer)
        store._on_index(lambda _: verify_sample(directory, sample))
        store.contains([])  # the one look-up that writes to the index: it numbers the manifest
        return store

    # --- Store -----------------------------------------------------------------------------------

    def contains(self, names: list[PageName]) -> list[bool]:
        """Which pages it holds by the index: one query for 500 names, about 4 us a name.

        A record of the same key and another name is none.
        """
        found = self._places(names)
        return [_is_of(found.get(name.key), name) for name in names]

    def read(self, names: list[PageName], into: memoryview) -> list[bool]:
        """Read pages into ``into`` (page_bytes each, in order); which of them landed, verified.

        Where one did not, its part of ``into`` may hold anything.
        """
        size = self._identity.page_bytes
        into = into.cast("B")
        assert len(into) == len(names) * size, "room for a page for each name"
        found = self._places(names)
        landed = [False] * len(names)
        wanted = []
        for number, name in enumerate(names):
            place = found.get(name.key)
            if place is not None and place.tag == name_tag(name):
                wanted.append((place.segment, place.offset, number, place))
            elif place is not None:
                self.counters.add(collisions=1)
        rows = []
        for _, _, number, place in sorted(wanted, key=lambda one: one[:3]):
            part = into[number * size : (number + 1) * size]
            landed[number] = self._read(names[number], place, part)
            if landed[number]:
                rows.append(place.row)
        count = len(rows)
        self.counters.add(read_records=count, read_bytes=count * size, missed=len(names) - count)
        self._touch(rows)
        return landed

    def write(self, names: list[PageName], pages: memoryview, worth: list[Worth]) -> list[bool]:
        """Store pages that it does not hold; which of them it holds now."""
        size = self._identity.page_bytes
        pages = pages.cast("B")
        assert len(pages) == len(names) * size and len(worth) == len(names), "a page for each name"
        with self._writer.lock:
            if self._closed:
                return [False] * len(names)
            if not self._writer.may_write():
                return self.contains(names)
            self._keep_up()
            self._write_touched()
            found = self._places(names)
            new: dict[bytes, int] = {}
            for number, name in enumerate(names):
                place = found.get(name.key)
                if place is None:
                    new.setdefault(name.key, number)
                elif place.tag != name_tag(name):
                    self.counters.add(collisions=1)
            numbers = list(new.values())
            parts = [pages[number * size : (number + 1) * size] for number in numbers]
            self._on_index(
                lambda _: self._writer.write(
                    [names[n] for n in numbers], parts, [worth[n] for n in numbers]
                )
            )
            return self.contains(names)

    def close(self) -> None:
        """Finish what was acknowledged, and let go of all files. A second call does nothing."""
        with self._writer.lock:
            if self._closed:
                return
            self._closed = True
            self._write_touched()
            self._writer.seal()
            self._directory.close()

    # --- beside it -------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """What happened since it was opened."""
        return self._directory.counters

    @property
    def damaged(self) -> int:
        """Records that were read and were not what had been written; only grows."""
        return sum(self.counters.quarantined.values())

    @property
    def evicted(self) -> int:
        """Records that this process dropped to make room; only grows."""
        return self.counters.evicted_records

    def state(self) -> dict[str, object]:
        """Its counters, as plain JSON."""
        return self.counters.as_dict()

    @property
    def path(self) -> Path:
        """Its directory."""
        return self._directory.path

    @property
    def digest(self) -> bytes:
        """Of what its records are of: the manifest, the layout and page_bytes."""
        return self._identity.digest

    @property
    def used_bytes(self) -> int:
        """Of all records in the directory, of writers' reservations too; 0 if the index fails."""
        return self._on_index(lambda index: index.used()) or 0

    def places(self, names: list[PageName]) -> list[Place]:
        """Where the records of those names are said to be; those that it does not hold are left out."""
        found = self._places(names)
        places = [(name, found.get(name.key)) for name in names]
        return [place for name, place in places if place is not None and _is_of(place, name)]

    def flush(self) -> bool:
        """Make everything durable that ``write`` acknowledged; whether it is."""
        with self._writer.lock:
            return not self._closed and self._writer.sync()

    def check_invariants(self) -> None:
        """For tests, while no other process changes the directory. Reads all headers.

        Raises:
            AssertionError: index and segments differ, or the cap is passed.
        """
        from .reconcile import index_equals_segments

        with self._writer.lock:
            index = self._directory.index
            assert index_equals_segments(index, self._directory), "index and segments differ"
            assert index.used() <= self._writer.room, "the cap is passed"
            total = sum(place.bytes for place in index.places())
            assert total == index.record_bytes(), "bytes of records are counted wrongly"

    # --- records ------------------------------------------------------------------------------

    def _read(self, name: PageName, place: Place, into: memoryview) -> bool:
        expected = header_size(name, self._identity.layout)
        fault = ""
        for _ in range(2):  # what fails is read again: memory and cables err, too
            try:
                segment = self._directory.segments.get(place.segment)
                header, _, sound = files.retried(
                    lambda segment=segment: segment.read(place.offset, expected, into),  # type: ignore[misc]
                    lambda: self.counters.add(retries=1),
                )
            except FileNotFoundError:
                self._missing(place)
                return False
            except OSError as error:
                self.counters.add(io_errors=1)
                self._directory.say("read", f"{place.segment} can not be read: {error}")
                return False
            except Damaged as found:
                fault = found.reason
            except files.Short:
                fault = "short"
            else:
                fault = self._fault(name, header, sound)
                if not fault:
                    return True
            if not self._on_index(lambda index: index.holds(place)):
                self.counters.add(vanished=1)
                return False
        if fault == "collision":
            self.counters.add(collisions=1)
        else:
            self._discard(segment, place, fault)
        return False

    def _fault(self, name: PageName, header: Header, sound: bool) -> str:
        """Why a record must not be used, in a word; its header is as it was written."""
        if header.manifest != self._identity.digest or header.name.key != name.key:
            return "index"  # led elsewhere: the record may be good
        if header.name != name:
            return "collision"
        if header.layout != self._identity.layout:
            return "layout"
        return "" if sound else "checksum"

    def _discard(self, segment: Segment, place: Place, fault: str) -> None:
        def run(_: Index) -> None:
            if fault == "index":
                self.counters.quarantine(fault)
                self._directory.index.drop([place])
            else:
                discard(self._directory, segment, place, fault)

        self._on_index(run)

    def _missing(self, place: Place) -> None:
        """A segment that is gone: its rows go too, unless everything is, which may come back."""
        self.counters.add(missing_segments=1)
        self._directory.segments.forget(place.segment)
        self._directory.say("missing", f"{place.segment} is gone: misses")
        if self._directory.segments_path.is_dir():
            gone = self._on_index(lambda index: index.drop([place]))
            self.counters.add(dropped_rows=gone or 0)

    # --- the index -------------------------------------------------------------------------------

    def _places(self, names: list[PageName]) -> dict[bytes, Place]:
        keys = list({name.key for name in names})

        def run(index: Index) -> dict[bytes, Place]:
            known = self._manifest
            if known is None or known[0] is not index:
                known = self._manifest = (index, index.manifest(self._identity.digest))
            return index.find(known[1], list(keys))

        return self._on_index(run) or {}

    def _on_index(self, operation: Callable[[Index], _T]) -> _T | None:
        """Run it; None where sqlite can not. A damaged index is made again, once."""
        for _ in range(2):
            index = self._directory.index
            try:
                return operation(index)
            except INDEX_ERRORS as error:
                if self._closed:
                    return None
                if index is not self._directory.index:
                    continue  # another thread made a new one meanwhile
                self.counters.add(index_errors=1)
                self._directory.say("sqlite", f"the index fails: {error}")
                if not damaged(error) or not self._renew(index, error):
                    return None
        return None

    def _renew(self, index: Index, error: Exception | None) -> bool:
        """Leave an index that is damaged or superseded; whether there is another one now."""
        with self._writer.lock:
            if index is not self._directory.index:
                return True
            self._writer.seal()
            try:
                self._writer.reopen(damaged=error is not None)
            except (OSError, *INDEX_ERRORS) as failed:
                self._directory.say("renew", f"the index can not be made again: {failed}")
                self._writer.stop(failed)
                return False
            return True

    def _keep_up(self) -> None:
        """Go where other processes went, and let go of what they deleted."""
        if self._directory.superseded():
            self._renew(self._directory.index, None)
        self._directory.segments.forget_deleted()

    def _touch(self, rows: list[int]) -> None:
        with self._touching:
            self._touched.update(rows)
            many = len(self._touched) >= _TOUCHED_AT_MOST
        if many:
            self._write_touched()

    def _write_touched(self) -> None:
        with self._touching:
            touched, self._touched = self._touched, Counter()
        if touched:
            self._on_index(lambda index: index.used_again(touched))


def _is_of(place: Place | None, name: PageName) -> bool:
    return place is not None and place.tag == name_tag(name)
