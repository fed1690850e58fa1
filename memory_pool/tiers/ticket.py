"""Pages that a request waits for."""

from __future__ import annotations

from collections.abc import Callable

from ..host import HostTier
from ..worth import Entry


class Ticket:
    """Leading pages of a chain, on their way into host memory or there, kept until :meth:`cancel`."""

    __slots__ = ("_closed", "_entries", "_host", "_on_cancel", "_settled", "owner")

    def __init__(
        self,
        host: HostTier,
        owner: str,
        entries: list[Entry],
        on_cancel: Callable[[Ticket], None],
    ) -> None:
        """``entries`` are pinned for it. ``on_cancel`` is called once, when they no longer are."""
        self.owner = owner
        self._host = host
        self._entries = entries
        self._on_cancel = on_cancel
        self._settled = 0
        self._closed = False

    @property
    def done(self) -> bool:
        """Whether nothing is on its way any more: each page is there or is a miss. O(1) amortised."""
        entries = self._entries
        while self._settled < len(entries):
            entry = entries[self._settled]
            if entry.alive and not entry.ready:
                return False
            self._settled += 1
        return True

    @property
    def pages(self) -> int:
        """Pages that it waits for or waited for, those that were there included."""
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Those pages, in order."""
        return tuple(self._entries)

    def cancel(self) -> None:
        """Wait no more, and let go of the pages: when the request has them, or is aborted.

        Reads that are queued and that nobody else waits for are dropped, their slots given back. One
        that has begun is finished, and its page stays while there is room. More than once is once.
        """
        if self._closed:
            return
        self._closed = True
        for entry in self._entries:
            self._host.unpin(entry)
        self._on_cancel(self)
