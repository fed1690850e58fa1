"""From a request's declaration to a scheduled reader.

A request with spans waits in SGLang's own queue, like any other, so that priorities, limits, aborts
and time-outs work on it unchanged. It is only *hidden* from the scheduling pass while a span of it is
missing. For a missing span one prefill-only request is queued in its place, whoever else waits; when
all its spans are resident, the reader holds them and becomes visible.

Nothing here is notified of anything. Before each scheduling pass the queue is looked at as it is
(:meth:`SpanIntake.arrange`), so a finished, aborted, retracted or flushed request, or one that vanished
on a path nobody thought of, is simply seen, and its holds are dropped. The same decisions fall on
every tensor-parallel rank: they depend on the order of requests alone.

Room: a hold keeps pages from new admissions, not from running requests, which may break it. Readers
start to gather their spans only while what is held, what is on its way and what they will need fit
the pool together; should the head of the queue still not fit while nothing runs, everybody else's
holds are dropped for it. So readers that do not fit together are served one after another.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from tessera_sglang.attention.layout import lay_out
from tessera_sglang.memory_pool.keys import PageKey, VisibleSpan
from tessera_sglang.memory_pool.runs import Path

from . import hints, ignored
from . import spans as declaration
from .cache import TesseraCache
from .compat import FINISH_ABORT, Req, SamplingParams
from .config import ConfigError
from .reader import SPAN_PREFILL, Body, Reader, attach, is_span_prefill, reader_of
from .root import root_tokens

MAX_FAILURES = 8  # prefills of a body that end and leave it missing, before its readers are refused


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """What the server decided about spans at start, and requests may override.

    ``refusal`` says why it serves none.
    """

    link_pages: int
    root: array[int]  # whole pages, possibly none
    refusal: str | None = None


@dataclass(slots=True, eq=False)
class SpanPrefill:
    """A body on its way: the request that computes it, and the reader it is computed for first."""

    request: Any
    body: Body
    owner: Reader
    new_pages: int


class SpanIntake:
    """One per scheduler."""

    def __init__(self, scheduler: Any, cache: TesseraCache, settings: SpanSettings) -> None:
        self.cache = cache
        self.settings = settings
        self._scheduler = scheduler
        self._bodies: WeakValueDictionary[tuple[PageKey, bytes], Body] = WeakValueDictionary()
        self._on_the_way: dict[Body, SpanPrefill] = {}
        self._holding: dict[int, tuple[Any, Reader]] = {}  # by id of the request
        self._serial = 0
        self.fetching = False  # as of the last look: some request waits for a lower tier
        cache.keep_for(self._held)

    # --- arrival ---------------------------------------------------------------------------------

    def accept(self, req: Any) -> None:
        """Make a request that enters the queue a reader, or abort it with the reason.

        Idempotent: a retracted reader enters the queue again and keeps its row order.
        """
        if req.to_finish is not None or req.finished():
            attach(req, None)
            return
        if reader_of(req) is not None or is_span_prefill(req):
            return
        try:
            reader = self._read(req)
        except declaration.SpanError as error:
            if hints.drop(req.sampling_params):
                ignored.count(None, "room", str(error))
            else:
                req.set_finish_with_abort(str(error))
            return
        if reader is None:
            return
        prompt = np.frombuffer(req.origin_input_ids, dtype=np.int64)
        attach(req, reader)
        # origin_input_ids_unpadded keeps the prompt order, which detokenisation continues from
        req.origin_input_ids = array("q", prompt[reader.layout.row_order].tobytes())
        req.full_untruncated_fill_ids = array("q")

    def _read(self, req: Any) -> Reader | None:
        prompt: array[int] = req.origin_input_ids
        custom_params = getattr(req.sampling_params, "custom_params", None)
        spans = declaration.parse(declaration.declared(custom_params), len(prompt))
        if not spans:
            return None
        declaration.check_request(req, spans, self.settings.refusal)
        size = self.cache.page_size
        vocab_size = self._scheduler.model_config.vocab_size
        asked = declaration.overrides(custom_params, page_size=size, vocab_size=vocab_size)
        root = self._root(asked.root)
        layout = lay_out(
            spans,
            prompt_tokens=len(prompt),
            page_size=size,
            root_tokens=len(root),
            linked_pages=(
                self.settings.link_pages if asked.link_pages is None else asked.link_pages
            ),
        )
        if layout is None:
            return None
        root_key = self.cache.root_key(req.extra_key, req.cache_salt, req.lora_id)
        bodies: list[Body] = []
        visible: list[VisibleSpan] = []
        for run, at in zip(layout.runs, layout.visible_from, strict=True):
            body = self._body(
                root_key, root + prompt[run.body_start : run.body_start + run.body_tokens]
            )
            bodies.append(body)
            visible.append(
                VisibleSpan(at, body.digest, run.body_start, run.body_tokens, layout.linked_pages)
            )
        reader = Reader(layout, tuple(bodies), tuple(visible))
        self._check_room(req, reader)
        return reader

    def _root(self, asked: str | tuple[int, ...] | None) -> array[int]:
        """The root of a request: its own, or the server's where it asks for none."""
        if asked is None:
            return self.settings.root
        if asked == "auto":
            return self._auto_root
        return array("q", () if isinstance(asked, str) else asked)

    @cached_property
    def _auto_root(self) -> array[int]:
        scheduler = self._scheduler
        if scheduler.tokenizer is None:
            raise declaration.SpanError(
                f'{declaration.OBJECT}.root: "auto" needs a tokenizer, which this server lacks '
                "(--skip-tokenizer-init); give token ids"
            )
        try:
            return root_tokens(
                "auto",
                tokenizer=scheduler.tokenizer,
                vocab_size=scheduler.model_config.vocab_size,
                page_size=self.cache.page_size,
            )
        except ConfigError as error:
            raise declaration.SpanError(
                f'{declaration.OBJECT}.root: "auto" can not be made of this server\'s tokenizer; '
                f"give token ids ({error})"
            ) from error

    def _body(self, root_key: PageKey, tokens: array[int]) -> Body:
        digest = hashlib.blake2b(tokens, digest_size=32).digest()
        body = self._bodies.get((root_key, digest))
        if body is None:
            body = Body(tokens, self.cache.index.chain(root_key, tokens), digest)
            self._bodies[root_key, digest] = body
        return body

    def _check_room(self, req: Any, reader: Reader) -> None:
        """Refuse what can never fit; shorten what can not generate as much as it asks for."""
        scheduler, size = self._scheduler, self.cache.page_size
        root = reader.layout.root_tokens
        for body in reader.distinct_bodies:
            if len(body.tokens) >= scheduler.max_req_input_len:
                raise declaration.SpanError(
                    f"a span of {len(body.tokens) - root} shareable tokens and "
                    f"the root of {root} exceed the maximum input length of "
                    f"{scheduler.max_req_input_len} tokens; split the span"
                )
        remaining = len(reader.layout.remaining)
        span_pages = _pages_of(reader)
        # what SGLang asks of an empty pool before it admits a request
        needed = span_pages * size + remaining + size + 1
        room = scheduler.max_total_num_tokens - needed
        if room < 0:
            raise declaration.SpanError(
                f"the prompt needs {needed} tokens of KV: {span_pages * size} for its spans (with the "
                f"root and linked pages), {remaining} for the rest and a page to generate into; the "
                f"pool holds {scheduler.max_total_num_tokens}"
            )
        params = req.sampling_params
        params.max_new_tokens = min(params.max_new_tokens, room)
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)

    # --- before each scheduling pass -------------------------------------------------------------

    def idle(self, queue: Sequence[Any]) -> bool:
        """Whether there is nothing to arrange: nobody waits for a span or a lower tier, or holds."""
        below = self.cache.below
        return (
            not self._holding
            and not self._on_the_way
            and (below is None or not (queue or below.busy))
            and not any(reader_of(req) is not None for req in queue)
        )

    def arrange(self, queue: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split the waiting queue into what may be scheduled now and what must wait for a span.

        Queues span prefills where they are needed. Both lists keep the queue's order.
        """
        self._forget_vanished(queue)
        if self.cache.below is not None:
            self.cache.below.keep_only(queue)
        visible: list[Any] = []
        hidden: list[Any] = []
        self.fetching = False
        wanted: set[Body] = set()
        crowded = False  # an earlier reader lacks room: later ones must not take what comes free
        for req in queue:
            reader = reader_of(req)
            if reader is None or self._ready(reader):
                (hidden if self._fetches(req) else visible).append(req)
                continue
            missing = self._gather(req, reader, only_look=crowded)
            if not missing:
                (hidden if self._fetches(req) else visible).append(req)
            elif any(body.failures > MAX_FAILURES for body in missing):
                self._give_up(req)
                visible.append(req)
            else:
                wanted.update(missing)
                absent = [body for body in missing if body not in self._on_the_way]
                crowded = crowded or not self._room_for(reader, absent)
                for body in () if crowded else absent:
                    prefill = self._start(req, reader, body).request
                    (hidden if self._fetches(prefill) else visible).append(prefill)
                hidden.append(req)
        self._drop_unwanted(wanted, visible, hidden)
        return visible, hidden

    def _fetches(self, req: Any) -> bool:
        """Whether pages that a request could use are on their way from a lower tier to host memory."""
        below, index = self.cache.below, self.cache.index
        if below is None:
            return False
        if not below.asked(req):
            reader = reader_of(req)
            if reader is not None:
                assert reader.path is not None
                path = reader.match(index, req, len(req.origin_input_ids) + len(req.output_ids))
                chain, found = reader.remaining(index, req, path)
            else:
                root = self.cache.root_key(req.extra_key, req.cache_salt, req.lora_id)
                chain = index.chain(root, req.origin_input_ids + req.output_ids)
                found = index.match(chain)
            below.fetch(req, chain, found, shared=is_span_prefill(req))
        waits = below.waits(req)
        self.fetching = self.fetching or waits
        return waits

    def _ready(self, reader: Reader) -> bool:
        if not reader.ready(self.cache.index):
            return False
        assert reader.path is not None
        return self.cache.readable(reader.path)

    def _forget_vanished(self, queue: Sequence[Any]) -> None:
        waiting = {id(req) for req in queue}
        for key in [key for key in self._holding if key not in waiting]:
            self.drop_holds(self._holding[key][0])
        for body, prefill in list(self._on_the_way.items()):
            request = prefill.request
            if id(request) in waiting or request.kv.holds_kv:
                continue  # queued or running
            del self._on_the_way[body]
            body.missing_at = -1
            if request.finished() and not isinstance(request.finished_reason, FINISH_ABORT):
                body.failures += 1  # until it is found
                prefill.owner.computed_tokens += _computed(prefill)

    def _gather(self, req: Any, reader: Reader, *, only_look: bool) -> list[Body]:
        """Hold what is resident of the reader's spans; returns what is missing.

        With ``only_look`` nothing new is held.
        """
        index = self.cache.index
        if reader.path is not None:
            self.drop_holds(req)  # a held page is gone
        missing: list[Body] = []
        for body in reader.distinct_bodies:
            held = reader.body_holds.get(body)
            if held is not None and index.intact(held) and self.cache.readable(held):
                continue
            if held is not None:
                index.release(reader.body_holds.pop(body))
            held = None if only_look else self._find(body)
            if held is None:
                missing.append(body)
                continue
            reader.body_holds[body] = held
            index.hold(held)
            self._holding[id(req)] = req, reader
        if not missing:
            found = [reader.body_holds[body] for body in reader.bodies]
            reader.path = reader.assemble(index, found)
            reader.path_epoch = index.hold_epoch
            index.hold(reader.path)
            self._release_bodies(reader)
        return missing

    def _find(self, body: Body) -> Path | None:
        """All pages of a body, or None. Looks only when something new could be there."""
        index = self.cache.index
        published = index.counters.published_pages
        if body in self._on_the_way or body.missing_at == published:
            return None
        found = index.match(body.chain)
        path = index.path(found.segments())
        if found.pages < body.chain.page_count or not self.cache.readable(path):
            body.missing_at = published
            return None
        body.failures = 0
        index.share(path)
        return path

    def _give_up(self, req: Any) -> None:
        """A span can not be kept, whatever the reason: say so instead of trying for ever."""
        self.drop_holds(req)
        attach(req, None)
        if hints.drop(req.sampling_params):  # as text, in the order of the prompt
            req.origin_input_ids = array("q", req.origin_input_ids_unpadded)
            req.full_untruncated_fill_ids = array("q")
            ignored.count(None, "kept", "a span could not be kept in the cache")
            return
        req.set_finish_with_abort(
            "a span of this request could not be kept in the cache: its pages collide with those "
            "of another text or are evicted at once; try again later, or send it without spans",
            status_code=HTTPStatus.SERVICE_UNAVAILABLE,
            err_type="ServiceUnavailable",
        )

    def _room_for(self, reader: Reader, absent: Sequence[Body]) -> bool:
        if not absent:
            return True  # everything is on its way
        others = any(held is not reader for _, held in self._holding.values())
        if not others and not self._on_the_way:
            return True  # it fits alone: checked on arrival
        size = self.cache.page_size
        remaining = -(-len(reader.layout.remaining) // size) + 1
        coming = sum(prefill.new_pages for prefill in self._on_the_way.values())
        new = sum(body.chain.page_count for body in absent)
        total: int = self._scheduler.max_total_num_tokens // size
        kept = {body for _, waiting in self._holding.values() for body in waiting.bodies}
        kept.update(self._on_the_way, reader.bodies)
        return (
            self.cache.index.held_pages + coming + new + remaining < total
            and len(kept) <= self.cache.most_bodies
        )

    def _start(self, req: Any, reader: Reader, body: Body) -> SpanPrefill:
        """A prefill-only request over ``[root | body]``, in the reader's namespace and priority."""
        scheduler = self._scheduler
        self._serial += 1
        params = SamplingParams(max_new_tokens=0, temperature=0.0)
        params.normalize(None)
        prefill = Req(
            f"tessera-span-{self._serial}",
            "",
            array("q", body.tokens),
            params,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
            vocab_size=scheduler.model_config.vocab_size,
            lora_id=req.lora_id,
            priority=req.priority,
            routing_key=req.routing_key,
            cache_salt=req.cache_salt,
        )
        setattr(prefill, SPAN_PREFILL, True)
        prefill.extra_key = req.extra_key  # already carries the LoRA id
        prefill.tokenizer = scheduler.tokenizer
        prefill.logprob_start_len = len(body.tokens)
        scheduler.init_req_max_new_tokens(prefill)
        prefill.time_stats.set_wait_queue_entry_time()
        prefill.arrival_processed_tokens = scheduler.processed_tokens_counter
        found = self.cache.index.match(body.chain)
        started = SpanPrefill(prefill, body, reader, body.chain.page_count - found.pages)
        self._on_the_way[body] = started
        return started

    def _drop_unwanted(self, wanted: set[Body], *queues: list[Any]) -> None:
        """Drop queued span prefills that nobody waits for any more."""
        dropped: set[int] = set()
        for body, prefill in list(self._on_the_way.items()):
            if body not in wanted and not prefill.request.kv.holds_kv:
                del self._on_the_way[body]
                dropped.add(id(prefill.request))
        for queue in queues if dropped else ():
            queue[:] = [req for req in queue if id(req) not in dropped]

    # --- holds -----------------------------------------------------------------------------------

    def drop_holds(self, req: Any) -> None:
        """The request no longer waits for its spans, or must give them up."""
        entry = self._holding.pop(id(req), None)
        if entry is None:
            return
        reader = entry[1]
        self._release_bodies(reader)
        if reader.path is not None:
            self.cache.index.release(reader.path)
            reader.path = None

    def _held(self) -> Iterator[Path]:
        """What all readers hold that wait."""
        for _, reader in self._holding.values():
            if reader.path is not None:
                yield reader.path
            else:
                yield from reader.body_holds.values()

    def _release_bodies(self, reader: Reader) -> None:
        for held in reader.body_holds.values():
            self.cache.index.release(held)
        reader.body_holds.clear()

    def make_room_for(self, head: Any) -> bool:
        """The head of the queue does not fit and nothing runs: drop all holds but its own.

        Returns whether that changed anything.
        """
        if head is None:
            return False
        keep = reader_of(head)
        for prefill in self._on_the_way.values():
            if prefill.request is head:
                keep = prefill.owner
        others = [req for req, reader in self._holding.values() if reader is not keep]
        for req in others:
            self.drop_holds(req)
        return bool(others)


def _pages_of(reader: Reader) -> int:
    """Pages that the reader's spans occupy: the root once, every distinct body once."""
    root = reader.layout.root_tokens // reader.layout.page_size
    return root + sum(body.chain.page_count - root for body in reader.distinct_bodies)


def _computed(prefill: SpanPrefill) -> int:
    """Tokens of the owner's shared runs that the prefill computed rather than found."""
    layout = prefill.owner.layout
    found: int = prefill.request.cached_tokens
    first_shared = layout.root_tokens + layout.linked_pages * layout.page_size
    return max(0, len(prefill.body.tokens) - max(found, first_shared))
