"""Counts of the lower tiers, in pages where they say nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """Only grow; what host memory itself counts is beside (:class:`~memory_pool.host.HostTier`)."""

    demoted: int = 0  # given a slot in host memory
    already_held: int = 0  # demoted again while host memory still had them
    dropped: int = 0  # demoted, and no tier had room
    loaded_back: int = 0  # handed out by leases, verified
    from_store: int = 0  # read into host memory
    read_misses: int = 0  # the store was thought to have them and did not, or was damaged
    written: int = 0  # the store took them, or had them
    write_refused: int = 0  # it did not
    prefetches_refused: int = 0  # calls: the queue of reads or host memory is full
    prefetch_cancelled: int = 0  # queued reads dropped again
    worker_faults: int = 0  # jobs that raised, which none should


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is where at one moment."""

    host_pages: int  # can be found, filling ones too
    host_bytes: int
    dirty_pages: int  # of those, not known to be in the store
    filling_pages: int  # being copied from the device
    reading_pages: int
    writing_pages: int
