"""What the threads do: fill slots from the device or from a store, and write slots to a store.

A job touches the bytes of slots that are pinned for it, and its own fields; what follows from them is
done on the scheduler's thread. Neighbouring slots go to and from the store at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..host import HostTier
from ..lower import Store
from ..worth import Entry


@dataclass(eq=False)
class Fill:
    """Copy pages that leave the device into their slots, and compute their checksums."""

    host: HostTier
    entries: list[Entry]
    rows: list[int]  # of `data`, one for each entry
    data: torch.Tensor  # uint8 [n, page_bytes], on any device; kept until the copy is done
    ready: Any = None  # a CUDA event after which `data` may be read; None on the CPU
    checksums: list[int | None] = field(default_factory=list)
    failed: bool = False

    def run(self) -> None:
        """Copy."""
        if self.ready is None:
            # numpy copies on this thread; torch would start a team of threads for each lane.
            source, target = self.data.numpy(), self.host.data.numpy()
            for entry, row in zip(self.entries, self.rows, strict=True):
                np.copyto(target[entry.slot], source[row])
        else:
            self._from_device()
        self.checksums = [self.host.checksum(entry.slot) for entry in self.entries]

    def _from_device(self) -> None:
        stream = torch.cuda.Stream(self.data.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(self.ready)
            for entry, row in zip(self.entries, self.rows, strict=True):
                self.host.data[entry.slot].copy_(self.data[row], non_blocking=True)
            stream.synchronize()


@dataclass(eq=False)
class Read:
    """Read pages from the store into their slots."""

    host: HostTier
    store: Store
    entries: list[Entry]
    landed: dict[Entry, int | None] = field(default_factory=dict)  # with their checksums
    failed: bool = False

    def run(self) -> None:
        """Read."""
        for stretch in stretches(self.entries):
            into = self.host.buffer(stretch[0].slot, len(stretch))
            landed = self.store.read([entry.name for entry in stretch], into)
            for entry, there in zip(stretch, landed, strict=True):
                if there:
                    self.landed[entry] = self.host.checksum(entry.slot)


@dataclass(eq=False)
class Write:
    """Write pages to the store, those that are still as they were sealed."""

    host: HostTier
    store: Store
    entries: list[Entry]
    damaged: set[Entry] = field(default_factory=set)
    stored: set[Entry] = field(default_factory=set)
    failed: bool = False

    def run(self) -> None:
        """Verify and write."""
        self.damaged = {
            entry for entry in self.entries if self.host.checksum(entry.slot) != entry.checksum
        }
        sound = [entry for entry in self.entries if entry not in self.damaged]
        for stretch in stretches(sound):
            taken = self.store.write(
                [entry.name for entry in stretch],
                self.host.buffer(stretch[0].slot, len(stretch)),
                [entry.worth for entry in stretch],
            )
            self.stored.update(entry for entry, there in zip(stretch, taken, strict=True) if there)


def stretches(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Pages in the given order, those together whose slots follow one another."""
    found: list[list[Entry]] = []
    for entry in entries:
        if found and found[-1][-1].slot + 1 == entry.slot:
            found[-1].append(entry)
        else:
            found.append([entry])
    return found
