"""How fast pages come back from a disk store, and what a record costs beside its page.

Both sides read the same ranges of the same segments in the same order into the same page-aligned
buffer, in turns: the store finds, reads and verifies; plain preadv only reads. Warm: out of the
system's page cache, where nothing hides the checksum. Cold: the cache is dropped before each round.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Check, Report, Table, argument_parser, progress
from tessera_sglang.memory_pool.disk import NO_SYNC, DiskStore
from tessera_sglang.memory_pool.disk.record import header_size, rounded
from tessera_sglang.memory_pool.disk.segments import Segment
from tessera_sglang.memory_pool.known_models import KNOWN
from tessera_sglang.memory_pool.lower import PageName, TierKey, Worth
from tessera_sglang.memory_pool.model_geometry import read_model
from tessera_sglang.memory_pool.rows import KvFormat

PAGE_BYTES = 4 << 20
PAGE_TOKENS = 64
LAYOUT = b'{"regions":[{"dtype":"BF16","name":"latent","shape":[61,64,576]}]}'


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is read."""

    pages: int = 128
    rounds: int = 15
    cold_rounds: int = 5


QUICK = Settings(pages=32, rounds=5, cold_rounds=2)


@dataclass(frozen=True, slots=True)
class Range:
    """A record's payload in a file."""

    fd: int
    offset: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0 if all checks hold."""
    parser = argument_parser(__doc__)
    parser.add_argument("--directory", type=Path, help="where to make the store; a temporary one")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as path:
        report = measure(QUICK if options.quick else Settings(), Path(path))
    return report.emit(as_json=options.json, save=options.save)


def measure(settings: Settings, path: Path) -> Report:
    """Everything, as a report."""
    report = Report("store", settings={**asdict(settings), "page_bytes": PAGE_BYTES})
    report.notes.append(
        "Medians of rounds in which the sides take turns; a ratio compares the sides in a round. "
        "One thread each. Cold: posix_fadvise asks the system to drop the files' cache, which on "
        "a virtual disk may still leave them in the host's."
    )
    _add_overhead(report)
    names = [_name(number) for number in range(settings.pages)]
    progress("writing pages")
    store = DiskStore.open(
        path,
        manifest=b"{}",
        page_bytes=PAGE_BYTES,
        layout=LAYOUT,
        capacity_bytes=4 * settings.pages * PAGE_BYTES,
        fsync=NO_SYNC,
    )
    took_s = _write(store, names)
    store.flush()
    ranges, held = _ranges(store, names)
    into = mmap.mmap(-1, 8 * PAGE_BYTES)  # page-aligned; a batch of the tier's size
    into.write(bytes(len(into)))
    for state, rounds in (("warm", settings.rounds), ("cold", settings.cold_rounds)):
        progress(f"reading, {state}")
        _add_reads(report, state, rounds, store, names, ranges, memoryview(into))
    total = settings.pages * PAGE_BYTES
    report.figures["write_gb_per_s"] = total / took_s / 1e9
    assert not store.counters.quarantined
    assert store.counters.missed == 0
    store.close()
    del held
    return report


def _add_reads(
    report: Report,
    state: str,
    rounds: int,
    store: DiskStore,
    names: Sequence[PageName],
    ranges: Sequence[Range],
    into: memoryview,
) -> None:
    sides: dict[str, Callable[[], None]] = {
        "store": lambda: _read_store(store, names, into),
        "preadv": lambda: _read_plain(ranges, into),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):  # the first warms up
        for side in sorted(sides, reverse=bool(number % 2)):
            if state == "cold":
                for fd in {each.fd for each in ranges}:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            sides[side]()
            if number:
                seconds[side].append(time.perf_counter() - began)
    ratios = {
        side: statistics.median(
            plain / ours for plain, ours in zip(seconds["preadv"], took, strict=True)
        )
        for side, took in seconds.items()
    }
    total = len(names) * PAGE_BYTES
    speed = {side: total / statistics.median(took) / 1e9 for side, took in seconds.items()}
    report.figures[state] = {"gb_per_s": speed, "ratio": ratios, "seconds": seconds}
    report.tables.append(
        Table(
            f"Sequential restore of {PAGE_BYTES >> 20} MiB pages, {state}",
            ("by", "GB/s", "by preadv"),
            [(side, speed[side], ratios[side]) for side in speed],
        )
    )
    report.checks.append(
        Check.at_least(f"{state}: throughput, DiskStore.read / plain preadv", ratios["store"], 0.8)
    )


def _add_overhead(report: Report) -> None:
    """Bytes of a record beside its page: DeepSeek-V3 as it is kept, BF16 and packed FP8."""
    model = read_model(KNOWN["deepseek-v3"].config, "deepseek-v3")
    name = PageName(bytes(32), TierKey(bytes(32)), TierKey(bytes(32)), bytes(8 * PAGE_TOKENS), b"")
    rows = []
    for kept in (KvFormat.BF16, KvFormat.FP8_PACKED):
        form = kept.value
        page = model.geometry(kept).page_bytes
        record = header_size(name, LAYOUT) + rounded(page)
        share = record / page - 1
        rows.append((form, page, record - page, f"{share:.3%}"))
        report.figures[f"overhead_{form}"] = {"page_bytes": page, "overhead_bytes": record - page}
        report.checks.append(
            Check.at_most(
                f"DeepSeek-V3, {form}: record overhead in % of the page", 100 * share, 2.0
            )
        )
    columns = ("kept as", "page bytes", "header and padding", "share")
    report.tables.append(Table("A record of a page of DeepSeek-V3", columns, rows))


def _write(store: DiskStore, names: Sequence[PageName]) -> float:
    """Write a page each; seconds of the store's own part."""
    generator = random.Random(1)
    took = 0.0
    for name in names:
        page = memoryview(generator.randbytes(PAGE_BYTES))
        began = time.perf_counter()
        assert store.write([name], page, [Worth(0, True, 0)]) == [True]
        took += time.perf_counter() - began
    return took


def _read_store(store: DiskStore, names: Sequence[PageName], into: memoryview) -> None:
    batch = len(into) // PAGE_BYTES
    for at in range(0, len(names), batch):
        some = list(names[at : at + batch])
        assert all(store.read(some, into[: len(some) * PAGE_BYTES]))


def _read_plain(ranges: Sequence[Range], into: memoryview) -> None:
    batch = len(into) // PAGE_BYTES
    for number, each in enumerate(ranges):
        at = number % batch * PAGE_BYTES
        got = os.preadv(each.fd, [into[at : at + PAGE_BYTES]], each.offset)
        assert got == PAGE_BYTES


def _ranges(store: DiskStore, names: Sequence[PageName]) -> tuple[list[Range], list[Segment]]:
    """Where the payloads are, in the order of names, which is that of the files; and what is open."""
    places = store.places(list(names))
    directory = store.path / "segments"
    held = {place.segment: Segment(directory, place.segment) for place in places}
    size = header_size(names[0], LAYOUT)
    return [Range(held[one.segment].fd, one.offset + size) for one in places], list(held.values())


def _name(number: int) -> PageName:
    tokens = b"".join((number * PAGE_TOKENS + n).to_bytes(8, "little") for n in range(PAGE_TOKENS))
    key = hashlib.blake2b(tokens, digest_size=32).digest()
    return PageName(bytes(32), TierKey(bytes(32)), TierKey(key), tokens, b"")
