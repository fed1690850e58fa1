"""Index and segments made to agree: when a store is opened, when an index is lost, and by gc.

An ordinary open reads no segment but behind its clean length, where a writer that is gone may have
left records that nobody indexed, and a torn one. What a living writer does is its own; its segment is
locked. Everything here runs with the directory locked.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

from . import files
from .directory import Directory
from .index import INDEX_ERRORS, Index, Place, damaged
from .record import BLOCK, Damaged, Header, name_tag
from .segments import Gap, Segment, scan, segment_files

SLACK_BYTES = 4 * BLOCK  # blocks of a file's own tree, which st_blocks counts


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading records whole has found."""

    records: int
    damaged: int
    unreadable: int  # by errors that say nothing of the record


def open_and_reconcile(directory: Directory) -> None:
    """Open the index, or make it again; both agree afterwards. Raises OSError, sqlite3.Error."""
    with directory.locked():
        if directory.open_index():
            try:
                reconcile(directory)
                return
            except INDEX_ERRORS as error:
                if not damaged(error):
                    raise
                directory.counters.add(index_errors=1)
                directory.say("index", f"the index can not be used ({error}): it is made again")
        rebuild(directory)


def reconcile(directory: Directory) -> None:
    """Recover records that are not indexed, forget rows that lead nowhere, reclaim orphans."""
    index = directory.index
    present = segment_files(directory.segments_path)
    known = index.segments()
    for name in sorted(known.keys() - set(present)):
        directory.segments.forget(name)
        directory.counters.add(dropped_rows=index.drop_segment(name))
    extents = index.extents()
    for name in present:
        _reconcile_segment(directory, name, known.get(name, 0), extents.get(name, (0, BLOCK)))
    index.recount()
    remove_left_overs(directory)


def _reconcile_segment(
    directory: Directory, name: str, clean: int, extent: tuple[int, int]
) -> None:
    """``extent``: bytes of its indexed records, and where the last one ends."""
    segment = _of_a_dead_writer(directory, name)
    if segment is None:
        return
    kept, end = extent
    _recover_tail(directory, segment, clean)
    size = os.fstat(segment.fd).st_size
    if max(end, clean) > size:
        directory.counters.add(dropped_rows=directory.index.drop_behind(name, size))
    directory.index.release(name)
    if clean < size or os.fstat(segment.fd).st_blocks * 512 > kept + BLOCK + SLACK_BYTES:
        sweep(directory, segment)


def rebuild(directory: Directory, on_segment: Callable[[], None] = lambda: None) -> None:
    """A new generation of the index from the headers of all segments; payloads are not read."""
    if directory.path.exists() and segment_files(directory.segments_path):
        directory.counters.add(index_rebuilds=1)
    index, generation = directory.next_index()
    for name in segment_files(directory.segments_path):
        try:
            _index_segment(directory, index, name)
        except OSError as error:
            directory.counters.add(io_errors=1)
            directory.say("rebuild", f"{name} can not be read and is left out: {error}")
        on_segment()
    directory.publish(index, generation)
    remove_left_overs(directory)


def _index_segment(directory: Directory, index: Index, name: str) -> None:
    """Add what a segment holds, one that is appended to as far as it has got. Raises OSError."""
    segment = Segment(directory.segments_path, name, os.O_RDWR)
    dead = files.lock_now(segment.fd)
    size = os.fstat(segment.fd).st_size
    headers, gaps = _split(segment, 0, size, payloads=False)
    clean = max((h.offset + h.record_bytes for h in headers), default=BLOCK)
    index.add(name, headers, clean)
    directory.counters.add(recovered_records=len(headers))
    if dead:
        _clear_gaps(directory, segment, gaps, size)


def sweep(directory: Directory, segment: Segment) -> None:
    """Punch out what is in no indexed record. Only for segments that nobody appends to."""
    if not directory.punches:
        return
    before = os.fstat(segment.fd).st_blocks
    at = BLOCK
    for place in directory.index.places(segment.name):
        if place.offset > at:
            files.punch(segment.fd, at, place.offset - at)
        at = max(at, place.offset + place.bytes)
    size = os.fstat(segment.fd).st_size
    if size > at:
        files.punch(segment.fd, at, size - at)
    freed = (before - os.fstat(segment.fd).st_blocks) * 512
    directory.counters.add(reclaimed_bytes=max(0, freed))


def collect(directory: Directory, on_segment: Callable[[], None] = lambda: None) -> None:
    """All that an open does, and every segment swept."""
    reconcile(directory)
    for name in segment_files(directory.segments_path):
        segment = _of_a_dead_writer(directory, name)
        if segment is not None:
            sweep(directory, segment)
        on_segment()


def remove_left_overs(directory: Directory) -> None:
    """Segments without records whose writer is gone, drafts, and quarantine past its bounds."""
    for name in directory.index.empty_segments():
        directory.remove_if_dead(name)
    directory.remove_old_indexes()
    for path in directory.path.glob("*.tmp*"):
        path.unlink(missing_ok=True)
    for folder in (directory.manifests_path, directory.segments_path, directory.quarantine_path):
        for path in folder.glob("*.tmp"):
            directory.counters.add(reclaimed_bytes=path.stat().st_blocks * 512)
            path.unlink(missing_ok=True)
    directory.trim_quarantine()


def verify_sample(directory: Directory, count: int) -> Verified:
    """Read some records whole, chosen at random; damage goes to quarantine."""
    places = list(directory.index.places())
    return verify(directory, random.sample(places, min(count, len(places))))


def verify(directory: Directory, places: list[Place], *, keep: bool = False) -> Verified:
    """Read records whole. Damaged ones go to quarantine, or with ``keep`` are only counted."""
    broken = unreadable = 0
    for place in places:
        reason = ""
        try:
            segment = directory.segments.get(place.segment)
            reason = files.retried(
                lambda segment=segment, place=place: _fault(segment, place),  # type: ignore[misc]
                lambda: directory.counters.add(retries=1),
            )
        except OSError:
            unreadable += 1
            continue
        if reason and directory.index.holds(place):
            broken += 1
            if not keep:
                discard(directory, segment, place, reason)
    return Verified(len(places), broken, unreadable)


def discard(directory: Directory, segment: Segment, place: Place, reason: str) -> None:
    """Put a damaged record aside, forget it, and give its blocks back."""
    if reason == "hole":  # evicted, and its process died before it said so; or never written out
        directory.counters.add(vanished=1)
    else:
        directory.put_aside(segment, place.offset, place.bytes, reason)
    if directory.index.drop([place]) and reason not in ("hole", "index"):
        directory.punch(place)


def _fault(segment: Segment, place: Place) -> str:
    """What is wrong with a record, in a word; empty if nothing."""
    try:
        header = segment.header(place.offset)[0]
        if header.record_bytes != place.bytes or name_tag(header.name) != place.tag:
            return "index"
        return "" if segment.whole(header) else "checksum"
    except Damaged as fault:
        return fault.reason
    except files.Short:
        return "short"


def _of_a_dead_writer(directory: Directory, name: str) -> Segment | None:
    """A segment that nobody appends to, locked as long as it is held."""
    try:
        segment = Segment(directory.segments_path, name, os.O_RDWR)
    except OSError:
        return None
    return segment if files.lock_now(segment.fd) else None


def _recover_tail(directory: Directory, segment: Segment, clean: int) -> None:
    """Index what a dead writer left behind the clean length, and cut off what is torn."""
    size = os.fstat(segment.fd).st_size
    if size <= max(clean, BLOCK):
        directory.index.add_segment(segment.name)
        return
    headers, gaps = _split(segment, clean, size, payloads=True)
    end = max((h.offset + h.record_bytes for h in headers), default=max(clean, BLOCK))
    directory.index.add(segment.name, headers, end)
    directory.counters.add(recovered_records=len(headers))
    _clear_gaps(directory, segment, gaps, size)


def _clear_gaps(directory: Directory, segment: Segment, gaps: list[Gap], size: int) -> None:
    """A gap at the end is a torn write and cut off; what is damaged between records is put aside."""
    for gap in gaps:
        if gap.offset + gap.bytes >= size:
            os.ftruncate(segment.fd, gap.offset)
            directory.counters.add(torn_bytes=size - gap.offset)
        else:
            directory.put_aside(segment, gap.offset, gap.bytes, "header")
            if directory.punches:
                files.punch(segment.fd, gap.offset, gap.bytes)


def _split(
    segment: Segment, start: int, end: int, *, payloads: bool
) -> tuple[list[Header], list[Gap]]:
    headers: list[Header] = []
    gaps: list[Gap] = []
    for found in scan(segment, start, end, payloads=payloads):
        if isinstance(found, Gap):
            gaps.append(found)
        else:
            headers.append(found)
    return headers, gaps


def index_equals_segments(index: Index, directory: Directory) -> bool:
    """Whether the index leads to exactly the records that the segments hold. Reads all headers."""
    said = {(place.segment, place.offset, place.bytes, place.tag) for place in index.places()}
    there = set()
    for name in segment_files(directory.segments_path):
        segment = Segment(directory.segments_path, name)
        headers, _ = _split(segment, 0, os.fstat(segment.fd).st_size, payloads=False)
        for header in headers:
            there.add((name, header.offset, header.record_bytes, name_tag(header.name)))
    return said == there
