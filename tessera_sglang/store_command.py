"""``tessera-sglang store``: look at a disk tier's directory, check it, tidy it up, take pages out.

Works beside servers that use the directory, and needs none.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .memory_pool.disk.directory import Directory

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # argparse has no public name
    Action = Callable[[Directory, argparse.Namespace], tuple[dict[str, object], bool]]

ACTIONS = {
    "ls": "what it holds, by manifest and namespace",
    "verify": "read every record whole; exits with 1 if one is damaged",
    "rebuild": "make the index again from the segments alone",
    "gc": "reclaim what crashes left: torn and unindexed records, dead segments, drafts",
    "export": "write pages as a safetensors file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each action."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    for name, about in ACTIONS.items():
        each = actions.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        each.add_argument("directory", metavar="DIR", type=Path, help="the server's disk_tier_path")
        each.add_argument("--json", action="store_true", help="print the findings as JSON")
        if name == "verify":
            each.add_argument(
                "--quarantine",
                action="store_true",
                help="put damaged records aside, as a server does",
            )
        if name == "export":
            each.add_argument("--out", metavar="FILE", type=Path, required=True)
            each.add_argument(
                "--key", metavar="HEX", action="append", default=[],
                help="only records whose key begins with it; may be repeated",
            )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run one action; 0 if it did its work and all is well, else 1."""
    from .memory_pool.disk import survey

    actions: dict[str, Action] = {
        "ls": _ls,
        "verify": _verify,
        "rebuild": _rebuild,
        "gc": _gc,
        "export": _export,
    }
    try:
        directory = survey.attach(options.directory)
        try:
            found, well = actions[options.action](directory, options)
        finally:
            directory.close()
    except (ValueError, OSError, sqlite3.Error) as error:
        print(f"tessera-sglang store {options.action}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found, indent=1))
    return 0 if well else 1


def _ls(directory: Directory, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    from .memory_pool.disk import survey
    from .tables import Table, show

    with _bar(directory.index.count(), "record") as bar:
        found = survey.listing(directory, bar.update)
    if not options.json:
        rows = tuple(
            (g.manifest[:12], g.namespace[:12], f"{g.records:,}", f"{g.shared:,}", f"{g.tokens:,}",
             f"{g.bytes:,}")
            for g in found.groups
        )  # fmt: skip
        header = ("manifest", "namespace", "records", "of spans", "tokens", "bytes")
        show(Table(str(directory.path), header, rows, frozenset({0, 1})))
        print(
            f"\n{found.segments:,} segments, {found.disk_bytes:,} bytes on the disk, "
            f"{found.quarantined:,} in quarantine, {found.unreadable:,} not readable"
        )
    return asdict(found), not found.unreadable


def _verify(directory: Directory, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    from .memory_pool.disk import reconcile

    damaged = unreadable = 0
    places = list(directory.index.places())
    with _bar(len(places), "record") as bar:
        for place in places:
            one = reconcile.verify(directory, [place], keep=not options.quarantine)
            damaged += one.damaged
            unreadable += one.unreadable
            bar.update(1)
    found: dict[str, object] = {
        "records": len(places),
        "damaged": damaged,
        "unreadable": unreadable,
        "quarantined": options.quarantine,
    }
    _say(
        options,
        f"{len(places):,} records, {damaged:,} damaged, {unreadable:,} not readable"
        + (", put aside" if damaged and options.quarantine else ""),
    )
    return found, not damaged and not unreadable


def _rebuild(directory: Directory, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    from .memory_pool.disk import reconcile
    from .memory_pool.disk.segments import segment_files

    before = directory.index.count()
    with _bar(len(segment_files(directory.segments_path)), "segment") as bar, directory.locked():
        reconcile.rebuild(directory, lambda: bar.update(1))
    found: dict[str, object] = {"records_before": before, "records": directory.index.count()}
    _say(options, f"{found['records']:,} records indexed, {before:,} before")
    return found, True


def _gc(directory: Directory, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    from .memory_pool.disk import reconcile
    from .memory_pool.disk.segments import segment_files

    with _bar(len(segment_files(directory.segments_path)), "segment") as bar, directory.locked():
        reconcile.collect(directory, lambda: bar.update(1))
    counters = directory.counters
    found: dict[str, object] = {
        "reclaimed_bytes": counters.reclaimed_bytes,
        "torn_bytes": counters.torn_bytes,
        "dropped_rows": counters.dropped_rows,
        "recovered_records": counters.recovered_records,
    }
    _say(
        options,
        f"{counters.reclaimed_bytes:,} bytes reclaimed, {counters.torn_bytes:,} torn off, "
        f"{counters.dropped_rows:,} rows dropped, {counters.recovered_records:,} records recovered",
    )
    return found, True


def _export(directory: Directory, options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    from .memory_pool.disk import survey

    keys = frozenset(key.lower() for key in options.key)
    with _bar(directory.index.count(), "record") as bar:
        records = survey.export(directory, options.out, keys, bar.update)
    _say(options, f"{records:,} records in {options.out}")
    return {"records": records, "file": str(options.out)}, True


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.json:
        print(text)


def _bar(total: int, unit: str):  # type: ignore[no-untyped-def]
    from tqdm import tqdm  # here, so that --help needs nothing

    return tqdm(total=total, unit=unit, file=sys.stderr)
