"""Intake inside SGLang's scheduling pass: which requests it sees, and in which order they stay."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from .cache import TesseraCache
from .compat import AddReqResult
from .intake import SpanIntake
from .reader import reader_of

logger = logging.getLogger(__name__)

WAIT_S = 0.0005


def admit(original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``PrefillAdder.add_one_req``: never schedule a reader without its spans.

    Only reached when a preemption inside the pass broke the reader's hold; it is gathered anew.
    """
    reader = reader_of(req)
    if reader is not None and req.prefix_len < reader.layout.shared_tokens:
        return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


def schedule(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``Scheduler._get_new_batch_prefill_raw``: hide readers whose spans are missing."""
    intake: SpanIntake | None = getattr(scheduler, "tessera_intake", None)
    if intake is None:
        return original(scheduler, *args, **kwargs)
    below = intake.cache.below
    if below is not None:
        below.work()
    if intake.idle(scheduler.waiting_queue):
        return original(scheduler, *args, **kwargs)
    queue = scheduler.waiting_queue
    visible, hidden = intake.arrange(queue)
    order = _order(queue, visible, hidden)
    scheduler.waiting_queue = list(visible)
    try:
        batch, running = original(scheduler, *args, **kwargs)
        stalled = batch is None and _stalled(scheduler, running)
        if stalled and intake.fetching:
            time.sleep(WAIT_S)  # the scheduler's loop spins, and threads that read want their turn
        elif stalled:
            # Nothing runs and nothing could start: the first in line gets what the others hold.
            # If it is hidden, it finds room for its spans in the next pass.
            head = next(iter([*scheduler.waiting_queue, *hidden]), None)
            if intake.make_room_for(head) and scheduler.waiting_queue:
                others = scheduler.waiting_queue[1:]
                scheduler.waiting_queue = [head]
                batch, running = original(scheduler, *args, **kwargs)
                scheduler.waiting_queue += others
    finally:
        left = scheduler.waiting_queue
        scheduler.waiting_queue = _merge(order, left, hidden)
    waiting = {id(req) for req in left}
    for req in visible:
        if id(req) not in waiting:
            intake.drop_holds(req)  # scheduled: from here on its lock keeps the pages
            if below is not None:
                below.forget(req)
    return batch, running


def _stalled(scheduler: Any, running: Any) -> bool:
    return (
        running.is_empty()
        and scheduler.chunked_req is None
        and (scheduler.last_batch is None or scheduler.last_batch.is_empty())
        and not getattr(scheduler, "result_queue", None)
    )


def _order(
    queue: Sequence[Any], visible: Sequence[Any], hidden: Sequence[Any]
) -> dict[int, tuple[int, int]]:
    """Sort keys: queued requests by place, a new span prefill right before the reader it is for."""
    place = {id(req): (number, 1) for number, req in enumerate(queue)}
    for group in (visible, hidden):
        ahead = len(queue)
        for req in reversed(group):
            if id(req) in place:
                ahead = place[id(req)][0]
            else:
                place[id(req)] = (ahead, 0)
    return place


def stay_awake(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around ``Scheduler.maybe_sleep_on_idle``: first what was sealed is written down."""
    cache = scheduler.tree_cache
    below = cache.below if isinstance(cache, TesseraCache) else None
    if below is not None and (below.work() or below.stack.busy):
        time.sleep(WAIT_S)
    else:
        original(scheduler, *args, **kwargs)


def _merge(
    order: dict[int, tuple[int, int]], left: Sequence[Any], hidden: Sequence[Any]
) -> list[Any]:
    last = (len(order) + 1, 1)  # requeued during the pass: behind everybody
    return sorted([*left, *hidden], key=lambda req: order.get(id(req), last))
