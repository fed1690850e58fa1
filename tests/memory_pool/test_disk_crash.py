"""Kills, full disks, several writers, and what they leave behind (case 25)."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import disk_writer
import pytest
from disk_helpers import LONG, RECORD_BYTES, on_disk, opened, python, read, segment_paths, write
from tier_helpers import document

from tessera_sglang.memory_pool.disk import DiskStore
from tessera_sglang.memory_pool.disk import reconcile as agree

KILLS = 200 if LONG else 25
WRITER = str(Path(__file__).with_name("disk_writer.py"))


def landed(store: DiskStore, numbers: Sequence[int]) -> list[bool]:
    """Which pages of the writer are there; they are as it wrote them."""
    size = disk_writer.PAGE_BYTES
    into = bytearray(size * len(numbers))
    got = store.read([disk_writer.page_name(n) for n in numbers], memoryview(into))
    for at, number in enumerate(numbers):
        assert not got[at] or into[at * size : (at + 1) * size] == disk_writer.page(number)
    return got


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    """Kills at random moments of writing; every third time the index is lost as well."""
    choose = random.Random(9)
    acknowledged: list[int] = []
    torn = recovered = total = 0
    capacity = 1 << 40  # nothing is evicted: all that was acknowledged must be there
    for number in range(KILLS):
        path = tmp_path / str(number // 5)
        if number % 5 == 0:
            shutil.rmtree(tmp_path / str(number // 5 - 1), ignore_errors=True)
            acknowledged = []
        process = python(WRITER, str(path), str(number), str(capacity), "100000")
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(choose.uniform(0.0, 0.06))  # the moment of the kill, not a wait for anything
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().splitlines()
        process.wait()
        new = [
            int(line.split()[1]) for line in said if line.startswith("w ") and line[-1:].isdigit()
        ]
        acknowledged += [n for n in new if n // 1_000_000 == number]
        if number % 3 == 2:
            for index in path.glob("index.*"):
                index.unlink()
        store = disk_writer.open_store(str(path), capacity)
        for at in range(0, len(acknowledged), 64):
            assert all(landed(store, acknowledged[at : at + 64]))
        assert not store.counters.quarantined
        total += len(new)
        torn += store.counters.torn_bytes
        recovered += store.counters.recovered_records
        store.check_invariants()
        store.close()
    assert total > KILLS
    print(f"{KILLS} kills, {total} records, {recovered} recovered, {torn} bytes torn")


def test_a_torn_record_is_cut_and_a_whole_one_behind_the_index_recovered(tmp_path: Path) -> None:
    """What a kill between writing and indexing leaves: here every length of it that matters."""
    store = opened(tmp_path)
    names = document(1, 6)
    write(store, names)
    store.close()
    (segment,) = segment_paths(tmp_path)
    whole = segment.read_bytes()
    index = store._directory.index_path(1)
    for kept in (5, 4):
        for cut in (0, 1, 4095, 4096, 4097, RECORD_BYTES - 1):
            segment.write_bytes(whole[: 4096 + kept * RECORD_BYTES + cut])
            store = opened(tmp_path)
            assert read(store, names) == [n < kept for n in range(6)]
            assert segment.stat().st_size == 4096 + kept * RECORD_BYTES or not cut
            store.check_invariants()
            store.close()
    segment.write_bytes(whole)
    assert index.exists()
    store = opened(tmp_path)  # whole records that the index forgot
    assert read(store, names) == [True] * 6
    assert store.counters.recovered_records == 2
    store.check_invariants()


def test_two_writers_under_one_cap(tmp_path: Path) -> None:
    capacity = 16 << 20
    writers = [python(WRITER, str(tmp_path), str(n), str(capacity), "60") for n in (1, 2)]
    while any(process.poll() is None for process in writers):
        if (tmp_path / "index.1.sqlite").exists():
            assert _in_one_moment_on_disk(tmp_path) <= capacity
    ends = []
    for process in writers:
        assert process.stdout is not None
        ends.append(process.stdout.read().splitlines()[-1].split())
        assert process.returncode == 0
    assert all(end[0] == "end" and int(end[2]) == 0 for end in ends)
    assert sum(int(end[1]) for end in ends) > 350, "evicted by either"
    store = disk_writer.open_store(str(tmp_path), capacity)
    assert on_disk(tmp_path) <= capacity
    store.check_invariants()
    last = [seed * 1_000_000 + n for seed in (1, 2) for n in range(240)]
    assert sum(landed(store, last)) == store._directory.index.count() > 15


def _in_one_moment_on_disk(path: Path) -> int:
    """Nobody evicts or reserves while this holds the index: files are looked at one by one."""
    sql = sqlite3.connect(path / "index.1.sqlite", timeout=60, isolation_level=None)
    sql.execute("BEGIN IMMEDIATE")
    try:
        total = 0
        for each in [*(path / "segments").iterdir(), *(path / "quarantine").iterdir()]:
            try:
                total += each.stat().st_blocks * 512
            except FileNotFoundError:  # a segment that was empty
                continue
        return total
    finally:
        sql.execute("COMMIT")
        sql.close()


def test_records_that_another_process_evicted_are_misses(tmp_path: Path) -> None:
    one, other = (opened(tmp_path, capacity_bytes=1 << 20) for _ in range(2))
    names = document(1, 8)
    write(one, names)
    places = one._places(names)
    for number in range(2, 80):
        write(other, document(number, 4))
    assert read(one, names) == [False] * 8
    from tier_helpers import PAGE_BYTES

    into = memoryview(bytearray(PAGE_BYTES))
    for name in names:  # looked up before they went
        assert not one._read(name, places[name.key], into)
    assert one.counters.vanished + one.counters.missing_segments == 8
    assert not one.counters.quarantined


def test_forgetting_where_a_record_was_forgets_no_other(tmp_path: Path) -> None:
    """The last row goes, and a record at the same offset of another segment comes."""
    store = opened(tmp_path)
    (old,) = document(1, 1)
    write(store, [old])
    (place,) = store.places([old])
    index = store._directory.index
    assert index.drop([place]) == 1
    store._writer.seal()
    (new,) = document(2, 1)
    write(store, [new])
    (there,) = store.places([new])
    assert there.offset == place.offset
    assert there.row != place.row
    assert not index.holds(place)
    assert index.drop([place]) == 0
    assert read(store, [new]) == [True]


def test_another_process_made_the_index_again(tmp_path: Path) -> None:
    one = opened(tmp_path)
    write(one, document(1, 4))
    other = opened(tmp_path)
    with other._writer.lock:
        other._writer.seal()
        other._writer.reopen(damaged=True)
    write(other, document(2, 4))
    write(one, document(3, 4))
    for store in (one, other):
        for number in (1, 2, 3):
            assert read(store, document(number, 4)) == [True] * 4
    one.close()
    other.close()
    opened(tmp_path).check_invariants()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_stops_writing_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = opened(tmp_path, retry_s=0.0)
    names = document(1, 4)
    write(store, names)
    pwritev = os.pwritev

    def full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        pwritev(fd, [memoryview(buffers[0])[:100]], offset)  # some of it is written
        raise OSError(number, "injected")

    monkeypatch.setattr(os, "pwritev", full)
    more = document(2, 4)
    assert write(store, more) == [False] * 4
    assert (store.counters.writing, store.counters.reason) == (False, os.strerror(number))
    assert store.counters.write_stopped == 1
    assert read(store, names) == [True] * 4
    store._writer._retry_s = 1e9
    monkeypatch.setattr(os, "pwritev", pwritev)
    assert write(store, [*more, *names]) == [False] * 4 + [True] * 4, "not before its time"
    store._writer._retry_s = 0.0
    assert write(store, more) == [True] * 4
    assert (store.counters.writing, store.counters.reason) == (True, "")
    assert read(store, [*names, *more]) == [True] * 8
    store.check_invariants()


def test_a_write_past_the_file_size_limit_stops_in_the_middle(tmp_path: Path) -> None:
    """The system itself refuses: EFBIG after some bytes of a batch."""
    store = opened(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = document(1, 40)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        write(store, names[:1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (110_000, limits[1]))
        took = write(store, names)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert 1 <= sum(took) < 20
    assert not store.counters.writing
    assert read(store, names) == took
    store.close()
    store = opened(tmp_path)
    assert read(store, names) == took
    store.check_invariants()


def test_orphans_are_reclaimed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    names = document(1, 8)
    write(store, names)
    store.close()
    store = opened(tmp_path)
    dropped = store._places(names[:4])
    store._directory.index.drop(dropped.values())  # as if it died before it punched
    store.close()
    (tmp_path / "manifests" / "x.json.1.tmp").write_bytes(b"left")
    (tmp_path / "index.9.sqlite.1.tmp").write_bytes(b"left")
    before = on_disk(tmp_path)
    store = opened(tmp_path)
    agree.collect(store._directory)
    assert on_disk(tmp_path) <= before - 4 * RECORD_BYTES
    assert not list(tmp_path.rglob("*.tmp"))
    assert read(store, names) == [False] * 4 + [True] * 4
    store.check_invariants()
    store._directory.index.drop(store._places(names).values())
    store.close()
    opened(tmp_path).close()
    assert segment_paths(tmp_path) == [], "a segment without records goes"


def test_a_living_writers_segment_is_left_alone(tmp_path: Path) -> None:
    one = opened(tmp_path)
    write(one, document(1, 2))
    (segment,) = segment_paths(tmp_path)
    with open(segment, "ab") as file:
        file.write(b"half a record, so far")
    size = segment.stat().st_size
    other = opened(tmp_path)
    agree.collect(other._directory)
    assert segment.stat().st_size == size
    assert other.counters.torn_bytes == 0
