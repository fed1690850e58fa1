"""A request that reads spans, from its arrival to its end.

Attached to SGLang's ``Req`` as the attribute ``tessera_reader``, so it lives and dies with it. The
layout never changes; what changes is whether the spans' pages are held.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera_sglang.attention.layout import ContextLayout, SharedRun
from tessera_sglang.attention.plan import Ints
from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import Chain, VisibleSpan
from tessera_sglang.memory_pool.runs import Match, Path, Segment

ATTRIBUTE = "tessera_reader"
SPAN_PREFILL = "tessera_span_prefill"  # attribute of a Req that intake made


@dataclass(eq=False)
class Body:
    """The shareable pages of a span behind the root: what a plain prompt ``[root | body]`` leaves.

    One object for equal tokens in one namespace, as long as any reader wants them.
    """

    tokens: array[int]  # root, then body; whole pages
    chain: Chain
    digest: bytes  # of the tokens, cryptographic
    missing_at: int = -1  # intake: pages the index had ever published when it was last looked for
    failures: int = 0  # intake: prefills that ended and left it missing


@dataclass(slots=True, eq=False)
class Reader:
    """What intake, cache and backend know of one request with spans."""

    layout: ContextLayout
    bodies: tuple[Body, ...]  # one per run of the layout, equal ones shared
    visible_spans: tuple[VisibleSpan, ...]
    body_holds: dict[Body, Path] = field(default_factory=dict)  # found so far
    path: Path | None = None  # all shared pages in row order, held; None while any is missing
    path_epoch: tuple[int, int] = (-1, -1)  # of the index, when the path was last seen intact
    computed_tokens: int = 0  # shared tokens that this reader's own span prefills computed
    _chain: tuple[int, Chain] | None = None
    _sources: tuple[tuple[Segment, ...], Ints] | None = None

    @property
    def shared_tokens(self) -> int:
        """Of its row, those of the spans' shared pages."""
        return self.layout.shared_tokens

    @property
    def distinct_bodies(self) -> list[Body]:
        """Bodies without repetitions, in prompt order."""
        return list(dict.fromkeys(self.bodies))

    def ready(self, index: ContentIndex) -> bool:
        """Whether all shared pages are held and still there."""
        if self.path is None:
            return False
        if self.path_epoch != index.hold_epoch:
            if not index.intact(self.path):
                return False
            self.path_epoch = index.hold_epoch
        return True

    def match(self, index: ContentIndex, req: Any, limit: int) -> Path:
        """Shared pages and then whatever of the remaining tokens is cached, up to ``limit`` tokens.

        Empty when the spans are not resident: intake then keeps the request from being scheduled.
        """
        if self.path is None or not self.ready(index):
            return index.path()
        found = index.match(self._remaining_chain(index, req), limit - self.layout.shared_tokens)
        return index.path((*self.path.segments, *found.segments()), fork=found.fork)

    def remaining(self, index: ContentIndex, req: Any, path: Path) -> tuple[Chain, Match]:
        """The chain of the remaining tokens, and what of it a path has that :meth:`match` gave."""
        own = path.segments[len(self.layout.runs) :]
        found = Match(own[0].run, own[0].end) if own else Match(None, 0)
        return self._remaining_chain(index, req), found

    def _remaining_chain(self, index: ContentIndex, req: Any) -> Chain:
        length = len(req.origin_input_ids) + len(req.output_ids)
        if self._chain is None or self._chain[0] != length:
            tokens = (req.origin_input_ids + req.output_ids)[self.layout.shared_tokens :]
            root_key = self.bodies[0].chain.root_key
            self._chain = length, index.chain(root_key, tokens, self.visible_spans)
        return self._chain[1]

    def sources(self, req: Any) -> Ints:
        """An id of the physical pages behind each shared run of a running request. int64 [runs]

        A page has one place in the index for as long as anybody holds it, so the last page of a run and
        the number of its pages name all of them.
        """
        spans = req.last_node.segments[: len(self.layout.runs)]
        kept = self._sources
        if kept is None or any(a is not b for a, b in zip(kept[0], spans, strict=True)):
            pages = [segment.page_ids() for segment in spans]
            ids = [int(found[-1]) << 32 | len(found) for found in pages]
            kept = self._sources = spans, np.array(ids, dtype=np.int64)
        return kept[1]

    def assemble(self, index: ContentIndex, found: Sequence[Path]) -> Path:
        """Path over the visible pages of each run's body in row order; it keeps the others too."""
        first = [_first_visible_page(run, self.layout) for run in self.layout.runs]
        return index.path(
            replace(body.segments[0], first=page) for body, page in zip(found, first, strict=True)
        )


def _first_visible_page(run: SharedRun, layout: ContextLayout) -> int:
    return (layout.root_tokens + run.prompt_start - run.body_start) // layout.page_size


def reader_of(req: Any) -> Any:
    """The reader of a request, or None for a plain one."""
    return getattr(req, ATTRIBUTE, None)


def is_span_prefill(req: Any) -> bool:
    """Whether a request is one of ours: nobody outside knows of it."""
    return getattr(req, SPAN_PREFILL, False)


def attach(req: Any, reader: Reader | None) -> None:
    """Make a request a reader, or plain again."""
    setattr(req, ATTRIBUTE, reader)


class ReaderId(str):
    """A request id in a batch that carries the reader's layout and the pages behind its runs.

    A batch on its way to the model is copied field by field, and its list of ids is what arrives.
    Looking the layout up by the id would not do: clients choose ids, also each other's.
    """

    __slots__ = ("layout", "sources")
    layout: ContextLayout
    sources: Ints

    def __new__(cls, rid: str, layout: ContextLayout, sources: Ints) -> ReaderId:
        """``rid`` with the rest beside it; see `Reader.sources`."""
        made = super().__new__(cls, rid)
        made.layout = layout
        made.sources = sources
        return made
