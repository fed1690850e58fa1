"""What the lower tiers exchange: the names of pages outside the device, and what a page is worth.

Keys of the content index hang on physical pages and die with the process. A page that leaves the
device goes by a name that another process finds again: a chain of cryptographic digests from the
namespace's root over token bytes and marks. A key only discovers here too; whoever reads a record
compares namespace, parent, tokens and mark with those of the name it asked by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

TierKey = NewType("TierKey", bytes)

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class PageName:
    """A page of KV by what it was computed from."""

    namespace: bytes  # root key of its chain, 32 bytes
    parent: TierKey  # name of the page before it; the namespace for a first page
    key: TierKey  # digest of parent, tokens and mark
    tokens: bytes  # token ids, int64 little-endian
    mark: bytes  # what becomes visible inside it, framed; empty for a plain page


@dataclass(frozen=True, slots=True)
class Worth:
    """What deciding about a page needs to know besides its bytes."""

    start: int  # tokens before it in its chain
    shared: bool  # a page of a span's body: free of context, of use to every reader
    hits: int  # uses while it was on the device


class Store(Protocol):
    """A tier that outlives the process: a disk, or a remote engine. Any thread may call it.

    Nothing here raises for damage or I/O: a page that can not be had is a miss, and is counted.
    """

    @property
    def damaged(self) -> int:
        """Pages that were read and were not what had been stored; only grows."""
        ...

    @property
    def evicted(self) -> int:
        """Pages dropped to make room; only grows. 0 where others decide about that."""
        ...

    def state(self) -> dict[str, object]:
        """Its counters, as plain JSON."""
        ...

    def contains(self, names: list[PageName]) -> list[bool]:
        """Which pages it holds, as far as it knows without reading them."""
        ...

    def read(self, names: list[PageName], into: memoryview) -> list[bool]:
        """Read pages into ``into`` (page_bytes each, in order); which of them landed, verified."""
        ...

    def write(self, names: list[PageName], pages: memoryview, worth: list[Worth]) -> list[bool]:
        """Store pages that it does not hold; which of them it holds now."""
        ...

    def close(self) -> None:
        """Finish what was acknowledged."""
        ...
