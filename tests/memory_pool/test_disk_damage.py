"""Damage of every kind to segments and index: a miss that is counted, never a wrong page (case 24)."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_helpers import LONG, RECORD_BYTES, opened, read, segment_paths, write
from tier_helpers import PAGE_BYTES, document

from tessera_sglang.memory_pool.disk import DiskStore
from tessera_sglang.memory_pool.disk import reconcile as agree

FAULTS = 2000 if LONG else 150  # in segments, and as many in the index
NAMES = document(1, 24)
HEADER_BYTES = 4096


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with all NAMES in one segment."""
    path = tmp_path_factory.mktemp("sound")
    store = opened(path)
    assert all(write(store, NAMES))
    store.close()
    return path


def copied(sound: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(sound, to)
    return to


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def faults(store: DiskStore) -> int:
    counters = store.counters
    return (
        sum(counters.quarantined.values())
        + counters.torn_bytes
        + counters.dropped_rows
        + counters.index_rebuilds
        + counters.index_errors
    )


def alive(store: DiskStore) -> None:
    """The store goes on: new pages are taken and read."""
    names = document(77, 2)
    assert write(store, names) == [True, True]
    assert read(store, names) == [True, True]


def test_bit_flips_in_segments_are_detected(sound: Path, tmp_path: Path) -> None:
    choose = random.Random(1)
    store = opened(copied(sound, tmp_path / "s"), sample=0)
    (segment,) = segment_paths(store.path)
    whole = segment.read_bytes()
    for _ in range(FAULTS):
        number = choose.randrange(len(NAMES))
        at = HEADER_BYTES + number * RECORD_BYTES  # behind the segment's own block
        bit = 8 * at + choose.randrange(8 * (HEADER_BYTES + PAGE_BYTES))
        flip(segment, bit)
        before = sum(store.counters.quarantined.values())
        landed = read(store, NAMES)
        assert landed == [n != number for n in range(len(NAMES))], bit
        assert sum(store.counters.quarantined.values()) == before + 1
        assert store.contains(NAMES) == landed
        assert write(store, [NAMES[number]]) == [True]  # comes back, to the end
        segment.write_bytes(whole)  # in place: readers have it open
        store.close()
        store = opened(copied(sound, tmp_path / "s"), sample=0)
        (segment,) = segment_paths(store.path)
    alive(store)


def test_bit_flips_are_found_when_the_index_is_made_again(sound: Path, tmp_path: Path) -> None:
    choose = random.Random(2)
    for _ in range(FAULTS // 3):
        path = copied(sound, tmp_path / "s")
        (segment,) = segment_paths(path)
        number = choose.randrange(len(NAMES))
        at = HEADER_BYTES + number * RECORD_BYTES
        flip(segment, 8 * at + choose.randrange(8 * (HEADER_BYTES + PAGE_BYTES)))
        (path / "index.1.sqlite").unlink()
        store = opened(path, sample=0)
        assert read(store, NAMES) == [n != number for n in range(len(NAMES))]
        assert faults(store) > 1  # the rebuild is one
        store.check_invariants()
        store.close()


def test_truncated_segments_are_detected(sound: Path, tmp_path: Path) -> None:
    choose = random.Random(3)
    (original,) = segment_paths(sound)
    size = original.stat().st_size
    for length in [0, 1, size - 1, *(choose.randrange(size) for _ in range(FAULTS // 3))]:
        path = copied(sound, tmp_path / "s")
        (segment,) = segment_paths(path)
        os.truncate(segment, length)
        store = opened(path, sample=0)
        whole = max(0, length - HEADER_BYTES) // RECORD_BYTES
        landed = read(store, NAMES)
        assert landed == [number < whole for number in range(len(NAMES))], length
        assert faults(store)
        alive(store)
        store.close()


def test_truncation_under_an_open_store_is_a_miss(sound: Path, tmp_path: Path) -> None:
    store = opened(copied(sound, tmp_path / "s"))
    (segment,) = segment_paths(store.path)
    os.truncate(segment, HEADER_BYTES + 3 * RECORD_BYTES + 100)
    assert read(store, NAMES) == [True] * 3 + [False] * (len(NAMES) - 3)
    assert store.counters.quarantined["short"] == len(NAMES) - 3
    alive(store)


@pytest.mark.parametrize("kind", ["flip", "truncate"])
def test_a_damaged_index_gives_no_wrong_page(sound: Path, tmp_path: Path, kind: str) -> None:
    choose = random.Random(4)
    size = (sound / "index.1.sqlite").stat().st_size
    for _ in range(FAULTS // 2):
        path = copied(sound, tmp_path / "s")
        index = path / "index.1.sqlite"
        if kind == "flip":
            flip(index, choose.randrange(8 * size))
        else:
            os.truncate(index, choose.randrange(size))
        store = opened(path, sample=0)
        landed = read(store, NAMES)  # asserts the bytes of what lands
        assert all(landed) or faults(store) or store.contains(NAMES) == landed
        if kind == "truncate":
            assert all(landed), "made again from segments"
        alive(store)
        store.close()


def test_an_index_that_is_damaged_under_an_open_store_is_made_again(
    sound: Path, tmp_path: Path
) -> None:
    store = opened(copied(sound, tmp_path / "s"))
    index = store.path / "index.1.sqlite"
    with open(index, "r+b") as file:
        file.write(random.Random(5).randbytes(index.stat().st_size))
    (store.path / "index.1.sqlite-wal").unlink(missing_ok=True)
    store._directory.index._reader.execute("PRAGMA cache_size=0")
    read(store, NAMES)  # misses or not, no wrong page
    alive(store)
    assert read(store, NAMES) == [True] * len(NAMES)
    store.check_invariants()


def test_rebuilt_from_segments_alone_it_equals_the_index(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=1 << 20, segment_bytes=200 << 10)
    other = opened(tmp_path, manifest=b'{"model":"other"}', capacity_bytes=1 << 20)
    for number in range(40):
        write(store, document(number, 4))
        write(other, document(number, 2), shared=True)
    assert store.counters.evicted_records + other.counters.evicted_records > 50
    held = [store.contains(document(n, 4)) + other.contains(document(n, 2)) for n in range(40)]
    rows = _rows(tmp_path / "index.1.sqlite")
    store.close()
    other.close()
    for path in tmp_path.glob("index.*"):
        path.unlink()
    store = opened(tmp_path)
    other = opened(tmp_path, manifest=b'{"model":"other"}')
    assert _rows(tmp_path / "index.1.sqlite") == rows
    assert [
        store.contains(document(n, 4)) + other.contains(document(n, 2)) for n in range(40)
    ] == held
    store.check_invariants()


def _rows(path: Path) -> list[tuple[object, ...]]:
    query = (
        "SELECT digest, key, tag, name, offset, bytes, value FROM records r JOIN segments s "
        "ON s.id = segment JOIN manifests m ON m.id = manifest ORDER BY name, offset"
    )
    return sqlite3.connect(path).execute(query).fetchall()


def test_transient_errors_are_retried_and_delete_nothing(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(copied(sound, tmp_path / "s"))
    preadv, failures = os.preadv, [errno.EIO, errno.EINTR, errno.ETIMEDOUT]

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if failures:
            raise OSError(failures.pop(), "injected")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    failures[1:] = [errno.EINTR]
    assert read(store, NAMES) == [True] * len(NAMES)
    assert store.counters.retries == 2
    failures[:] = [errno.EIO] * 3  # as often as it is tried
    assert read(store, NAMES[:2]) == [False, True]
    assert (store.counters.io_errors, dict(store.counters.quarantined)) == (1, {})
    assert read(store, NAMES) == [True] * len(NAMES), "nothing was deleted"


def test_a_deleted_segment_and_a_vanished_directory_are_misses(sound: Path, tmp_path: Path) -> None:
    store = opened(copied(sound, tmp_path / "s"), sample=0)
    (segment,) = segment_paths(store.path)
    segment.unlink()
    assert read(store, NAMES) == [False] * len(NAMES)
    assert store.counters.missing_segments == len(NAMES)
    assert store.contains(NAMES) == [False] * len(NAMES)
    alive(store)
    shutil.rmtree(store.path)
    assert read(store, NAMES) == [False] * len(NAMES)
    assert write(store, document(3, 2)) == [False, False]
    assert not store.counters.writing
    assert store.counters.reason
    store.close()


def test_quarantine_is_bounded_and_keeps_the_bytes(sound: Path, tmp_path: Path) -> None:
    path = copied(sound, tmp_path / "s")
    store = opened(path, capacity_bytes=1 << 20, sample=0)  # 64 KiB of quarantine
    (segment,) = segment_paths(path)
    for number in range(len(NAMES)):
        flip(segment, 8 * (HEADER_BYTES + number * RECORD_BYTES + HEADER_BYTES + 5))
    whole = segment.read_bytes()
    assert read(store, NAMES) == [False] * len(NAMES)
    assert store.counters.quarantined == {"checksum": len(NAMES)}
    kept = sorted((path / "quarantine").iterdir())
    assert len(kept) == 8
    assert all("checksum" in each.name for each in kept)
    assert kept[-1].read_bytes() == whole[-RECORD_BYTES:]
    store.close()


def test_a_record_in_another_place_is_none(sound: Path, tmp_path: Path) -> None:
    """A whole record's bytes where another one was: say, a block that the disk put elsewhere."""
    path = copied(sound, tmp_path / "s")
    (segment,) = segment_paths(path)
    raw = bytearray(segment.read_bytes())
    first, second = HEADER_BYTES, HEADER_BYTES + RECORD_BYTES
    raw[second : second + RECORD_BYTES] = raw[first : first + RECORD_BYTES]
    segment.write_bytes(raw)
    store = opened(path, sample=0)
    assert read(store, NAMES[:2]) == [True, False]
    assert store.counters.quarantined == {"place": 1}


def test_opening_samples_records(sound: Path, tmp_path: Path) -> None:
    path = copied(sound, tmp_path / "s")
    (segment,) = segment_paths(path)
    flip(segment, 8 * (HEADER_BYTES + HEADER_BYTES + 5))
    store = opened(path, sample=1000)
    assert store.counters.quarantined == {"checksum": 1}
    assert store.contains(NAMES) == [False] + [True] * (len(NAMES) - 1)
    found = agree.verify(store._directory, list(store._directory.index.places()))
    assert (found.records, found.damaged) == (len(NAMES) - 1, 0)
