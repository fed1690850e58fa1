"""The disk tier: pages that outlive the process.

``store`` is what a server opens (:class:`DiskStore`); ``writing`` its writing side. ``record`` and
``segments`` are the format, ``index`` and ``directory`` where things are; ``reconcile`` makes them
agree. ``identity`` says what records are of, ``counters`` what happened. ``files`` is what all of them
ask of the system. ``survey`` is for people who look at a directory.
"""

from .counters import Counters
from .identity import Identity
from .store import SEGMENT_BYTES, DiskStore
from .writing import NO_SYNC, Sync

__all__ = ["NO_SYNC", "SEGMENT_BYTES", "Counters", "DiskStore", "Identity", "Sync"]
