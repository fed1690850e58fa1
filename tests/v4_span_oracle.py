"""What DeepSeek-V4 answers over shared parts, as docs/deepseek-v4.md defines it, without a cache.

Bodies are run by transformers alone, as the plain prefixes that they are. A reader's own tokens then go
through the model in one pass, with attention written out: keys stay where they were computed, the query
stands at t - s for everything in a part at offset s, and what it gets from there is turned by -(t - s).
The product turns copies of rows instead, and keeps windows, groups and entries in a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, DynamicCache
from v4_oracle import PAGE

Own = Tensor  # int64 [tokens]


@dataclass
class Body:
    """A plain prefix, computed by transformers from position 0, read from ``first`` on."""

    model: DeepseekV4ForCausalLM
    tokens: Tensor
    first: int = 0

    def __post_init__(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        with torch.inference_mode():
            for piece in self.tokens.split(PAGE):
                self.model(input_ids=piece[None], past_key_values=self.cache)

    @property
    def length(self) -> int:
        return len(self.tokens) - self.first


@dataclass
class Placed:
    body: Body
    start: int

    @property
    def shift(self) -> int:
        return self.start - self.body.first

    @property
    def end(self) -> int:
        return self.start + self.body.length


def answer(model: DeepseekV4ForCausalLM, sequence: Sequence[Own | Body]) -> Tensor:
    """Logits of all own tokens, [tokens, vocabulary]."""
    return answer_and_margins(model, sequence)[0]


def answer_and_margins(
    model: DeepseekV4ForCausalLM, sequence: Sequence[Own | Body]
) -> tuple[Tensor, Tensor]:
    """Likewise, and by how much the last entry that the indexer chose beat the next one, [tokens].

    The least of all layers, infinite where everything was chosen. What is chosen is no continuous
    function of the scores: where the margin is within rounding, another choice is as right.
    """
    ids, positions, placed, at = [], [], [], 0
    for one in sequence:
        if isinstance(one, Body):
            placed.append(Placed(one, at))
            at += one.length
        else:
            ids.append(one)
            positions.append(torch.arange(at, at + len(one)))
            at += len(one)
    return _run(model, torch.cat(ids), torch.cat(positions), placed)


@torch.inference_mode()
def _run(
    model: DeepseekV4ForCausalLM, ids: Tensor, positions: Tensor, placed: list[Placed]
) -> tuple[Tensor, Tensor]:
    table = model.model.rotary_emb
    margins = [torch.full((len(ids),), float("inf"))]

    def attention(module: Any) -> Callable[..., tuple[Tensor, None]]:
        def forward(hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
            found = Attention(module, table, hidden_states[0], positions, placed, margins).output()
            return found[None], None

        return forward

    with _instead(model, attention):
        logits: Tensor = model(input_ids=ids[None], position_ids=positions[None]).logits
    return logits[0], torch.stack(margins).amin(dim=0)


@contextmanager
def _instead(model: DeepseekV4ForCausalLM, attention: Callable[[Any], Any]) -> Iterator[None]:
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.forward = attention(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def turned(rows: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """The last channels of rows, [..., n, D], by n positions, as complex numbers."""
    width = 2 * len(frequencies)
    pairs = torch.view_as_complex(rows[..., -width:].double().unflatten(-1, (-1, 2)).contiguous())
    angles = positions.double()[:, None] * frequencies.double()
    moved = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    return torch.cat([rows[..., :-width], moved.flatten(-2).to(rows.dtype)], dim=-1)


@dataclass
class Seen:
    """Keys that are values too, of one kind and one frame."""

    rows: Tensor  # [keys, D], rotated in their frame
    shift: int  # of the frame
    visible: Tensor  # bool [queries, keys]
    index: Tensor | None = None  # their indexer keys, [keys, D], where only the best are read


class Attention:
    """One layer over a reader's own tokens and the parts that stand between them."""

    def __init__(
        self,
        module: Any,
        table: Any,
        hidden: Tensor,
        positions: Tensor,
        placed: list[Placed],
        margins: list[Tensor],
    ) -> None:
        self.margins = margins
        self.module, self.hidden, self.at, self.placed = module, hidden, positions, placed
        kind = "main" if module.layer_type == "sliding_attention" else "compress"
        self.frequencies = getattr(table, f"{kind}_inv_freq")
        self.residual = module.q_a_norm(module.q_a_proj(hidden))
        heads = module.q_b_proj(self.residual).view(len(hidden), -1, module.head_dim)
        self.queries = module.q_b_norm(heads).transpose(0, 1)  # [heads, queries, D]
        self.window = module.sliding_window

    def output(self) -> Tensor:
        seen = [self._own_window(), *map(self._part_window, self.placed)]
        if self.module.compressor is not None:
            entries = [self._own_entries(), *map(self._part_entries, self.placed)]
            seen += self._best(entries) if entries[0].index is not None else entries
        scores = [
            (self._turned_queries(one) @ one.rows.T * self.module.scaling).masked_fill(
                ~one.visible, float("-inf")
            )
            for one in seen
        ]
        sinks = self.module.sinks[:, None, None].expand(-1, len(self.hidden), 1)
        shares = torch.cat([*scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        parts = shares.split([len(one.rows) for one in seen], dim=-1)
        found = sum(
            turned(share @ one.rows, one.shift - self.at, self.frequencies)
            for share, one in zip(parts, seen, strict=True)
        )
        assert isinstance(found, Tensor)
        groups = found.transpose(0, 1).reshape(1, len(self.hidden), self.module.config.o_groups, -1)
        output: Tensor = self.module.o_b_proj(self.module.o_a_proj(groups).flatten(2))
        return output[0]

    def _turned_queries(self, one: Seen) -> Tensor:
        return turned(self.queries, self.at - one.shift, self.frequencies)

    def _own_window(self) -> Seen:
        rows = self.module.kv_norm(self.module.kv_proj(self.hidden))
        far = self.at[:, None] - self.at
        visible = (far >= 0) & (far < self.window)
        return Seen(turned(rows, self.at, self.frequencies), 0, visible)

    def _part_window(self, part: Placed) -> Seen:
        rows = part.body.cache.layers[self.module.layer_idx].keys[0, 0]
        end = len(part.body.tokens)
        far = self.at[:, None] - (torch.arange(end - len(rows), end) + part.shift)
        visible = (far > 0) & (far < self.window) & (self.at >= part.end)[:, None]
        return Seen(rows, part.shift, visible)

    def _own_entries(self) -> Seen:
        made = self.module.compressor
        rate, indexer = made.compress_rate, getattr(made, "indexer", None)
        last = self.at[rate - 1 :: rate]  # where each complete group ends
        places = last + 1 - rate
        rows = turned(self._compressed(made), places, self.frequencies)
        index = None
        if indexer is not None:
            index = turned(self._compressed(indexer), places, self.frequencies)
        return Seen(rows, 0, self.at[:, None] >= last, index)

    def _part_entries(self, part: Placed) -> Seen:
        layer = part.body.cache.layers[self.module.layer_idx]
        first = part.body.first // self.module.compressor.compress_rate
        rows = layer.compressed_kv["compressor"][0, first:]
        index = layer.compressed_kv.get("indexer")
        visible = (self.at >= part.end)[:, None].expand(-1, len(rows))
        return Seen(rows, part.shift, visible, None if index is None else index[0, first:])

    def _compressed(self, made: Any) -> Tensor:
        """Own groups, not rotated, [groups, D]; those of the indexer where that is given."""
        rate, width = made.compress_rate, made.head_dim
        whole = len(self.hidden) // rate * rate
        series = made.kv_proj(self.hidden)[:whole].unflatten(0, (-1, rate))
        gates = made.gate_proj(self.hidden)[:whole].unflatten(0, (-1, rate)) + made.position_bias
        if series.shape[-1] == 2 * width:  # own second series, and the first of the group before
            nothing = torch.full_like(gates[:1, :, :width], float("-inf"))
            before = torch.cat([torch.zeros_like(nothing), series[:-1, :, :width]])
            closed = torch.cat([nothing, gates[:-1, :, :width]])
            series = torch.cat([before[: len(series)], series[..., width:]], dim=1)
            gates = torch.cat([closed[: len(gates)], gates[..., width:]], dim=1)
        normed: Tensor = made.kv_norm((series * gates.softmax(dim=1)).sum(dim=1))
        return normed

    def _best(self, entries: list[Seen]) -> list[Seen]:
        """The indexer ranks what is seen of all parts and of own groups together."""
        indexer = self.module.compressor.indexer
        queries = indexer.q_b_proj(self.residual).view(len(self.hidden), -1, indexer.head_dim)
        weights = indexer.scorer.weights_proj(self.hidden) * indexer.scorer.weights_scaling
        scores = []
        for one in entries:
            assert one.index is not None
            at = turned(queries.transpose(0, 1), self.at - one.shift, self.frequencies)
            each = torch.relu(at @ one.index.T) * indexer.scorer.softmax_scale
            total = (each * weights.T[..., None]).sum(dim=0)
            scores.append(total.masked_fill(~one.visible, float("-inf")))
        ranked = torch.cat(scores, dim=-1)
        most = min(indexer.index_topk, ranked.shape[-1])
        best = ranked.topk(most, dim=-1).indices
        if most < ranked.shape[-1]:
            last, next_ = ranked.topk(most + 1, dim=-1).values[:, -2:].unbind(-1)
            self.margins.append((last - next_).nan_to_num(nan=float("inf"), posinf=float("inf")))
        chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, best, True)
        shares = chosen.split([len(one.rows) for one in entries], dim=-1)
        return [
            Seen(one.rows, one.shift, one.visible & share)
            for one, share in zip(entries, shares, strict=True)
        ]
