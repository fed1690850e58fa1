"""A process that writes pages until it is killed, and says which ones the store acknowledged.

``disk_writer.py DIRECTORY SEED CAPACITY ROUNDS [SYNCED]``: prints ``w NUMBER`` when page NUMBER was
acknowledged and ``f NUMBER`` when it is durable. Needs no torch, so that it is up at once.
"""

from __future__ import annotations

import hashlib
import sys

from tessera_sglang.memory_pool.disk import NO_SYNC, DiskStore
from tessera_sglang.memory_pool.lower import PageName, TierKey, Worth

PAGE_BYTES = 500_001  # so that a kill falls into the middle of one


def page_name(number: int) -> PageName:
    """The name of a page that nobody else writes."""
    tokens = number.to_bytes(8, "little") * 4
    key = hashlib.blake2b(tokens, digest_size=32).digest()
    return PageName(b"n" * 32, TierKey(b"n" * 32), TierKey(key), tokens, b"")


def page(number: int) -> bytes:
    """Its content."""
    some = hashlib.shake_128(number.to_bytes(8, "little")).digest(
        1021
    )  # a prime: no block is another
    return (some * (PAGE_BYTES // len(some) + 1))[:PAGE_BYTES]


def open_store(path: str, capacity_bytes: int, sample: int = 4) -> DiskStore:
    """Small segments, so that kills fall into their beginnings and ends, too."""
    return DiskStore.open(
        path,
        manifest=b"{}",
        page_bytes=PAGE_BYTES,
        layout=b"{}",
        capacity_bytes=capacity_bytes,
        segment_bytes=5_000_000,
        fsync=NO_SYNC,
        sample=sample,
    )


def main() -> None:
    path, seed, capacity, rounds = sys.argv[1], *map(int, sys.argv[2:5])
    store = open_store(path, capacity)
    print("up", flush=True)
    for turn in range(rounds):
        numbers = [seed * 1_000_000 + turn * 4 + n for n in range(4)]
        raw = b"".join(map(page, numbers))
        took = store.write(
            [page_name(n) for n in numbers], memoryview(raw), [Worth(0, False, 0)] * 4
        )
        said = [f"w {n}" for n, taken in zip(numbers, took, strict=True) if taken]
        if turn % 8 == 7 and store.flush():
            said.append(f"f {numbers[-1]}")
        print("\n".join(said), flush=True)
    counters = store.counters
    store.close()
    print(f"end {counters.evicted_records} {sum(counters.quarantined.values())}", flush=True)


if __name__ == "__main__":
    main()
