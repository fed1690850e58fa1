"""Pages of host memory that a request reads."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch

from ..host import HostTier
from ..worth import Entry
from .jobs import stretches
from .records import TierCounters


class Lease:
    """Keeps its pages where they are until :meth:`release`: until copies from them have landed."""

    __slots__ = ("_counters", "_entries", "_host", "_on_release", "_released", "_verified")

    def __init__(
        self,
        host: HostTier,
        entries: list[Entry],
        counters: TierCounters,
        on_release: Callable[[Lease], None],
    ) -> None:
        """Pins the pages, which are ready. ``on_release`` is called once."""
        self._host = host
        self._entries = entries
        self._counters = counters
        self._on_release = on_release
        self._released = self._verified = False
        for entry in entries:
            host.pin(entry)

    @property
    def pages(self) -> int:
        """How many leading pages of what was asked for it has; :meth:`data` can lower it."""
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its pages, in order."""
        return tuple(self._entries)

    def views(self) -> list[torch.Tensor]:
        """The pages in order: uint8 [k, page_bytes] each, ``pages`` in all; not to be written to.

        Views of host memory, valid until the release, one for each stretch of neighbouring slots. The
        first call verifies checksums on this thread: it ends before a page that is damaged, which is
        dropped and counted, and ``pages`` says so.
        """
        assert not self._released, "read a lease that was released"
        if not self._verified:
            self._verify()
        return [
            self._host.data[stretch[0].slot : stretch[-1].slot + 1]
            for stretch in stretches(self._entries)
        ]

    def data(self) -> torch.Tensor:
        """Likewise in one tensor, uint8 [pages, page_bytes]: a view where that can be, or a copy."""
        views = self.views()
        if len(views) == 1:
            return views[0]
        return torch.cat(views) if views else self._host.data[:0]

    def release(self) -> None:
        """Let go of the pages. More than once is once."""
        if self._released:
            return
        self._released = True
        for entry in self._entries:
            self._host.unpin(entry)
        self._on_release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _verify(self) -> None:
        self._verified = True
        sound = 0
        for entry in self._entries:
            if not self._host.verify(entry):
                break
            sound += 1
            if entry.alive:
                self._host.use(entry)
        self._counters.loaded_back += sound
        for entry in self._entries[sound:]:
            self._host.unpin(entry)
        del self._entries[sound:]
