"""What must hold in a content index between two operations. For tests; nothing here is fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from .eviction import evictable
from .keys import TOKEN_BYTES, PageKey
from .runs import Run


class Totals(Protocol):
    """The counts that an index keeps."""

    page_size: int

    @property
    def page_count(self) -> int: ...

    @property
    def locked_pages(self) -> int: ...

    @property
    def held_pages(self) -> int: ...


def check(runs: Mapping[PageKey, Run], roots: Mapping[PageKey, Run], totals: Totals) -> None:
    """Assert that every page is found where it belongs, belongs once, and is counted once."""
    size = totals.page_size
    pages = locked = held = 0
    owned: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for root_key, root in roots.items():
        assert root.alive and root.root_key == root_key and root.end == 0 and root.children
        _check_below(root, runs, size)
    for key, run in runs.items():
        assert run.alive and run.key == key, "a run goes by another name"
        assert run.page_count == len(run.page_ids) > 0, "a run without pages"
        assert len(run.raw) == run.page_count * size * TOKEN_BYTES, "tokens and pages differ"
        assert run.parent is not None and run.start == run.parent.end, "a gap in a chain"
        assert run.parent.alive and run.parent.root_key == run.root_key
        assert run.queued or not evictable(run), "an evictable run is not queued"
        _check_below(run, runs, size)
        owned.append(run.page_ids)
        pages += run.page_count
        locked += run.page_count if run.locks else 0
        held += run.page_count if run.holds and not run.locks else 0
    below = sum(len(run.children) for run in (*roots.values(), *runs.values()))
    assert below == len(runs), "a run that hangs below nothing"
    ids = np.concatenate(owned) if owned else np.empty(0, np.int32)
    assert len(np.unique(ids)) == len(ids), "a physical page has two owners"
    assert pages == totals.page_count and locked == totals.locked_pages, "counts drifted"
    assert held == totals.held_pages, "counts drifted"


def _check_below(run: Run, runs: Mapping[PageKey, Run], size: int) -> None:
    """Children are known, in order, of this parent, and counted where they are locked or held."""
    order = [(child.first, child.order(size)) for child in run.children]
    assert order == sorted(order), "children out of order"
    for child in run.children:
        assert child.parent is run and runs[child.key] is child, "a child that can not be found"
        assert child.tick <= run.tick, "a page was used without the one before it"
        assert child.hits <= run.hits or not run.page_count
    assert run.locks >= sum(child.locks > 0 for child in run.children) >= 0, "a lock went astray"
    assert run.holds >= sum(child.holds > 0 for child in run.children) >= 0, "a hold went astray"
