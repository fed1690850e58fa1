"""Sliding windows that outlive a request: each strategy restores exactly, and costs what is said.

A small model of real attention keeps its windows in the arena's rings. It computes token by token in
float64, so that whatever is computed again runs through the same operations in the same order, and a
right restore is equal to the last bit. What lies in memory that nobody wrote is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import torch
from geometries import CPU, plain

from tessera_sglang.memory_pool.arena import Arena
from tessera_sglang.memory_pool.geometry import (
    Dtype,
    Geometry,
    LayerGeometry,
    LayerKind,
    Plane,
    Region,
    Tier,
)
from tessera_sglang.memory_pool.handles import RegionTable
from tessera_sglang.memory_pool.known_models import KNOWN
from tessera_sglang.memory_pool.model_geometry import read_model
from tessera_sglang.memory_pool.persistence import (
    Kind,
    Restore,
    Strategy,
    costs,
    kept_planes,
    plan_restore,
    reach_of,
)
from tessera_sglang.memory_pool.ring import eviction_frontier

TOKENS, WIDTH, VOCABULARY = 44, 8, 50
KEY_AND_VALUE = (Region("key", 2 * WIDTH, Dtype.FP32), Region("value", 2 * WIDTH, Dtype.FP32))


def geometry_of(windows: tuple[int, ...], page_tokens: int) -> Geometry:
    """One plane a layer, in pages where the window is 0. Float64 goes as two of FP32."""
    layers = []
    for window in windows:
        tier = Tier.ARENA if window else Tier.PAGED
        kind = LayerKind.SWA if window else LayerKind.MQA
        layers.append(
            LayerGeometry(kind, (Plane("kv", tier, 1, KEY_AND_VALUE, rows=window),)),
        )
    return Geometry("tiny", tuple(layers), page_tokens)


# --- the model -----------------------------------------------------------------------------------


@dataclass
class Model:
    """Attention with rotary positions, one head, a residual and a bounded nonlinearity."""

    windows: tuple[int, ...]
    embedding: torch.Tensor = field(init=False)  # float64 [vocabulary, width]
    weights: torch.Tensor = field(init=False)  # float64 [layers, 4, width, width]

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(7)
        shape = (len(self.windows), 4, WIDTH, WIDTH)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=g, dtype=torch.float64)
        self.weights = torch.randn(shape, generator=g, dtype=torch.float64) / WIDTH**0.5

    def dense(self, ids: list[int]) -> torch.Tensor:
        """The oracle: everything at once, masked; float64 [tokens, width]."""
        x = self.embedding[ids]
        positions = torch.arange(len(ids))
        back = positions[:, None] - positions[None, :]
        for window, (wq, wk, wv, wo) in zip(self.windows, self.weights, strict=True):
            q, k, v = rotated(x @ wq, positions), rotated(x @ wk, positions), x @ wv
            seen = (back >= 0) & (back < (window or len(ids)))
            scores = (q @ k.T / WIDTH**0.5).masked_fill(~seen, -torch.inf)
            x = torch.tanh(x + scores.softmax(-1) @ v @ wo)
        return x


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding; x [n, width], positions int64 [n]."""
    half = WIDTH // 2
    angles = positions[:, None] * 10.0 ** -torch.arange(half, dtype=torch.float64)
    one, two, cos, sin = x[:, :half], x[:, half:], angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=1)


class Request:
    """One sequence of the model in a slot. Rows of layers that page are the caller's, by token."""

    def __init__(self, model: Model, geometry: Geometry, arena: Arena, paged: torch.Tensor) -> None:
        slots = arena.allocate(1)
        assert slots is not None
        self.model, self.geometry, self.arena, self.paged = model, geometry, arena, paged
        self.slot = int(slots[0])
        self.computed = 0

    def step(self, token: int, position: int, *, keep_pages: bool = False) -> torch.Tensor:
        """Compute a token from what can be read; float64 [width].

        ``keep_pages``: it was computed before, and its rows of layers that page are there.
        """
        self.computed += 1
        x, at = self.model.embedding[token][None], torch.tensor([position])
        for layer, (wq, wk, wv, wo) in enumerate(self.model.weights):
            row = torch.cat([rotated(x @ wk, at), x @ wv], dim=1)
            if self.model.windows[layer]:
                keys, values = self._window(layer, position, row)
            else:
                if not keep_pages:
                    self.paged[layer, position] = row[0]
                keys, values = self.paged[layer, : position + 1].split(WIDTH, dim=1)
            scores = rotated(x @ wq, at) @ keys.T / WIDTH**0.5
            x = torch.tanh(x + scores.softmax(-1) @ values @ wo)
        return x[0]

    def _window(self, layer: int, position: int, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.put(layer, np.array([position]), row)
        first = position - self.model.windows[layer] + 1
        return self.rows(layer, np.arange(first, position + 1)).split(WIDTH, dim=1)

    def put(self, layer: int, positions: np.ndarray, rows: torch.Tensor) -> None:
        ring = self.arena.ring(layer, "kv")
        places = ring.write_rows(np.full(len(positions), self.slot), positions)
        self._tensor(layer)[torch.from_numpy(places)] = rows

    def rows(self, layer: int, positions: np.ndarray) -> torch.Tensor:
        """Those that can be read, ascending; float64 [n, 2 * width]."""
        ring = self.arena.ring(layer, "kv")
        places, readable = ring.read_rows(np.full(len(positions), self.slot), positions)
        return self._tensor(layer)[torch.from_numpy(places[readable])]

    def readable(self, layer: int) -> list[int]:
        everything = np.arange(TOKENS)
        ring = self.arena.ring(layer, "kv")
        return np.flatnonzero(ring.read_rows(np.full(TOKENS, self.slot), everything)[1]).tolist()

    def forget_before(self, layer: int, position: int) -> None:
        gone = np.arange(max(0, position))
        self.arena.ring(layer, "kv").forget(np.full(len(gone), self.slot), gone)

    def _tensor(self, layer: int) -> torch.Tensor:
        return self.arena.tensor(layer, "kv").view(torch.float64)


# --- what is stored ------------------------------------------------------------------------------


@dataclass
class Stored:
    """What a strategy has kept of a run, in bytes, and what was read of it."""

    strategy: Strategy
    rows: dict[tuple[int, int], dict[int, bytes]] = field(default_factory=dict)
    read_bytes: int = 0

    def save(self, request: Request, boundary: int) -> None:
        if not self.strategy.keeps(boundary):
            return
        for layer, plane in kept_planes(request.geometry):
            wanted = self.strategy.stored(plane, boundary)
            rows = request.rows(layer, np.array(wanted)).numpy()
            assert len(rows) == len(wanted), "no longer in the window when it is to be stored"
            self.rows[layer, boundary] = {
                token: row.tobytes() for token, row in zip(wanted, rows, strict=True)
            }

    def restore(self, request: Request, plan: Restore) -> None:
        for layer, plane in kept_planes(request.geometry):
            wanted = plan.restored(plane)
            if not wanted:
                continue
            found: dict[int, bytes] = {}
            boundary = plan.kept_at
            while boundary and len(found.keys() & set(wanted)) < len(wanted):
                found |= self.rows[layer, boundary]
                boundary -= self.strategy.every_tokens
            content = b"".join(found[token] for token in wanted)
            self.read_bytes += len(content)
            rows = torch.frombuffer(bytearray(content), dtype=torch.float64)
            request.put(layer, np.array(wanted), rows.view(len(wanted), 2 * WIDTH))

    def bytes_until(self, boundary: int) -> int:
        kept = [rows for (_, at), rows in self.rows.items() if at <= boundary]
        return sum(len(row) for rows in kept for row in rows.values())


class Run:
    """A model that ran over a sequence, and what each strategy kept of it on the way."""

    def __init__(self, windows: tuple[int, ...], page_tokens: int, checkpoint_tokens: int) -> None:
        self.model = Model(windows)
        self.geometry = geometry_of(windows, page_tokens)
        self.reach = reach_of(self.geometry)
        g = torch.Generator().manual_seed(1)
        self.ids = torch.randint(VOCABULARY, (TOKENS,), generator=g).tolist()
        self.boundaries = range(page_tokens, TOKENS, page_tokens)
        self.stored = {
            kind: Stored(
                Strategy.of(kind, page_tokens=page_tokens, checkpoint_tokens=checkpoint_tokens)
            )
            for kind in Kind
        }
        self.paged = self.no_pages()
        request = self.request(self.paged)
        self.outputs = []
        self.windows: dict[int, list[torch.Tensor]] = {}  # at each boundary, by layer with one
        for position, token in enumerate(self.ids):
            self.outputs.append(request.step(token, position))
            length = position + 1
            for layer, window in self.windowed():  # case 12: what lies before it is given up
                frontier = eviction_frontier(length, window=window, page_tokens=page_tokens)
                request.forget_before(layer, frontier)
            if length in self.boundaries:
                self.windows[length] = self.needed(request, length)
                for stored in self.stored.values():
                    stored.save(request, length)

    def windowed(self) -> list[tuple[int, int]]:
        return [(layer, window) for layer, window in enumerate(self.model.windows) if window]

    def no_pages(self) -> torch.Tensor:
        return torch.full((len(self.model.windows), TOKENS, 2 * WIDTH), torch.nan).double()

    def request(self, paged: torch.Tensor) -> Request:
        """In a slot that somebody else has used, among rows that are NaN (case 11)."""
        arena = Arena(self.geometry, slots=2, running=1, pages=9, table=RegionTable(), device=CPU)
        other = Request(self.model, self.geometry, arena, paged.clone())
        for position in range(TOKENS):
            for layer, _ in self.windowed():
                poison = torch.full((1, 2 * WIDTH), torch.nan).double()
                other.put(layer, np.array([position]), poison)
        arena.free(np.array([other.slot]))
        request = Request(self.model, self.geometry, arena, paged)
        assert request.slot == other.slot
        return request

    def needed(self, request: Request, boundary: int) -> list[torch.Tensor]:
        """Rows of every window that the token at the boundary sees beside its own."""
        return [
            request.rows(layer, np.arange(max(0, boundary - window + 1), boundary))
            for layer, window in self.windowed()
        ]

    def restored(self, plan: Restore, stored: Stored | None = None) -> Request:
        """A request that has what a page chain has, and goes by the plan up to the boundary."""
        paged = self.no_pages()
        paged[:, : plan.boundary] = self.paged[:, : plan.boundary]
        request = self.request(paged)
        if stored is not None:
            stored.restore(request, plan)
        for position in range(plan.compute_from, plan.boundary):
            request.step(self.ids[position], position, keep_pages=True)
        if plan.from_nothing:
            for layer, window in self.windowed():
                request.forget_before(layer, plan.boundary - window + 1)
        return request

    def goes_on_exactly(self, request: Request, boundary: int) -> bool:
        """Whether windows, all that is computed from the boundary on, and pages are the same bits."""
        windows = zip(self.needed(request, boundary), self.windows[boundary], strict=True)
        if not all(torch.equal(found, wanted) for found, wanted in windows):
            return False
        for position in range(boundary, TOKENS):
            if not torch.equal(request.step(self.ids[position], position), self.outputs[position]):
                return False
        layers = [layer for layer, window in enumerate(self.model.windows) if not window]
        return torch.equal(request.paged[layers], self.paged[layers])


# Windows by layer, 0 for one that pages; page; checkpoint. Pages larger than windows (case 12), windows
# over several pages, intervals shorter and longer than windows, layers with windows of their own.
RUNS = {
    "page larger than window": ((4, 0, 4, 4), 8, 16),
    "window of pages": ((9, 0, 9), 4, 12),
    "window is page": ((4, 4, 4), 4, 8),
    "checkpoints nearer than the window": ((10, 10), 4, 8),
    "checkpoints far beyond the reach": ((3, 0, 3), 4, 20),
    "windows of several sizes": ((3, 0, 7, 2), 4, 16),
    "a window of one": ((1, 0, 1), 4, 8),
}


@pytest.fixture(scope="module", params=list(RUNS.values()), ids=list(RUNS))
def run(request: pytest.FixtureRequest) -> Run:
    return Run(*request.param)


def test_the_model_is_what_the_oracle_says(run: Run) -> None:
    expected = run.model.dense(run.ids)
    torch.testing.assert_close(torch.stack(run.outputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", Kind)
def test_every_boundary_restores_exactly_at_the_cost_of_the_plan(run: Run, kind: Kind) -> None:
    """Cases 11 and 12, and the costs of a restore."""
    stored = run.stored[kind]
    for boundary in run.boundaries:
        plan = plan_restore(stored.strategy, boundary, reach=run.reach)
        before = stored.read_bytes
        request = run.restored(plan, stored)
        assert request.computed == plan.tokens
        planes = [plane for _, plane in kept_planes(run.geometry)]
        rows_bytes = sum(min(plane.rows, plan.kept_at) * plane.row_bytes for plane in planes)
        assert stored.read_bytes - before == rows_bytes
        assert run.goes_on_exactly(request, boundary), (kind, boundary)
        request.arena.check_invariants()
        if kind is Kind.FULL:
            assert plan.tokens == 0
        if kind is Kind.NONE:
            assert plan.tokens == min(run.reach, boundary)
            assert rows_bytes == 0


def test_what_a_run_stores_and_computes_is_what_the_model_says(run: Run) -> None:
    """Over whole intervals behind the reach, counted in the run."""
    page = run.geometry.page_tokens
    every = run.stored[Kind.CHECKPOINT].strategy.every_tokens
    for cost in costs(run.geometry, checkpoint_tokens=every):
        stored = run.stored[Kind(cost.strategy)]
        assert cost.every_tokens == stored.strategy.every_tokens
        end = (TOKENS - 1) // every * every
        assert Fraction(stored.bytes_until(end), end) == cost.bytes_per_token
        first = -(-run.reach // every) * every
        interval = range(first, first + every, page)
        plans = [plan_restore(stored.strategy, at, reach=run.reach) for at in interval]
        tokens = [plan.tokens for plan in plans]
        assert (max(tokens), Fraction(sum(tokens), len(tokens))) == (
            cost.most_tokens,
            cost.mean_tokens,
        )
        computed = [
            run.restored(plan, stored).computed for plan in plans if plan.boundary in run.boundaries
        ]
        assert computed == tokens[: len(computed)]


def test_the_reach_is_no_longer_than_it_has_to_be(run: Run) -> None:
    """From the reach on every window is right, and from one token behind it the farthest is not."""
    boundary = run.boundaries[-1]
    enough = Restore(boundary, 0, boundary - run.reach)
    assert run.goes_on_exactly(run.restored(enough), boundary)
    if not run.reach:
        return
    too_few = run.restored(Restore(boundary, 0, boundary - run.reach + 1))
    windows = zip(run.needed(too_few, boundary), run.windows[boundary], strict=True)
    right = [torch.equal(found, wanted) for found, wanted in windows]
    assert not right[-1], "the last layer's first row has seen too little"
    assert not run.goes_on_exactly(too_few, boundary)


def test_rows_that_were_computed_from_too_little_can_not_be_found() -> None:
    """A ring has a row more than the next token sees: after `none` it is not the model's."""
    run = Run((4, 0, 4), 4, 8)
    plan = Restore(40, 0, 40 - run.reach)
    request = run.restored(plan)
    for layer in (0, 2):
        assert request.readable(layer) == [37, 38, 39]
    assert not request.arena.save(request.slot, 1, 40), "saved a row that is wrong"
    for position in range(40, 44):
        request.step(run.ids[position], position)
    assert request.arena.save(request.slot, 1, 44)


def test_pages_are_read_and_not_written_where_tokens_are_computed_again() -> None:
    """What layers that page would give inside the reach is wrong, and is not needed."""
    run = Run((4, 0, 4), 4, 8)
    boundary = 40
    paged = run.no_pages()
    paged[:, :boundary] = run.paged[:, :boundary]
    request = run.request(paged)
    for position in range(boundary - run.reach, boundary):
        request.step(run.ids[position], position)
    layer, first = 1, boundary - run.reach
    assert not torch.equal(request.paged[layer, first], run.paged[layer, first])
    assert not run.goes_on_exactly(request, boundary)


def test_a_checkpoint_that_is_gone_costs_tokens_and_nothing_else() -> None:
    run = Run((4, 0, 4), 4, 8)
    stored = run.stored[Kind.CHECKPOINT]
    assert plan_restore(stored.strategy, 20, reach=6) == Restore(20, 16, 16)
    for last_kept in (8, 0):
        plan = plan_restore(stored.strategy, 20, reach=6, last_kept=last_kept)
        assert plan == Restore(20, 0, 14)
        assert run.goes_on_exactly(run.restored(plan, stored), 20)
    assert plan_restore(stored.strategy, 20, reach=12, last_kept=8) == Restore(20, 0, 8), "no read"
    far = plan_restore(stored.strategy, 20, reach=16, last_kept=8)
    assert far == Restore(20, 8, 8)
    assert run.goes_on_exactly(run.restored(far, stored), 20)


def test_plans() -> None:
    strategies = {kind: Strategy.of(kind, page_tokens=128, checkpoint_tokens=1024) for kind in Kind}
    flash = 43 * 127
    plans = {
        (kind.value, boundary): plan_restore(strategy, boundary, reach=flash)
        for kind, strategy in strategies.items()
        for boundary in (128, 8192, 8192 + 384)
    }
    assert plans == {
        ("full", 128): Restore(128, 128, 128),
        ("full", 8192): Restore(8192, 8192, 8192),
        ("full", 8576): Restore(8576, 8576, 8576),
        ("checkpoint", 128): Restore(128, 0, 0),
        ("checkpoint", 8192): Restore(8192, 8192, 8192),
        ("checkpoint", 8576): Restore(8576, 8192, 8192),
        ("none", 128): Restore(128, 0, 0),
        ("none", 8192): Restore(8192, 0, 8192 - flash),
        ("none", 8576): Restore(8576, 0, 8576 - flash),
    }


@pytest.mark.parametrize(
    ("tokens", "remedy"), [(100, "use 128"), (0, "use 128"), (-128, "use 128"), (1000, "use 1024")]
)
def test_states_are_taken_where_pages_end(tokens: int, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"swa_checkpoint_tokens {tokens}: .*{remedy}"):
        Strategy.of(Kind.CHECKPOINT, page_tokens=128, checkpoint_tokens=tokens)
    odd = Strategy.of(Kind.CHECKPOINT, page_tokens=96)
    assert odd.every_tokens == 2112, "the default goes up to whole pages"


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state_bytes", "paged", "layers"),
    [
        ("deepseek-v4-flash", 3_644_416, Fraction("3514.25"), 43),
        ("deepseek-v4-pro", 5_174_272, Fraction("5031.4375"), 61),
    ],
)
def test_deepseek_v4(name: str, state_bytes: int, paged: Fraction, layers: int) -> None:
    """`full` is eight times what pages hold: docs/deepseek-v4.md has the same bytes."""
    geometry = read_model(KNOWN[name].config, name).geometry()
    full, checkpoint, none = costs(geometry)
    assert full.bytes_per_token == Fraction(state_bytes, 128)
    assert full.times_paged == full.bytes_per_token / paged
    assert round(full.times_paged) == 8
    assert (full.restored_bytes, full.most_tokens, full.mean_tokens) == (state_bytes, 0, 0)
    assert checkpoint.bytes_per_token == Fraction(state_bytes, 2048)
    assert (checkpoint.most_tokens, checkpoint.mean_tokens) == (2048 - 128, 960)
    assert (none.bytes_per_token, none.restored_bytes) == (0, 0)
    assert none.most_tokens == none.mean_tokens == layers * 127


def test_windows_in_turn_with_whole_contexts() -> None:
    """As in gpt-oss: pages are shorter than the window, and only layers with one reach back."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    }
    geometry = read_model(config, "gpt-oss").geometry()
    token = 2 * 8 * 64 * 2  # key and value, BF16, one layer
    full, checkpoint, none = costs(geometry)
    assert geometry.page_tokens == 64
    assert (full.bytes_per_token, full.times_paged) == (18 * token, 1)
    assert checkpoint.bytes_per_token == 18 * token * Fraction(128, 2048)
    assert (checkpoint.most_tokens, checkpoint.restored_bytes) == (2048 - 64, 18 * token * 128)
    assert none.most_tokens == 18 * 127
    far = costs(geometry, checkpoint_tokens=64 * 1000)[1]
    tokens = [min(64 * page, 18 * 127) for page in range(1000)]
    assert (far.most_tokens, far.mean_tokens) == (18 * 127, Fraction(sum(tokens), 1000))


def test_without_windows_there_is_nothing_to_store() -> None:
    assert costs(plain(64)) == ()
    assert reach_of(plain(64)) == 0
    with pytest.raises(ValueError, match="swa_checkpoint_tokens"):
        costs(plain(64), checkpoint_tokens=65)
