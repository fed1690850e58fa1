"""The disk store: what is written is read, by whoever asks by the same name, and by nobody else."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest
from disk_helpers import (
    LAYOUT,
    MANIFEST,
    RECORD_BYTES,
    on_disk,
    opened,
    python,
    read,
    segment_paths,
    write,
)
from tier_helpers import PAGE_BYTES, chain_names, document, weak

from tessera_sglang.memory_pool.disk import DiskStore
from tessera_sglang.memory_pool.keys import Namespace


def test_round_trip_is_byte_exact_in_any_order(tmp_path: Path) -> None:
    store = opened(tmp_path)
    names = document(1, 40)
    assert write(store, names) == [True] * 40
    random.Random(1).shuffle(names)
    assert store.contains(names) == [True] * 40
    assert read(store, [*names, *document(2, 3)]) == [True] * 40 + [False] * 3
    assert (store.counters.read_records, store.counters.missed) == (40, 3)
    assert write(store, names) == [True] * 40
    assert store.counters.written_records == 40, "what is held is not written again"
    store.check_invariants()
    store.close()
    store.close()
    assert read(opened(tmp_path), names) == [True] * 40


def test_another_process_under_another_hash_seed_reads_it(tmp_path: Path) -> None:
    """Case 20."""
    program = """
import hashlib, sys
from tessera_sglang.memory_pool.disk import DiskStore
from tessera_sglang.memory_pool.keys import Chain, Namespace
from tessera_sglang.memory_pool.lower import Worth
from tessera_sglang.memory_pool.names import names_of
names = names_of(Chain(Namespace("m").root_key(), list(range(1, 65)), 4), 0, 16, None)
store = DiskStore.open(sys.argv[1], manifest=b"{}", page_bytes=64, layout=b"{}", capacity_bytes=1 << 20)
raw = bytearray(b"".join(hashlib.blake2b(name.tokens).digest() for name in names))
if sys.argv[2] == "w":
    print(sum(store.write(names, memoryview(raw), [Worth(0, False, 0)] * 16)))
else:
    into = bytearray(len(raw))
    landed = store.read(names, memoryview(into))
    print(sum(landed) if into == raw else "wrong")
store.close()
"""
    for way, seed in (("w", "1"), ("r", "2")):
        process = python("-c", program, str(tmp_path), way, seed=seed)
        assert process.communicate(timeout=60)[0] == "16\n"  # pages of those 64 tokens


def test_names_whose_keys_collide_are_misses_and_the_first_still_hits(tmp_path: Path) -> None:
    """Case 21: 256 keys in all."""
    store = opened(tmp_path)
    names = [name for number in range(60) for name in document(number, 10, weak)]
    first: dict[bytes, int] = {}
    for number, name in enumerate(names):
        first.setdefault(name.key, number)
    expected = [first[name.key] == number for number, name in enumerate(names)]
    assert 100 < sum(expected) < 257
    assert write(store, names) == expected
    assert store.contains(names) == expected
    assert read(store, names) == expected
    assert store.counters.collisions >= expected.count(False)
    assert not store.counters.quarantined
    store.check_invariants()
    assert read(opened(tmp_path), names) == expected


def test_a_collision_that_the_index_does_not_see_is_found_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera_sglang.memory_pool.disk.store.name_tag", lambda name: 7)
    monkeypatch.setattr("tessera_sglang.memory_pool.disk.index.name_tag", lambda name: 7)
    store = opened(tmp_path)
    one, other = document(1, 1)[0], document(2, 1)[0]
    other = type(other)(other.namespace, other.parent, one.key, other.tokens, other.mark)
    assert write(store, [one]) == [True]
    assert store.contains([other]) == [True]
    assert read(store, [other]) == [False]
    assert (store.counters.collisions, dict(store.counters.quarantined)) == (1, {})
    assert read(store, [one]) == [True]


def test_namespaces_share_nothing_and_salts_are_not_in_the_files(tmp_path: Path) -> None:
    """Case 22."""
    roots = [
        Namespace("model", *more).root_key()
        for more in ((), ("", "very-secret"), ("very-secret", ""), ("ab", "c"), ("a", "bc"))
    ]
    store = opened(tmp_path)
    for root in roots:
        names = chain_names(range(16), root=root)
        assert read(store, names) == [False] * 4
        write(store, names)
    assert all(all(read(store, chain_names(range(16), root=root))) for root in roots)
    store.close()
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"very-secret" not in file.read_bytes()


@pytest.mark.parametrize(
    "changed",
    ["weights", "dtype", "page_size", "rope", "tp_rank", "tp_size"],
)
def test_another_manifest_reads_nothing_and_shares_the_directory(
    tmp_path: Path, changed: str
) -> None:
    """Case 23."""
    manifest = dict.fromkeys(["weights", "dtype", "page_size", "rope", "tp_rank", "tp_size"], 1)
    names = document(1, 4)
    store = opened(tmp_path, manifest=json.dumps(manifest).encode())
    write(store, names)
    other = opened(tmp_path, manifest=json.dumps({**manifest, changed: 2}).encode())
    assert read(other, names) == [False] * 4
    assert write(other, names) == [True] * 4
    assert other.used_bytes == store.used_bytes >= 8 * RECORD_BYTES
    reordered = json.dumps(dict(reversed(manifest.items()))).encode()
    assert read(opened(tmp_path, manifest=reordered), names) == [True] * 4
    assert json.loads((tmp_path / "manifests" / f"{other.digest.hex()}.json").read_bytes())[
        "manifest"
    ] == {**manifest, changed: 2}


def test_another_layout_or_page_size_reads_nothing(tmp_path: Path) -> None:
    names = document(1, 4)
    write(opened(tmp_path), names)
    for size, layout in ((PAGE_BYTES, b'{"regions":[1]}'), (PAGE_BYTES * 2, LAYOUT)):
        store = DiskStore.open(
            tmp_path, manifest=MANIFEST, page_bytes=size, layout=layout, capacity_bytes=1 << 20
        )
        assert store.contains(names) == [False] * 4


def test_large_marks_and_pages_of_many_pieces(tmp_path: Path) -> None:
    size = (1 << 20) + 4099  # several pieces, and no whole block
    store = DiskStore.open(
        tmp_path, manifest=MANIFEST, page_bytes=size, layout=LAYOUT, capacity_bytes=16 << 20
    )
    names = [type(n)(n.namespace, n.parent, n.key, n.tokens, b"m" * 9000) for n in document(1, 3)]
    raw = random.Random(2).randbytes(3 * size)
    assert write_raw(store, names, raw) == [True] * 3
    into = bytearray(len(raw))
    assert store.read(names, memoryview(into)) == [True] * 3
    assert into == raw
    store.check_invariants()


def write_raw(store: DiskStore, names: list, raw: bytes) -> list[bool]:  # type: ignore[type-arg]
    from tier_helpers import worths

    return store.write(names, memoryview(raw), worths(names))


def test_the_cap_holds_on_the_disk_and_spans_stay_longest(tmp_path: Path) -> None:
    cap = 1 << 20
    store = opened(tmp_path, capacity_bytes=cap, segment_bytes=256 << 10)
    spans = [name for number in range(5) for name in document(number, 4)]
    write(store, spans, shared=True)
    for number in range(100, 160):
        write(store, document(number, 4))
        assert on_disk(tmp_path) <= cap
        store.check_invariants()
    assert store.counters.evicted_records > 100
    assert read(store, spans) == [True] * 20
    assert sum(read(store, document(159, 4))) == 4
    store.close()
    assert len(segment_paths(tmp_path)) < 8, "segments without records are removed"


def test_a_used_page_outlives_others(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=1 << 20)
    used = document(0, 4)
    write(store, used)
    for number in range(1, 100):
        write(store, document(number, 4))
        assert read(store, used) == [True] * 4


def test_whole_segments_go_where_holes_can_not_be_punched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera_sglang.memory_pool.disk.files._fallocate", None)
    cap = 1 << 20
    store = opened(tmp_path, capacity_bytes=cap)
    for number in range(100):
        assert write(store, document(number, 4)) == [True] * 4
        assert on_disk(tmp_path) <= cap
    assert read(store, document(99, 4)) == [True] * 4
    assert read(store, document(0, 4)) == [False] * 4
    assert not store.counters.quarantined
    store.check_invariants()


def test_threads_read_while_records_go(tmp_path: Path) -> None:
    """Whoever loses the race against eviction has a miss; a wrong page fails in read()."""
    store = opened(tmp_path, capacity_bytes=1 << 20, segment_bytes=128 << 10)
    names = [document(number, 4) for number in range(60)]
    errors: list[BaseException] = []
    done = threading.Event()

    def reader(seed: int) -> None:
        choose = random.Random(seed)
        try:
            while not done.is_set():
                read(store, choose.choice(names))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for number in range(180):
        write(store, names[number % 60])
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.counters.evicted_records > 100
    assert not store.counters.quarantined
    store.check_invariants()


def test_settings_that_can_not_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="disk_tier_bytes = 4096 holds no page"):
        opened(tmp_path, capacity_bytes=4096)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="can not be made"):
        opened(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="manifest must be JSON"):
        opened(tmp_path, manifest=b"no")
