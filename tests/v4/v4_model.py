"""A tiny DeepSeek-V4 with real strides, its reference runs, and a pool whose unused bytes are NaN.

Reference and pool are given the same pieces of a prompt, so that they compute with the same shapes: a
top-k is no continuous function, and rounding that depends on a chunk's length can turn a near tie.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from tessera_sglang.memory_pool.geometry import Tier
from tessera_sglang.memory_pool.paged import NO_PAGES, PageIds
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.v4 import LayerStorage, Request, Work, pool_geometry, run
from tessera_sglang.v4.forward import cut

PAGE = 128
VOCABULARY = 97
TOLERANCE = 1e-5  # of logits whose standard deviation is about 1.7
SWA, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
NAN_BYTE = 0xFF  # a float32, and a bfloat16, of these is NaN


def config(**changes: object) -> DeepseekV4Config:
    """Window 128, groups of 4 and 128, of up to 300 entries the best 8."""
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "layer_types": [SWA, CSA, HCA, CSA],
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "num_hash_layers": 1,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 1,
        "initializer_range": 0.3,  # else no answer depends on the context
    }
    return DeepseekV4Config(**{**settings, **changes})


@functools.cache
def model(dtype: torch.dtype = torch.float32, **changes: object) -> DeepseekV4ForCausalLM:
    """The same weights each time, none of them at the zero that transformers starts from."""
    torch.manual_seed(3)
    made = DeepseekV4ForCausalLM(config(**changes)).eval()
    for name, tensor in made.state_dict().items():
        if name.endswith(("position_bias", "sinks", "e_score_correction_bias")):
            tensor.normal_()
        if name.endswith("tid2eid"):
            tensor.random_(0, 2)
    return made.to(dtype)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def pieces(ids: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(ids.split(size))


def storage(
    pages: int = 32, slots: int = 12, running: int | None = None, **settings: object
) -> LayerStorage:
    """A pool in which every byte is NaN."""
    made = config()
    geometry = pool_geometry(made, **settings)  # type: ignore[arg-type]
    pool = TwoTierPool(geometry, pages=pages, slots=slots, running=running)
    poison(pool)
    return LayerStorage(pool, made)


def poison(pool: TwoTierPool) -> None:
    """Make every byte NaN that nobody owns: pages, slots and tails."""
    for layer, plane in pool.geometry.planes(Tier.PAGED):
        pool.paged.tensor(layer, plane.name)[~pool.paged._units.owned] = NAN_BYTE
    for layer, plane in pool.geometry.planes(Tier.ARENA):
        owners = pool.arena._tails if plane.transient else pool.arena._slots
        units = pool.arena.tensor(layer, plane.name).unflatten(0, (-1, plane.rows))
        units[~owners.owned] = NAN_BYTE


@torch.inference_mode()
def reference(
    ids: torch.Tensor, past: DynamicCache, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits of ids, [tokens] or [requests, tokens], on transformers' own cache."""
    batch = ids if ids.dim() == 2 else ids[None]
    logits: torch.Tensor = model(dtype)(input_ids=batch, past_key_values=past).logits
    return logits if ids.dim() == 2 else logits[0]


def own_cache() -> DynamicCache:
    return DynamicCache(config=config())


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest; NaN where either is."""
    return float((one - other).abs().max())


@dataclass
class Twin:
    """A request in the pool, and the same on transformers' own cache."""

    storage: LayerStorage
    request: Request
    past: DynamicCache
    at_page: dict[int, DynamicCache] = field(default_factory=dict)  # what the pool saved as well

    @classmethod
    def open(
        cls,
        store: LayerStorage,
        prefix: PageIds = NO_PAGES,
        at_page: dict[int, DynamicCache] | None = None,
    ) -> Twin | None:
        request = Request.open(store.pool, prefix)
        if request is None:
            return None
        at_page = {} if at_page is None else at_page
        past = copy.deepcopy(at_page[int(prefix[-1])]) if len(prefix) else own_cache()
        return cls(store, request, past, at_page)

    def feed(self, ids: torch.Tensor, *, save_every: int = 0) -> float:
        """Give both the same tokens, in the same pieces; the largest difference of logits."""
        start = self.request.length
        assert self.request.reserve(len(ids))
        (mine,) = run(
            model(), self.storage, [Work(self.request, ids)], save_every_tokens=save_every
        )
        theirs = []
        for piece in cut(ids, start, save_every):
            theirs.append(reference(piece, self.past))
            start += len(piece)
            if save_every and start % save_every == 0:
                page = int(self.request.pages[start // PAGE - 1])
                self.at_page[page] = copy.deepcopy(self.past)
        return difference(mine, torch.cat(theirs))

    def close(self) -> PageIds:
        own = self.request.close()
        poison(self.storage.pool)
        return own


def opened(twin: Twin | None) -> Twin:
    assert twin is not None
    return twin


def slot_rows(store: LayerStorage, layer: int, plane: str, region: str, slot: int) -> torch.Tensor:
    """A region of a request's rows, [rows, elements]; writes go to the pool."""
    unit = store.pool.arena.ring(layer, plane).unit(slot)
    return store.pool.arena.view(layer, plane, region)[unit]


def shuffled(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
