"""Where records are, in sqlite: shared by all servers of a directory, and made again from segments.

It says where to look and decides who goes; it is never believed. A row leads to a record that says
itself what it is, so the worst that a damaged index can do is a miss.

Write-ahead logging, without a sync a transaction: after power loss the last rows may be gone, and the
records are found again in their segments behind ``clean``. A file is never replaced under its name,
which sqlite does not survive with other processes on it: a new generation gets the next number, and
whoever sees that there is one goes there.

``used`` is what the cap is compared with: records, a block for each segment, and what writers reserved.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..worth import CostModel, GreedyDual
from .record import BLOCK, Header, name_tag

_COSTS = CostModel()
_TOKEN_BYTES = 8
_ASKED_AT_ONCE = 500
_VICTIMS_AT_ONCE = 64
# What sqlite and values of a damaged file raise; `damaged` tells which.
INDEX_ERRORS = (sqlite3.Error, ValueError, TypeError, OverflowError, IndexError)
_SCHEMA = """
CREATE TABLE segments(
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL,
    clean INTEGER NOT NULL, reserved INTEGER NOT NULL);
CREATE TABLE manifests(id INTEGER PRIMARY KEY, digest BLOB UNIQUE NOT NULL);
CREATE TABLE records(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    manifest INTEGER NOT NULL, key BLOB NOT NULL, tag INTEGER NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, bytes INTEGER NOT NULL,
    value REAL NOT NULL, uses INTEGER NOT NULL, priority REAL NOT NULL);
CREATE UNIQUE INDEX by_key ON records(manifest, key);
CREATE INDEX by_priority ON records(priority);
CREATE INDEX by_segment ON records(segment, offset);
CREATE TABLE state(name TEXT PRIMARY KEY, value NOT NULL);
INSERT INTO state VALUES ('clock', 0.0), ('record_bytes', 0), ('schema', 1);
CREATE TRIGGER grown AFTER INSERT ON records BEGIN
    UPDATE state SET value = value + NEW.bytes WHERE name = 'record_bytes'; END;
CREATE TRIGGER shrunk AFTER DELETE ON records BEGIN
    UPDATE state SET value = value - OLD.bytes WHERE name = 'record_bytes'; END;
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is said to be."""

    row: int  # never given to another record of this generation
    tag: int  # of its name
    segment: str  # file name
    offset: int
    bytes: int


class Index:
    """One generation of the index. Any thread; every method may raise ``sqlite3.Error``."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._reads, self._writes = threading.Lock(), threading.RLock()
        mode = "rwc" if create else "rw"
        self._reader = self._connect(mode)
        self._writer = self._reader
        try:
            if create:
                self._reader.executescript("PRAGMA journal_mode=WAL;" + _SCHEMA)
            if self._reader.execute("SELECT value FROM state WHERE name='schema'").fetchone() != (
                1,
            ):
                raise sqlite3.DatabaseError("an index of another schema")
            self._writer = self._connect("rw")
        except BaseException:
            self.close()
            raise

    def _connect(self, mode: str) -> sqlite3.Connection:
        found = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=20,
            isolation_level=None,
            check_same_thread=False,
        )
        found.executescript("PRAGMA synchronous=NORMAL; PRAGMA journal_size_limit=1048576;")
        return found

    def close(self) -> None:
        """Close it; nothing is pending between calls."""
        with self._writes, self._reads:
            self._writer.close()
            self._reader.close()

    def check(self) -> None:
        """Look through the whole file. O(its size).

        Raises:
            sqlite3.DatabaseError: it is damaged.
        """
        with self._reads:
            found = self._reader.execute("PRAGMA quick_check(1)").fetchone()
        if found != ("ok",):
            raise sqlite3.DatabaseError(str(found))

    # --- look-up ---------------------------------------------------------------------------------

    def find(self, manifest: int, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Places by key. One query for ``_ASKED_AT_ONCE`` keys."""
        found: dict[bytes, Place] = {}
        for at in range(0, len(keys), _ASKED_AT_ONCE):
            some = keys[at : at + _ASKED_AT_ONCE]
            marks = ",".join("?" * len(some))
            query = (
                "SELECT key, r.id, tag, s.name, offset, bytes FROM records r JOIN segments s "
                f"ON s.id = r.segment WHERE manifest = ? AND key IN ({marks})"
            )
            with self._reads:
                rows = self._reader.execute(query, (manifest, *some)).fetchall()
            for key, *place in rows:
                where = _place(place)
                if where is not None:
                    found[key] = where
        return found

    def places(self, segment: str | None = None) -> Iterator[Place]:
        """Of all records, in the order of segments and offsets."""
        query = (
            "SELECT r.id, tag, s.name, offset, bytes FROM records r JOIN segments s "
            "ON s.id = r.segment WHERE ? IS NULL OR s.name = ? ORDER BY s.name, offset"
        )
        with self._reads:
            rows = self._reader.execute(query, (segment, segment)).fetchall()
        return (place for place in map(_place, rows) if place is not None)

    def holds(self, place: Place) -> bool:
        """Whether the row still leads there."""
        query = (
            "SELECT 1 FROM records r JOIN segments s ON s.id = r.segment "
            "WHERE r.id = ? AND s.name = ? AND offset = ?"
        )
        with self._reads:
            return bool(
                self._reader.execute(query, (place.row, place.segment, place.offset)).fetchone()
            )

    def segments(self) -> dict[str, int]:
        """Clean lengths by file name: all records before are indexed, or were evicted."""
        with self._reads:
            return dict(self._reader.execute("SELECT name, clean FROM segments").fetchall())

    def used(self) -> int:
        """Bytes that count towards the cap."""
        with self._reads:
            return _used(self._reader)

    def record_bytes(self) -> int:
        """Of all records, as counted while they come and go."""
        with self._reads:
            row = self._reader.execute(
                "SELECT value FROM state WHERE name='record_bytes'"
            ).fetchone()
        return int(row[0])

    def count(self) -> int:
        """Records of all manifests."""
        with self._reads:
            return int(self._reader.execute("SELECT count(*) FROM records").fetchone()[0])

    # --- change ----------------------------------------------------------------------------------

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction against all other processes; rolled back if anything is raised."""
        with self._writes:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")

    def manifest(self, digest: bytes) -> int:
        """The number of a manifest in this generation."""
        with self.change() as sql:
            sql.execute("INSERT OR IGNORE INTO manifests(digest) VALUES (?)", (digest,))
            row = sql.execute("SELECT id FROM manifests WHERE digest = ?", (digest,)).fetchone()
        return int(row[0])

    def add_segment(self, name: str) -> None:
        """A file that has nothing but its first block."""
        with self.change() as sql:
            sql.execute(
                "INSERT OR IGNORE INTO segments(name, clean, reserved) VALUES (?, ?, 0)",
                (name, BLOCK),
            )

    def drop_segment(self, name: str) -> int:
        """Forget a segment and its records; how many those were."""
        with self.change() as sql:
            gone = sql.execute(
                "DELETE FROM records WHERE segment IN (SELECT id FROM segments WHERE name = ?)",
                (name,),
            ).rowcount
            sql.execute("DELETE FROM segments WHERE name = ?", (name,))
        return gone

    def add(self, segment: str, headers: Iterable[Header], clean: int) -> list[Header]:
        """Records become visible, and the segment clean up to there. Returns those that another
        record of the same key keeps out."""
        kept_out = []
        with self.change() as sql:
            (clock,) = sql.execute("SELECT value FROM state WHERE name='clock'").fetchone()
            row = sql.execute("SELECT id FROM segments WHERE name = ?", (segment,)).fetchone()
            if row is None:
                row = sql.execute(
                    "INSERT INTO segments(name, clean, reserved) VALUES (?, 0, 0) RETURNING id",
                    (segment,),
                ).fetchone()
            numbers: dict[bytes, int] = {}
            for header in headers:
                digest = header.manifest
                if digest not in numbers:
                    sql.execute("INSERT OR IGNORE INTO manifests(digest) VALUES (?)", (digest,))
                    numbers[digest] = sql.execute(
                        "SELECT id FROM manifests WHERE digest = ?", (digest,)
                    ).fetchone()[0]
                value, uses = _value(header), header.worth.hits
                added = sql.execute(
                    "INSERT OR IGNORE INTO records(manifest, key, tag, segment, offset, bytes, value, "
                    "uses, priority) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        numbers[digest],
                        header.name.key,
                        name_tag(header.name),
                        row[0],
                        header.offset,
                        header.record_bytes,
                        value,
                        uses,
                        clock + min(1 + uses, GreedyDual.MOST_USES) * value,
                    ),
                )
                if added.rowcount < 1:
                    kept_out.append(header)
            sql.execute(
                "UPDATE segments SET clean = MAX(clean, ?), reserved = 0 WHERE id = ?",
                (clean, row[0]),
            )
        return kept_out

    def drop(self, places: Iterable[Place]) -> int:
        """Forget records that still are where they are said to be; how many."""
        gone = 0
        with self.change() as sql:
            for place in places:
                gone += sql.execute(
                    "DELETE FROM records WHERE id = ? AND offset = ? AND segment = "
                    "(SELECT id FROM segments WHERE name = ?)",
                    (place.row, place.offset, place.segment),
                ).rowcount
        return gone

    def used_again(self, uses: dict[int, int]) -> None:
        """Rows were read so often: they are worth as much from the clock's time on."""
        with self.change() as sql:
            (clock,) = sql.execute("SELECT value FROM state WHERE name='clock'").fetchone()
            sql.executemany(
                "UPDATE records SET uses = uses + ?1, priority = MAX(priority, "
                "?2 + MIN(1 + uses + ?1, ?3) * value) WHERE id = ?4",
                [(count, clock, GreedyDual.MOST_USES, row) for row, count in uses.items()],
            )

    def reserve(self, sql: sqlite3.Connection, segment: str, size: int) -> None:
        """Count bytes of a writer that it has not written yet."""
        sql.execute("UPDATE segments SET reserved = ? WHERE name = ?", (size, segment))

    def used_in(self, sql: sqlite3.Connection) -> int:
        """:meth:`used` as of a transaction."""
        return _used(sql)

    def victims(self, sql: sqlite3.Connection, whole: bool, but: str) -> list[Place]:
        """Records that go first; with ``whole`` all those of a segment other than ``but``."""
        columns = (
            "SELECT r.id, tag, s.name, offset, bytes, priority FROM records r JOIN segments s "
        )
        if whole:
            query = (
                "ON s.id = r.segment WHERE r.segment = (SELECT x.id FROM segments x JOIN records y "
                "ON y.segment = x.id WHERE x.name != ? GROUP BY x.id ORDER BY avg(y.priority) LIMIT 1)"
            )
            rows = sql.execute(columns + query, (but,)).fetchall()
        else:
            query = "ON s.id = r.segment ORDER BY priority, r.id LIMIT ?"
            rows = sql.execute(columns + query, (_VICTIMS_AT_ONCE,)).fetchall()
        return [place for *row, _ in rows if (place := _place(row)) is not None]

    def evict(self, sql: sqlite3.Connection, places: Sequence[Place]) -> None:
        """Forget victims; the clock rises to what they were worth."""
        for place in places:
            row = sql.execute("SELECT priority FROM records WHERE id = ?", (place.row,)).fetchone()
            sql.execute(
                "UPDATE state SET value = MAX(value, ?) WHERE name = 'clock'", (float(row[0]),)
            )
            sql.execute("DELETE FROM records WHERE id = ?", (place.row,))

    def empty_segments(self) -> list[str]:
        """Segments without a record, those of writers that have just begun too."""
        query = (
            "SELECT name FROM segments s WHERE NOT EXISTS "
            "(SELECT 1 FROM records r WHERE r.segment = s.id)"
        )
        with self._reads:
            return [name for (name,) in self._reader.execute(query).fetchall()]

    def extents(self) -> dict[str, tuple[int, int]]:
        """Bytes of the records of each segment, and where the last one ends."""
        query = (
            "SELECT s.name, sum(bytes), max(offset + bytes) FROM records r JOIN segments s "
            "ON s.id = r.segment GROUP BY s.id"
        )
        with self._reads:
            rows = self._reader.execute(query).fetchall()
        return {name: (int(size), int(end)) for name, size, end in rows}

    def drop_behind(self, segment: str, end: int) -> int:
        """Forget records that the file ends before; how many."""
        query = (
            "DELETE FROM records WHERE segment = (SELECT id FROM segments WHERE name = ?) "
            "AND offset + bytes > ?"
        )
        with self.change() as sql:
            gone = sql.execute(query, (segment, end)).rowcount
            sql.execute("UPDATE segments SET clean = MIN(clean, ?) WHERE name = ?", (end, segment))
        return gone

    def recount(self) -> None:
        """Sum up the bytes of records, which are else only counted on. O(records)."""
        with self.change() as sql:
            sql.execute(
                "UPDATE state SET value = (SELECT coalesce(sum(bytes), 0) FROM records) "
                "WHERE name = 'record_bytes'"
            )

    def release(self, segment: str) -> None:
        """What a dead writer had reserved is free."""
        with self.change() as sql:
            sql.execute("UPDATE segments SET reserved = 0 WHERE name = ?", (segment,))


def damaged(error: Exception) -> bool:
    """Whether an error of the index says that its file is not what it was, rather than busy or full.

    Damage also shows as values of other types, and as tables that are gone.
    """
    if isinstance(error, sqlite3.ProgrammingError):
        return False  # closed, because there is a newer one
    if isinstance(error, sqlite3.OperationalError):
        signs = ("no such", "malformed", "near", "unrecognized", "could not decode", "table")
        return str(error).lower().startswith(signs)
    return not isinstance(error, OSError)


def _value(header: Header) -> float:
    tokens = len(header.name.tokens) // _TOKEN_BYTES
    return _COSTS.recompute(header.worth, tokens) / header.record_bytes


def _used(sql: sqlite3.Connection) -> int:
    row = sql.execute(
        "SELECT (SELECT value FROM state WHERE name='record_bytes'), "
        "(SELECT count(*) FROM segments), (SELECT total(reserved) FROM segments)"
    ).fetchone()
    return int(row[0]) + BLOCK * int(row[1]) + int(row[2])


def _place(row: Sequence[object]) -> Place | None:
    """A row of a table that may be damaged."""
    number, tag, segment, offset, size = row
    if not (isinstance(number, int) and isinstance(tag, int) and isinstance(segment, str)):
        return None
    if not (isinstance(offset, int) and isinstance(size, int)):
        return None
    if offset % BLOCK or offset < BLOCK or offset > 1 << 50 or size % BLOCK or size < BLOCK:
        return None
    return Place(number, tag, segment, offset, size)
