"""What the tier tests do all the time, and a store that keeps its pages in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
import torch

from tessera_sglang.memory_pool.keys import Chain, HashFunction, Namespace, VisibleSpan
from tessera_sglang.memory_pool.lower import PageName, Worth
from tessera_sglang.memory_pool.names import blake2b_256, names_of

PAGE = 4  # tokens
PAGE_BYTES = 96
ROOT = Namespace("model").root_key()


def weak(data: bytes) -> bytes:
    """Eight bits of a digest: pages share keys all the time."""
    return hashlib.blake2b(data, digest_size=1).digest() * 32


def chain_names(
    tokens: Sequence[int],
    *visible: VisibleSpan,
    root: bytes = ROOT,
    digest: HashFunction = blake2b_256,
) -> list[PageName]:
    """Names of all whole pages of a prompt."""
    chain = Chain(root, list(tokens), PAGE, visible=visible)  # type: ignore[arg-type]
    return names_of(chain, 0, chain.page_count, None, digest)


def document(number: int, pages: int, digest: HashFunction = blake2b_256) -> list[PageName]:
    """Names of a text that shares no token with another."""
    return chain_names(range(number * 1000, number * 1000 + pages * PAGE), digest=digest)


def content(name: PageName) -> bytes:
    """The KV of a page: a function of its tokens, which the tests never repeat."""
    return hashlib.shake_128(name.namespace + name.tokens + name.mark).digest(PAGE_BYTES)


def pages(names: Sequence[PageName]) -> torch.Tensor:
    """The KV of pages: uint8 [n, PAGE_BYTES]."""
    raw = b"".join(content(name) for name in names)
    flat = np.frombuffer(raw, np.uint8).copy().reshape(len(names), PAGE_BYTES)
    return torch.from_numpy(flat)


def worths(names: Sequence[PageName], *, shared: bool = False, hits: int = 0) -> list[Worth]:
    """Worths of pages from the first of a chain on."""
    return [Worth(number * PAGE, shared, hits) for number in range(len(names))]


class MemoryStore:
    """A :class:`~tessera_sglang.memory_pool.lower.Store` in a dictionary, as slow as its gates say."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[PageName, bytes]] = {}
        self.may_read = threading.Event()
        self.may_write = threading.Event()
        self.reads = threading.Semaphore(0)  # one for each that has begun
        self.writes = threading.Semaphore(0)
        self.asked = 0  # names, by contains
        self.full = False  # takes nothing any more
        self.broken = False  # raises, which a store must not
        self.closed = False
        self.may_read.set()
        self.may_write.set()
        self._lock = threading.Lock()

    def contains(self, names: list[PageName]) -> list[bool]:
        self.asked += len(names)
        return [name.key in self.pages for name in names]

    def read(self, names: list[PageName], into: memoryview) -> list[bool]:
        self.reads.release()
        assert self.may_read.wait(60)
        if self.broken:
            raise OSError("the store is broken")
        assert len(into) == len(names) * PAGE_BYTES
        landed = []
        for number, name in enumerate(names):
            with self._lock:
                kept = self.pages.get(name.key)
            there = kept is not None and kept[0] == name
            if kept is not None and there:
                into[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = kept[1]
            landed.append(there)
        return landed

    def write(self, names: list[PageName], pages: memoryview, worth: list[Worth]) -> list[bool]:
        self.writes.release()
        assert self.may_write.wait(60)
        if self.broken:
            raise OSError("the store is broken")
        assert len(pages) == len(names) * PAGE_BYTES
        assert len(worth) == len(names)
        taken = []
        for number, name in enumerate(names):
            page = bytes(pages[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])
            with self._lock:
                if not self.full:
                    self.pages.setdefault(name.key, (name, page))
                taken.append(self.pages.get(name.key, (None,))[0] == name)
        return taken

    def close(self) -> None:
        self.closed = True
