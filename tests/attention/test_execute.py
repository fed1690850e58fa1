"""A batch through plan, kernel and merge equals attention over keys moved to where they are used."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tessera_sglang.attention import execute
from tessera_sglang.attention.execute import Executor, Relocation
from tessera_sglang.attention.kernels.base import AttentionShape
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel
from tessera_sglang.attention.layout import ContextLayout, Span, lay_out
from tessera_sglang.attention.plan import BatchQueries, build_plan
from tessera_sglang.attention.reference import attend_reference
from tessera_sglang.attention.rope import Pairing, RelativeRotation, yarn_inv_freq
from tessera_sglang.attention.static_decode import StaticDecode, StaticShape, Storage

PAGE = 8
MLA = AttentionShape(4, 1, 48, 32, True, PAGE, torch.float32)
GQA = AttentionShape(6, 2, 16, 16, False, PAGE, torch.float32)
RELOCATION = {
    MLA: Relocation(
        RelativeRotation.from_inv_freq(
            yarn_inv_freq(10_000.0, 16, 40.0, 4096), Pairing.INTERLEAVED
        ),
        32,
    ),
    GQA: Relocation(
        RelativeRotation.from_inv_freq(yarn_inv_freq(10_000.0, 16, 1.0, 4096), Pairing.HALF_SPLIT),
        0,
    ),
}


@dataclass
class Server:
    """A pool of one layer, and rows of requests in it."""

    shape: AttentionShape
    keys: Tensor
    values: Tensor
    rows: Tensor  # [requests, positions] int32 slots
    free: list[int]

    @classmethod
    def of(
        cls, shape: AttentionShape, requests: int, *, tokens: int = 256, pages: int = 200
    ) -> Server:
        slots = pages * PAGE
        keys = torch.full((slots, shape.kv_heads, shape.key_width), math.nan, dtype=shape.dtype)
        values = keys[..., : shape.value_width]
        if not shape.latent:
            values = torch.full(
                (slots, shape.kv_heads, shape.value_width), math.nan, dtype=shape.dtype
            )
        free = torch.randperm(pages - 1).add(1).tolist()  # page 0 is reserved
        return cls(shape, keys, values, torch.zeros(requests, tokens, dtype=torch.int32), free)

    def pages(self, tokens: int) -> list[int]:
        """New pages with keys and values for ``tokens``; what is behind them stays NaN."""
        taken = [self.free.pop() for _ in range(-(-tokens // PAGE))]
        slots = self.slots(taken)[:tokens]
        self.keys[slots] = torch.randn(tokens, *self.keys.shape[1:]).to(self.keys)
        if not self.shape.latent:
            self.values[slots] = torch.randn(tokens, *self.values.shape[1:]).to(self.values)
        return taken

    @staticmethod
    def slots(pages: list[int]) -> Tensor:
        return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def place(self, row: int, start: int, pages: list[int]) -> None:
        slots = self.slots(pages)
        self.rows[row, start : start + len(slots)] = slots.int()


def expected(
    server: Server,
    q: Tensor,
    batch: BatchQueries,
    layouts: list[ContextLayout | None],
    scale: float,
) -> Tensor:
    """Each query over its visible keys, those of shared runs moved to their place in the prompt."""
    relocation = RELOCATION[server.shape]
    outs, start = [], 0
    for number, layout in enumerate(layouts):
        tokens, length = int(batch.query_tokens[number]), int(batch.seq_tokens[number])
        if not tokens:
            continue
        slots = server.rows[number, :length].long()
        keys, values = server.keys[slots].clone(), server.values[slots].clone()
        positions = torch.arange(length)
        own = 0
        ends = torch.full((length,), -1)  # prompt end of the run of a shared row position
        if layout is not None:
            own = layout.shared_tokens
            positions = torch.from_numpy(layout.prompt_positions(0, length))
            for run in layout.runs:
                part = slice(run.row_start, run.row_end)
                keys[part] = relocation.rotation.rotate(
                    keys[part], -run.rotation, start=relocation.start
                )
                ends[part] = run.prompt_end
        if server.shape.latent:
            values = keys[..., : server.shape.value_width]
        query_at = positions[length - tokens :]
        mask = positions[None] <= query_at[:, None]
        mask[:, :own] = ends[None, :own] <= query_at[:, None]
        outs.append(attend_reference(q[start : start + tokens], keys, values, mask, scale)[0])
        start += tokens
    return torch.cat(outs)


def run(
    server: Server, q: Tensor, batch: BatchQueries, rows: list[int], stacked: int = 999
) -> Tensor:
    plan = build_plan(batch, stacked_rows=stacked)
    executor = Executor(server.shape, RELOCATION[server.shape])
    begun = executor.begin(plan, TorchKernel(), server.rows, torch.tensor(rows))
    return begun.attend(q, server.keys, server.values, scale=0.3)


def layout_of(spans: list[tuple[int, int]], prompt: int, root: int, link: int = 0) -> ContextLayout:
    found = lay_out(
        [Span(*span) for span in spans],
        prompt_tokens=prompt,
        page_size=PAGE,
        root_tokens=root,
        linked_pages=link,
    )
    assert found is not None
    return found


@dataclass
class Case:
    server: Server
    layouts: list[ContextLayout | None]
    sources: list[np.ndarray | None]

    def fill(self, number: int, length: int) -> None:
        """The request's own pages up to a row of ``length``."""
        layout = self.layouts[number]
        own = layout.shared_tokens if layout else 0
        self.server.place(number, own, self.server.pages(length - own))


def case(shape: AttentionShape) -> Case:
    """A plain request; two readers of document A at different offsets, one of which reads B too, at
    an offset where it needs no turning; and one who holds a private copy of A."""
    server = Server.of(shape, 4)
    a, b, copy = server.pages(24), server.pages(16), server.pages(24)
    layouts: list[ContextLayout | None] = [
        None,
        layout_of([(5, 30)], 40, root=8),
        layout_of([(8, 24), (31, 56)], 64, root=8),
        layout_of([(2, 27)], 33, root=8),
    ]
    server.place(1, 0, a)
    server.place(2, 0, b)
    server.place(2, 16, a)
    server.place(3, 0, copy)
    sources = [None, np.array([1]), np.array([2, 1]), np.array([3])]
    return Case(server, layouts, sources)


@pytest.mark.parametrize("shape", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("stacked", [1, 999])
@pytest.mark.parametrize("tokens", [[20, 16, 24, 9], [3, 2, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0]])
def test_batches_of_plain_requests_and_readers(
    shape: AttentionShape, tokens: list[int], stacked: int
) -> None:
    torch.manual_seed(0)
    one = case(shape)
    lengths = [20, 40, 64, 33]
    for number, length in enumerate(lengths):
        one.fill(number, length)
    batch = BatchQueries.of(tokens, lengths, one.layouts, one.sources)
    q = torch.randn(sum(tokens), shape.query_heads, shape.key_width)
    out = run(one.server, q, batch, [0, 1, 2, 3], stacked)
    wanted = expected(one.server, q, batch, one.layouts, 0.3)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("tokens", [[20, 16, 24, 9], [1, 1, 1, 1]])
def test_a_part_of_many_rows_runs_in_tiles(
    monkeypatch: pytest.MonkeyPatch, shape: AttentionShape, tokens: list[int]
) -> None:
    torch.manual_seed(3)
    one = case(shape)
    lengths = [20, 40, 64, 33]
    for number, length in enumerate(lengths):
        one.fill(number, length)
    batch = BatchQueries.of(tokens, lengths, one.layouts, one.sources)
    q = torch.randn(sum(tokens), shape.query_heads, shape.key_width)
    wanted = expected(one.server, q, batch, one.layouts, 0.3)
    for rows in (1, 5, 17):
        tile = rows * shape.query_heads * shape.key_width
        monkeypatch.setattr(execute, "_TILE_ON_CPU", tile)
        out = run(one.server, q, batch, [0, 1, 2, 3], stacked=1)
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [MLA, GQA], ids=["mla", "gqa"])
def test_repeated_append_over_64_steps(shape: AttentionShape) -> None:
    torch.manual_seed(1)
    one = case(shape)
    start = [20, 40, 64, 33]
    for number, length in enumerate(start):
        one.fill(number, length + 64)
    for step in range(64):
        lengths = [length + step + 1 for length in start]
        batch = BatchQueries.of([1] * 4, lengths, one.layouts, one.sources)
        q = torch.randn(4, shape.query_heads, shape.key_width)
        out = run(one.server, q, batch, [0, 1, 2, 3])
        wanted = expected(one.server, q, batch, one.layouts, 0.3)
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("spans", range(17))
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_up_to_sixteen_spans(spans: int, decode: bool) -> None:
    torch.manual_seed(spans)
    server = Server.of(MLA, 1, tokens=512)
    cuts = list(itertools.accumulate([11] + [19] * spans))
    pairs = list(itertools.pairwise(cuts))
    prompt = cuts[-1] + 7
    layout = layout_of(pairs, prompt, root=PAGE) if spans else None
    shared = layout.shared_tokens if layout else 0
    server.place(0, 0, server.pages(shared) if shared else [])
    server.place(0, shared, server.pages(prompt - shared))
    tokens = 1 if decode else prompt - shared
    batch = BatchQueries.of([tokens], [prompt], [layout])
    q = torch.randn(tokens, MLA.query_heads, MLA.key_width)
    out = run(server, q, batch, [0])
    wanted = expected(server, q, batch, [layout], 0.3)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


# --- fixed shapes --------------------------------------------------------------------------------


def static(shape: AttentionShape, *, rows: int, requests: int = 4, parts: int = 4) -> StaticDecode:
    return StaticDecode(
        Executor(shape, RELOCATION[shape]),
        TorchKernel(),
        StaticShape(requests, spans=2, parts=parts, rows=rows),
        context_tokens=160,
        storage=Storage(torch.device("cpu")),
    )


@pytest.mark.parametrize("shape", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_captured_step_is_replayed_over_other_lengths_and_batches(
    shape: AttentionShape, rows: int
) -> None:
    """Traced once, as a CUDA graph would be: reading anything back, or a shape that follows from
    contents, fails the trace; what is not read from a buffer would be wrong in the replay."""
    torch.manual_seed(2)
    one = case(shape)
    start = [20, 40, 64, 33]
    for number, length in enumerate(start):
        one.fill(number, length + 40)
    server = one.server
    server.keys.nan_to_num_(7.0)  # a trace calls kernels on what was in place at capture
    server.values.nan_to_num_(7.0)
    decode = static(shape, rows=rows)
    request_rows, lengths = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)

    def step(q: Tensor, request_rows: Tensor, lengths: Tensor) -> Tensor:
        begun = decode.begin(server.rows, request_rows, lengths)
        return begun.attend(q, server.keys, server.values, scale=0.3)

    q = torch.randn(4, shape.query_heads, shape.key_width)
    graph = make_fx(step)(q, request_rows, lengths)
    batches = [([0, 1, 2, 3], one.layouts, one.sources)]
    order = [2, 1, 3, 0]
    batches += [(order, [one.layouts[n] for n in order], [one.sources[n] for n in order])]
    batches += [
        ([0, 0, 2, 2], [one.layouts[n] for n in (0, 0, 2, 2)], [None, None, *[one.sources[2]] * 2])
    ]
    batches += [([0, 0, 0, 0], [None] * 4, [None] * 4)]
    for count, (rows_of, layouts, sources) in enumerate(batches):
        for ahead in range(3):
            seq = [start[n] + 10 * ahead + count + 1 for n in rows_of]
            batch = BatchQueries.of([1] * 4, seq, layouts, sources)
            q = torch.randn(4, shape.query_heads, shape.key_width)
            decode.load(batch, server.rows, torch.tensor(rows_of))
            out = graph(q, torch.tensor(rows_of), torch.tensor(seq))
            eager = run(server, q, batch, rows_of)
            torch.testing.assert_close(out, eager, rtol=2e-5, atol=2e-5)
        assert decode.loads == count + 1, "a batch that stays is not loaded again"


def test_what_does_not_fit_is_seen_before_it_is_loaded() -> None:
    one = case(MLA)
    batch = BatchQueries.of([1] * 4, [20, 40, 64, 33], one.layouts, one.sources)
    plan = build_plan(batch, join=False)
    assert StaticShape(4, spans=2, parts=3, rows=2).holds(plan)  # A by two, B, the copy of A
    assert not StaticShape(4, spans=2, parts=3, rows=1).holds(plan)
    assert not StaticShape(4, spans=1, parts=9, rows=2).holds(plan)
    assert not StaticShape(3, spans=2, parts=9, rows=2).holds(plan)
    prefill = build_plan(BatchQueries.of([2], [20], [None]), join=False)
    assert not StaticShape(4, spans=2, parts=9, rows=2).holds(prefill)


def test_pages_that_changed_are_loaded_again_and_cannot_be_mistaken() -> None:
    """Two arrays may say the same, one after the other in the same place of the host's memory."""
    one = case(MLA)
    for number, length in enumerate((20, 40, 64, 33)):
        one.fill(number, length)
    decode = static(MLA, rows=2)
    rows = torch.arange(4)

    def load(sources: list[np.ndarray | None]) -> int:
        batch = BatchQueries.of([1] * 4, [20, 40, 64, 33], one.layouts, sources)
        decode.load(batch, one.server.rows, rows)
        return decode.loads

    held = [weakref.ref(source) for source in one.sources if source is not None]
    assert load(one.sources) == 1
    assert load(one.sources) == 1, "nothing changed"
    equal = [None if source is None else source.copy() for source in one.sources]
    one.sources = []
    gc.collect()
    assert all(source() is not None for source in held), "another could take its place"
    assert load(equal) == 2
    assert load(equal) == 2
    gc.collect()
    assert not any(source() is not None for source in held), "and nothing else is kept"


def test_a_batch_with_private_runs_is_loaded_in_every_step() -> None:
    one = case(MLA)
    for number, length in enumerate((20, 40, 64, 33)):
        one.fill(number, length)
    batch = BatchQueries.of([1] * 4, [20, 40, 64, 33], one.layouts)  # no sources: private
    decode = static(MLA, rows=1)
    for loads in (1, 2):
        decode.load(batch, one.server.rows, torch.arange(4))
        assert decode.loads == loads
