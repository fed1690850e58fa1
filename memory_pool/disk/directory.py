"""A store's directory: what is where, who may change what, and damage put aside.

DIR/segments/ID-PID.seg      records; appended to by one process, holes punched by any
DIR/index.N.sqlite           the index, of which the highest number counts
DIR/manifests/DIGEST.json    what records of a digest are of
DIR/quarantine/              damaged records as they were found, the last few
DIR/lock                     held while segments are created, looked through, or removed
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

from . import files
from .counters import Counters
from .index import Index, Place
from .segments import OpenSegments, Segment

logger = logging.getLogger(__name__)

_INDEX = re.compile(r"index\.([0-9]{1,9})\.sqlite")
_CHECKED_BYTES = 32 << 20  # an index up to this size is looked through when it is opened
_QUIET_S = 60.0  # between two messages of a kind


class Directory:
    """The files of a store, whatever they are of. Any thread, but where methods say otherwise."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool,
        quarantine_bytes: int = 64 << 20,
        quarantine_files: int = 64,
    ) -> None:
        """Opens no index yet.

        Raises:
            ValueError: there is no directory, or none can be made.
        """
        self.path = path
        self.segments_path = path / "segments"
        self.quarantine_path = path / "quarantine"
        self.manifests_path = path / "manifests"
        self.counters = Counters()
        self.segments = OpenSegments(self.segments_path)
        self._quarantine_bytes = quarantine_bytes
        self._quarantine_files = quarantine_files
        self._generation = 0
        self._index: Index | None = None
        self._seen_ns = -1
        self._said: dict[str, float] = {}
        self._lock = threading.Lock()  # of quarantine
        self._saying = threading.Lock()
        if not create and not self.segments_path.is_dir():
            raise ValueError(f"{path} holds no store: it has no directory segments")
        if create:
            try:
                self.make()
            except OSError as error:
                raise ValueError(
                    f"the store's directory {path} can not be made ({error.strerror}); name one "
                    "that this user may write to"
                ) from error
        self.punches = files.can_punch(self.segments_path)

    def make(self) -> None:
        """Make the directories that are missing, for this user alone. Raises OSError."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (self.segments_path, self.quarantine_path, self.manifests_path):
            each.mkdir(parents=True, exist_ok=True)

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from creating and removing files. Raises OSError."""
        return files.locked(self.path / "lock")

    # --- the index -------------------------------------------------------------------------------

    @property
    def index(self) -> Index:
        """The generation that is open."""
        assert self._index is not None, "no index is open"
        return self._index

    def open_index(self) -> bool:
        """Open the generation that counts; False where there is none that can be used."""
        generation = max(self._generations(), default=0)
        if not generation:
            return False
        path = self.index_path(generation)
        try:
            index = Index(path)
            try:
                if path.stat().st_size <= _CHECKED_BYTES:
                    index.check()
            except BaseException:
                index.close()
                raise
        except (sqlite3.Error, OSError, OverflowError, ValueError) as error:
            self.say("index", f"the index {path} can not be used ({error}): it is made again")
            return False
        self._use(index, generation)
        return True

    def next_index(self) -> tuple[Index, int]:
        """An empty generation under a draft name, to be filled and taken by :meth:`publish`."""
        generation = max([self._generation, *self._generations()]) + 1
        draft = self.path / f"index.{generation}.sqlite.{os.getpid()}.tmp"
        for left in self.path.glob(f"{draft.name}*"):
            left.unlink()
        return Index(draft, create=True), generation

    def publish(self, index: Index, generation: int) -> None:
        """Close a draft and make it the generation that counts; those before it go."""
        draft = index.path
        index.close()
        os.replace(draft, self.index_path(generation))
        files.sync_directory(self.path)
        self._use(Index(self.index_path(generation)), generation)
        self.remove_old_indexes()

    def remove_old_indexes(self) -> None:
        """Whoever still has one open goes on with what it sees, then comes here."""
        for generation in self._generations():
            if generation < self._generation:
                for path in self.path.glob(f"index.{generation}.sqlite*"):
                    path.unlink(missing_ok=True)

    def superseded(self) -> bool:
        """Whether the index that is open counts no more. One stat while the directory is unchanged."""
        try:
            changed_ns = os.stat(self.path).st_mtime_ns
        except OSError:
            return True
        if changed_ns == self._seen_ns:
            return False
        self._seen_ns = changed_ns
        return max(self._generations(), default=0) != self._generation

    def index_path(self, generation: int) -> Path:
        """The file of a generation."""
        return self.path / f"index.{generation}.sqlite"

    def _use(self, index: Index, generation: int) -> None:
        old, self._index, self._generation = self._index, index, generation
        if old is not None:
            old.close()

    def _generations(self) -> list[int]:
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return [int(found[1]) for name in names if (found := _INDEX.fullmatch(name))]

    def close(self) -> None:
        """Close all files."""
        self.segments.clear()
        if self._index is not None:
            self._index.close()

    # --- records that go -------------------------------------------------------------------------

    def punch(self, place: Place) -> None:
        """Give a record's blocks back; where holes can not be punched, mark it as none.

        An error is counted and leaves an orphan, which the next open or gc looks for.
        """
        try:
            segment = Segment(self.segments_path, place.segment, os.O_RDWR)
            if self.punches:
                files.punch(segment.fd, place.offset, place.bytes)
            elif place.offset < os.fstat(segment.fd).st_size:
                os.pwrite(segment.fd, bytes(4096), place.offset)
        except FileNotFoundError:
            return
        except OSError as error:
            self.counters.add(io_errors=1)
            self.say("punch", f"no hole can be punched into {place.segment}: {error}")

    def remove_if_dead(self, name: str) -> bool:
        """Remove a segment without records, unless a process appends to it."""
        path = self.segments_path / name
        try:
            segment = Segment(self.segments_path, name)
            if not files.lock_now(segment.fd) or next(self.index.places(name), None):
                return False
            size = os.fstat(segment.fd).st_blocks * 512
            path.unlink()
        except FileNotFoundError:
            size = 0
        except OSError:
            return False
        self.index.drop_segment(name)
        self.segments.forget(name)
        self.counters.add(reclaimed_bytes=size)
        return True

    # --- damage ----------------------------------------------------------------------------------

    def put_aside(self, segment: Segment, offset: int, size: int, reason: str) -> None:
        """Copy what is there to quarantine, at most half of what that holds, and count it."""
        self.counters.quarantine(reason)
        self.say(
            reason,
            f"a damaged record ({reason}) in {segment.name} at {offset}: put aside in "
            f"{self.quarantine_path}, and a miss",
        )
        size = min(size, self._quarantine_bytes // 2)
        name = f"{time.time_ns():020d}-{reason}-{segment.name}-{offset}.bin"
        try:
            content = os.pread(segment.fd, size, offset)
            with self._lock:
                self.trim_quarantine(len(content))
                (self.quarantine_path / name).write_bytes(content)
        except OSError as error:
            self.counters.add(io_errors=1)
            self.say("quarantine", f"a damaged record can not be put aside: {error}")

    def trim_quarantine(self, room: int = 0) -> None:
        """Remove the oldest until there is room for one more of that size. Raises OSError."""
        found = sorted(self.quarantine_path.iterdir())
        sizes = [-(-path.stat().st_size // 4096) * 4096 for path in found]
        room = -(-room // 4096) * 4096
        number = 0
        while number < len(found) and (
            sum(sizes[number:]) + room > self._quarantine_bytes
            or len(found) - number + bool(room) > self._quarantine_files
        ):
            found[number].unlink(missing_ok=True)
            self.counters.add(reclaimed_bytes=sizes[number])
            number += 1

    def say(self, kind: str, message: str) -> None:
        """Log a warning, one of a kind a minute."""
        now = time.monotonic()
        with self._saying:
            if now - self._said.get(kind, -_QUIET_S) < _QUIET_S:
                return
            self._said[kind] = now
        logger.warning("%s", message)
