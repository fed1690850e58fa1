"""What a pass wrote is published when it was committed, over SGLang's real pools and batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine import KNOWN, LAYERS, PAGE, Engine, pages_of
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tessera_sglang.memory_pool.commit import SCHEMA_VERSION, RowSchema
from tessera_sglang.publication import rope_hash, run_pass

LONG = list(range(100, 100 + 5 * PAGE))


class BrokenLayerError(Exception):
    """A forward pass that fails."""


@pytest.fixture
def engine() -> Engine:
    return Engine()


def begin(engine: Engine, tokens: list[int]) -> Req:
    req = engine.arrive(tokens)
    engine.start(req)
    return req


def committed(engine: Engine, req: Req) -> int:
    return engine.cache.publication.residency(req).committed_tokens


def run(engine: Engine, batch: ScheduleBatch, forward: Any = lambda: None) -> None:
    """A batch as the scheduler runs it; ``forward`` writes."""
    run_pass(lambda *args: forward(), SimpleNamespace(tree_cache=engine.cache), batch)


def batch_of(mode: ForwardMode, reqs: list[Req], **fields: Any) -> ScheduleBatch:
    return ScheduleBatch(
        reqs=reqs, forward_mode=mode, spec_algorithm=SpeculativeAlgorithm.NONE, **fields
    )


def extend(engine: Engine, req: Req, start: int, end: int, forward: Any = None) -> None:
    """A prefill of row positions ``start .. end``; it writes 5.0 unless it is told otherwise."""
    req.kv.kv_committed_len = end
    batch = batch_of(ForwardMode.EXTEND, [req], extend_lens=[end - start])
    run(engine, batch, forward or (lambda: engine.write(req, 5.0, start, end)))


# --- what is published ---------------------------------------------------------------------------


def test_only_whole_committed_pages_are_published(engine: Engine) -> None:
    req = begin(engine, LONG)
    extend(engine, req, 0, 2 * PAGE + 5)
    engine.cache.checkpoint(req, up_to=len(LONG))  # as if SGLang had planned the rest already
    assert req.kv.cache_protected_len == 2 * PAGE
    assert engine.cache.index.page_count == 2
    assert engine.cache.publication.withheld == 1
    extend(engine, req, 2 * PAGE + 5, len(LONG))
    engine.finish(req)
    assert engine.cache.index.page_count == 5
    assert engine.cache.publication.withheld == 1
    engine.check()


def test_a_pass_in_flight_is_not_published(engine: Engine) -> None:
    req = begin(engine, LONG)
    before: list[int] = []

    def forward() -> None:
        engine.write(req, 5.0, 0, len(LONG))
        before.append(committed(engine, req))
        engine.cache.checkpoint(req, up_to=len(LONG))

    extend(engine, req, 0, len(LONG), forward)
    assert (before, committed(engine, req)) == ([0], len(LONG))
    assert engine.cache.index.page_count == 0


def test_a_failed_pass_publishes_nothing_and_its_pages_return(engine: Engine) -> None:
    free = engine.allocator.available_size()
    req = begin(engine, LONG)

    def forward() -> None:
        engine.write(req, 5.0, 0, len(LONG))
        raise BrokenLayerError

    with pytest.raises(BrokenLayerError):
        extend(engine, req, 0, len(LONG), forward)
    engine.finish(req)  # publishes, for all that SGLang knows
    assert engine.cache.index.page_count == 0
    assert engine.allocator.available_size() == free
    engine.check()


def test_a_request_that_no_pass_has_seen_keeps_what_it_was_lent(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = begin(engine, KNOWN[: 2 * PAGE] + [1] * 40)
    engine.cache.checkpoint(req, up_to=2 * PAGE + 40)
    assert (req.kv.cache_protected_len, len(req.last_node)) == (2 * PAGE, 2)
    assert engine.cache.index.page_count == 4
    assert engine.cache.index.locked_pages == 2
    engine.finish(req, publish=False)
    engine.check()


@pytest.mark.parametrize("failed", [False, True], ids=["in time", "while a pass fails"])
def test_an_abort_in_the_middle_of_a_prefill(engine: Engine, failed: bool) -> None:
    """Case 3: the first chunk is there with its own bytes, and nothing of the second."""
    req = begin(engine, LONG)
    extend(engine, req, 0, 2 * PAGE)
    engine.cache.checkpoint(req, up_to=2 * PAGE)

    def forward() -> None:
        engine.write(req, 7.0, 2 * PAGE, 3 * PAGE + 3)
        raise BrokenLayerError

    if failed:
        with pytest.raises(BrokenLayerError):
            extend(engine, req, 2 * PAGE, 4 * PAGE, forward)
    engine.finish(req, publish=failed)
    engine.scribble()
    again = engine.arrive(LONG[: 4 * PAGE])
    assert again.prefix_len == 2 * PAGE
    slots = engine.cache.path_device_indices(again.last_node)
    assert set(engine.latents(slots)) == {5.0 + LAYERS - 1}
    engine.check()


def test_a_retracted_request_begins_anew(engine: Engine) -> None:
    """Case 3, retraction: its row was given up, and what it had computed with it."""
    req = begin(engine, LONG)
    extend(engine, req, 0, 3 * PAGE + 2)
    engine.cache.checkpoint(req, up_to=PAGE)
    engine.finish(req, publish=False)
    engine.scribble()
    again = engine.arrive(LONG, req=req)
    assert again.prefix_len == PAGE
    engine.start(req)
    assert committed(engine, req) == PAGE
    extend(engine, req, PAGE, len(LONG), lambda: engine.write(req, 5.0, PAGE, len(LONG)))
    row = engine.row(req)[: len(LONG)]
    assert set(engine.latents(row)) == {5.0 + LAYERS - 1}
    engine.finish(req)
    assert engine.cache.index.page_count == 5
    engine.check()


def test_only_accepted_drafts_are_published(engine: Engine) -> None:
    """Four drafts a step across the end of a page; the rejected ones are written over."""
    size, start = 2 * PAGE + 8, 2 * PAGE - 2
    req = begin(engine, LONG[:size])
    extend(engine, req, 0, start)
    for value, accepted, pages in ((6.0, 1, 1), (7.0, 3, 2)):
        with engine.cache.publication.open([(req, start, start + 4)]) as verify:
            engine.write(req, value, start, start + 4)
            verify.commit([accepted])
        start += accepted
        assert committed(engine, req) == start
        engine.cache.checkpoint(req, up_to=size)
        assert engine.cache.index.page_count == pages
    slots = engine.cache.path_device_indices(req.last_node)
    wanted = [5.0] * (2 * PAGE - 2) + [6.0, 7.0]
    assert engine.latents(slots) == [value + LAYERS - 1 for value in wanted]
    engine.finish(req)
    engine.check()


# --- what a publication says ---------------------------------------------------------------------


def test_a_record_for_what_each_publication_added(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = begin(engine, [*KNOWN, *range(PAGE + 3)])
    engine.compute(req, 6.0)
    residency = engine.cache.publication.residency(req)
    engine.cache.checkpoint(req, up_to=4 * PAGE + 1)
    assert residency.record is None, "all of it was there"
    engine.cache.checkpoint(req, up_to=5 * PAGE + 3)
    said = residency.record
    assert said is not None
    assert (said.tokens, said.committed_tokens) == ((4 * PAGE, 5 * PAGE), 5 * PAGE + 3)
    assert said.pages.tolist() == pages_of(engine.row(req), 5 * PAGE)[4:]
    assert said.schema == RowSchema(
        layers=(0, LAYERS),
        row_stride_bytes=((8 + 4) * 4,),
        dtype="float32",
        scales="none",
        rope_hash="rope",
        page_tokens=PAGE,
        version=SCHEMA_VERSION,
    )


def test_a_record_names_the_sealed_pages_where_copies_were_dropped(engine: Engine) -> None:
    first, second = begin(engine, KNOWN), begin(engine, KNOWN)
    for req in (first, second):
        engine.compute(req, 5.0)
    for req in (first, second):
        engine.cache.checkpoint(req, up_to=len(KNOWN))
    records = [engine.cache.publication.residency(req).record for req in (first, second)]
    assert records[0] is not None
    assert records[1] is not None
    assert records[0].pages.tolist() == records[1].pages.tolist()


def test_the_rope_hash_tells_configurations_and_pairings_apart() -> None:
    one = SimpleNamespace(rope_theta=10000.0, rope_scaling={"factor": 4.0, "type": "yarn"})
    same = SimpleNamespace(rope_theta=10000.0, rope_scaling={"type": "yarn", "factor": 4.0})
    other = SimpleNamespace(rope_theta=10000.0, rope_scaling={"factor": 8.0, "type": "yarn"})
    assert rope_hash(one, pairing="interleaved") == rope_hash(same, pairing="interleaved")
    hashes = {rope_hash(c, pairing=p) for c in (one, other) for p in ("interleaved", "half_split")}
    assert len(hashes) == 4


# --- what a batch writes -------------------------------------------------------------------------


def test_decode_and_mixed_batches(engine: Engine) -> None:
    old = begin(engine, [*KNOWN, 1, 2])
    extend(engine, old, 0, 4 * PAGE)
    old.kv.kv_committed_len += 1
    run(engine, batch_of(ForwardMode.DECODE, [old]))
    assert committed(engine, old) == 4 * PAGE + 1
    new = begin(engine, [*KNOWN[:PAGE], 9, 9, 9])
    old.kv.kv_committed_len += 1
    run(engine, batch_of(ForwardMode.MIXED, [new, old], extend_lens=[PAGE + 3, 1]))
    assert (committed(engine, new), committed(engine, old)) == (PAGE + 3, 4 * PAGE + 2)


def test_a_prefill_of_forked_and_shared_rows_begins_behind_them(engine: Engine) -> None:
    engine.serve(KNOWN, 5.0)
    req = engine.arrive(KNOWN[: 2 * PAGE + 9] + [1] * 20)
    engine.fork(req)
    engine.start(req)
    assert committed(engine, req) == 2 * PAGE + 9
    extend(engine, req, 2 * PAGE + 9, 2 * PAGE + 29)
    engine.finish(req)
    assert engine.cache.index.page_count == 5
    engine.check()


def test_a_prefill_in_pieces_commits_with_its_last_layers(engine: Engine) -> None:
    req = begin(engine, KNOWN)
    batch = batch_of(
        ForwardMode.SPLIT_PREFILL,
        [req],
        extend_lens=[len(KNOWN)],
        model_config=SimpleNamespace(num_hidden_layers=LAYERS),
        split_forward_count=2,
    )
    run(engine, batch)
    assert committed(engine, req) == 0
    batch.split_index, batch.split_forward_count = 2, 1
    run(engine, batch)
    assert committed(engine, req) == len(KNOWN)


def test_rows_of_an_encoder_come_first(engine: Engine) -> None:
    req = begin(engine, KNOWN)
    batch = batch_of(
        ForwardMode.EXTEND,
        [req],
        extend_lens=[len(KNOWN) - 20],
        encoder_lens_cpu=[20],
        encoder_cached=[False],
    )
    run(engine, batch)
    assert committed(engine, req) == len(KNOWN)


def test_what_has_no_row_is_not_written(engine: Engine) -> None:
    run(engine, batch_of(ForwardMode.IDLE, []))
    gone, req = engine.arrive(KNOWN), begin(engine, KNOWN)
    run(engine, batch_of(ForwardMode.EXTEND, [gone, req], extend_lens=[9, len(KNOWN)]))
    assert (committed(engine, gone), committed(engine, req)) == (0, len(KNOWN))


def test_sglangs_own_tree_has_no_passes() -> None:
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace())
    assert run_pass(lambda *args, **kw: (args[1:], kw), scheduler, 1, 2, x=3) == ((1, 2), {"x": 3})
