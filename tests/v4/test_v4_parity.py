"""The unmodified model on the pool equals itself on transformers' own cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache
from v4_model import (
    CSA,
    PAGE,
    TOLERANCE,
    Twin,
    config,
    difference,
    model,
    opened,
    own_cache,
    pieces,
    reference,
    storage,
    tokens,
)

from tessera_sglang.v4 import LayerStorage, PooledCache, Request, Work, run

PROMPT = 700


def test_prefill_chunks_and_decode() -> None:
    """A prompt at once, 17 tokens at a time, and 300 steps of one token; NaN in every unused byte."""
    store, ids = storage(), tokens(PROMPT + 20 * 17 + 300)
    twin = opened(Twin.open(store))
    assert twin.feed(ids[:PROMPT]) <= TOLERANCE
    for piece in pieces(ids[PROMPT : PROMPT + 20 * 17], 17):
        assert twin.feed(piece) <= TOLERANCE
    store.pool.check_invariants()
    worst = max(twin.feed(piece) for piece in pieces(ids[PROMPT + 20 * 17 :], 1))
    assert worst <= TOLERANCE
    assert twin.request.length == len(ids)
    store.pool.check_invariants()


@pytest.mark.parametrize("size", [1, 17, 128, 300])
def test_from_the_first_token_on(size: int) -> None:
    """No group before the first, no window yet."""
    store = storage()
    twin = opened(Twin.open(store))
    for piece in pieces(tokens(310 if size > 1 else 140, seed=1), size):
        assert twin.feed(piece) <= TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": 9},
        {"sliding_window": 129},
        {"compress_rates": {CSA: 8, "heavily_compressed_attention": 128}},
    ],
    ids=["top-k", "window", "groups"],
)
def test_the_limits_of_the_tiny_model_bind(changes: dict[str, object]) -> None:
    """Were they a little wider, the answers would be others: what parity holds for is not vacuous."""
    ids = tokens(400, seed=2)[None]
    wider = config(**changes)
    other = type(model())(wider).eval()
    state = {
        name: tensor
        for name, tensor in model().state_dict().items()
        if other.state_dict()[name].shape == tensor.shape
    }
    other.load_state_dict(state, strict=False)
    with torch.inference_mode():
        mine, theirs = model()(ids).logits[0], other(ids).logits[0]
    assert difference(mine[-100:], theirs[-100:]) > 1e-3


def test_requests_of_different_lengths_in_one_call() -> None:
    """Four requests, two of one length; those two share a forward pass, and so do their references."""
    store = storage()
    lengths = [150, 37, 150, 260]
    requests = [opened_request(store) for _ in lengths]
    prompts = [tokens(length + 40, seed=10 + length + i) for i, length in enumerate(lengths)]
    pair = torch.stack([prompts[0], prompts[2]])
    pasts = {"pair": own_cache(), 1: own_cache(), 3: own_cache()}
    spans = [(0, None)] + [(step, step + 1) for step in range(39)]
    for start, end in spans:
        work, begin = [], {}
        for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            first = 0 if end is None else length + start
            last = length if end is None else length + end
            begin[i] = slice(first, last)
            assert request.reserve(last - first)
            work.append(Work(request, prompts[i][first:last]))
        found = run(model(), store, work)
        both = reference(pair[:, begin[0]], pasts["pair"])
        expected = {0: both[0], 2: both[1]} | {
            i: reference(prompts[i][begin[i]], pasts[i]) for i in (1, 3)
        }
        for i, logits in enumerate(found):
            assert difference(logits, expected[i]) <= TOLERANCE
        store.pool.check_invariants()
    assert [request.length for request in requests] == [length + 39 for length in lengths]


def opened_request(store: LayerStorage) -> Request:
    request = Request.open(store.pool)
    assert request is not None
    return request


def test_one_cache_over_many_passes_is_what_generate_needs() -> None:
    """``generate`` keeps one cache; pages are reserved for all of it beforehand."""
    store, ids = storage(), tokens(140, seed=3)[None]
    request = opened_request(store)
    assert request.reserve(140 + 30)
    cache = PooledCache(store, np.array([request.slot]), request.pages[None])
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mine = model().generate(ids, past_key_values=cache, **settings)
    theirs = model().generate(ids, past_key_values=DynamicCache(config=config()), **settings)
    assert mine.tolist() == theirs.tolist()
    assert cache.length == 140 + 29


def test_bfloat16_rows_hold_a_bfloat16_model() -> None:
    """Half the bytes, and nothing is rounded that was not."""
    store, ids = storage(dtype=torch.bfloat16), tokens(330, seed=4)
    assert store.pool.geometry.page_bytes * 2 == storage().pool.geometry.page_bytes
    request, past, own = opened_request(store), own_cache(), model(torch.bfloat16)
    assert request.reserve(len(ids))
    for piece in pieces(ids[:300], 100) + pieces(ids[300:], 1):
        (mine,) = run(own, store, [Work(request, piece)])
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, reference(piece, past, torch.bfloat16))


def test_transformers_own_cache_is_left_alone() -> None:
    """A subclass of theirs would have registered itself in its place."""
    assert DYNAMIC_LAYER_TYPE_MAPPING[CSA] is DeepseekV4CSACache
    assert type(own_cache().layers[1]) is DeepseekV4CSACache


def test_a_state_is_saved_where_it_is_wanted_and_nowhere_else() -> None:
    store, ids = storage(), tokens(5 * PAGE + 60, seed=5)
    twin = opened(Twin.open(store))
    assert twin.feed(ids[:300], save_every=2 * PAGE) <= TOLERANCE
    assert twin.feed(ids[300:], save_every=2 * PAGE) <= TOLERANCE
    pages = twin.request.pages
    assert sorted(store.pool.arena.saved_pages()) == sorted([pages[1], pages[3]])
    assert store.pool.match_limit(pages) == 4
    store.pool.check_invariants()
