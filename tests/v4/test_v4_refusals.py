"""What can not be made, and what a caller is told."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from v4_model import CSA, HCA, PAGE, SWA, config, model, storage, tokens

from tessera_sglang.memory_pool.known_models import KNOWN
from tessera_sglang.memory_pool.model_geometry import read_model
from tessera_sglang.memory_pool.pool import TwoTierPool
from tessera_sglang.memory_pool.rows import IndexFormat, KvFormat
from tessera_sglang.v4 import LayerStorage, PooledCache, Request, Work, pool_geometry, run
from tessera_sglang.v4.storage import hybrid_model

SPLITS = (
    r"page of {} tokens is no multiple of its block of 128 tokens "
    r"\(groups of 4 and 128 tokens\); use 128"
)


def opened(store: LayerStorage, reserve: int = 0) -> Request:
    request = Request.open(store.pool)
    assert request is not None
    assert request.reserve(reserve)
    return request


# --- a page boundary inside a group --------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [1, 4, 64, 127, 132, 192])
def test_a_page_that_splits_a_group_can_not_be_made(page_tokens: int) -> None:
    """By whatever way: from a config, from a known model, from another geometry."""
    refusal = SPLITS.format(page_tokens)
    with pytest.raises(ValueError, match=refusal):
        pool_geometry(config(), page_tokens=page_tokens)
    for name in ("deepseek-v4-flash", "deepseek-v4-pro"):
        with pytest.raises(ValueError, match=refusal):
            read_model(KNOWN[name].config, name).geometry(page_tokens=page_tokens)
    with pytest.raises(ValueError, match=refusal):
        dataclasses.replace(pool_geometry(config()), page_tokens=page_tokens)
    with pytest.raises(dataclasses.FrozenInstanceError):
        pool_geometry(config()).page_tokens = page_tokens  # type: ignore[misc]


def test_the_pages_that_can_be_made_end_with_every_group() -> None:
    made = []
    for page_tokens in range(1, 520):
        try:
            geometry = pool_geometry(config(), page_tokens=page_tokens)
        except ValueError:
            continue
        made.append(page_tokens)
        for layer in geometry.layers:
            assert all(page_tokens % plane.tokens == 0 for plane in layer.paged)
    assert made == [128, 256, 384, 512]


@pytest.mark.parametrize(
    ("rates", "block", "strides"),
    [({CSA: 6, HCA: 64}, 192, "6 and 64"), ({CSA: 4, HCA: 96}, 96, "4 and 96")],
)
def test_other_strides_are_named_as_well(rates: dict[str, int], block: int, strides: str) -> None:
    made = config(compress_rates=rates)
    assert pool_geometry(made).page_tokens == block
    with pytest.raises(
        ValueError, match=rf"block of {block} tokens \(groups of {strides} tokens\)"
    ):
        pool_geometry(made, page_tokens=128)


def test_a_page_is_not_forked_inside_a_group() -> None:
    store = storage()
    source, target = store.pool.paged.allocate(2).tolist()  # type: ignore[union-attr]
    for inside in (3, 4, 127):
        with pytest.raises(ValueError, match=r"shared by (4|128); fork at a multiple of that"):
            store.pool.paged.copy_rows(source, target, inside)
    store.pool.paged.copy_rows(source, target, PAGE)


def test_no_state_is_saved_inside_a_page() -> None:
    store = storage()
    request = opened(store, 200)
    run(model(), store, [Work(request, tokens(130))])
    with pytest.raises(AssertionError, match="saved inside a page"):
        request.save()
    with pytest.raises(ValueError, match="states are saved at the ends of pages of 128 tokens"):
        run(model(), store, [Work(request, tokens(3))], save_every_tokens=64)


# --- pools that do not fit -----------------------------------------------------------------------


def test_a_pool_of_another_model_is_refused_by_layer() -> None:
    pool = TwoTierPool(pool_geometry(config()), pages=2, slots=2)
    with pytest.raises(ValueError, match=r"'DeepSeek-V4' has 4 layers, the model 3"):
        LayerStorage(pool, config(num_hidden_layers=3, layer_types=[SWA, CSA, HCA]))
    with pytest.raises(ValueError, match=rf"does not fit layer 2 of the model, a {SWA} layer"):
        LayerStorage(pool, config(layer_types=[SWA, CSA, SWA, CSA]))
    with pytest.raises(ValueError, match=rf"does not fit layer 1 of the model, a {CSA} layer"):
        LayerStorage(pool, config(index_head_dim=32))


def test_packed_rows_are_for_kernels() -> None:
    made = config(head_dim=128, qk_rope_head_dim=64, index_head_dim=128)
    geometry = hybrid_model(made).geometry(KvFormat.FP8_PACKED, IndexFormat.FP8)
    pool = TwoTierPool(geometry, pages=2, slots=2)
    with pytest.raises(ValueError, match=r"fit layer 0 .* in float32 or bfloat16"):
        LayerStorage(pool, made)
    with pytest.raises(ValueError, match=r"kept in float32 or bfloat16, not in torch.float16"):
        pool_geometry(made, torch.float16)


def test_a_config_of_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="DeepSeek-V4 model, found llama"):
        pool_geometry(LlamaConfig())


# --- passes that can not run ---------------------------------------------------------------------


def test_tokens_without_pages_are_refused_before_anything_is_written() -> None:
    store = storage()
    request = opened(store, PAGE)
    with pytest.raises(ValueError, match="fewer than 2 pages; reserve them for 129 tokens"):
        run(model(), store, [Work(request, tokens(129))])
    cache = PooledCache(store, np.array([request.slot]), request.pages[None])
    with pytest.raises(ValueError, match="1 pages of 128 tokens do not hold 129 tokens"):
        model()(tokens(129)[None], past_key_values=cache)
    assert request.length == cache.length == 0


def test_one_request_once_in_a_call() -> None:
    store = storage()
    request = opened(store, 9)
    with pytest.raises(ValueError, match="stands twice"):
        run(model(), store, [Work(request, tokens(3)), Work(request, tokens(4))])


def test_a_batch_of_another_size_is_refused() -> None:
    store = storage()
    request = opened(store, 9)
    cache = PooledCache(store, np.array([request.slot]), request.pages[None])
    with pytest.raises(ValueError, match="a batch of 2 rows for a cache of 1 requests"):
        model()(tokens(3).expand(2, -1), past_key_values=cache)


def test_a_pass_that_broke_off_is_noticed() -> None:
    store = storage()
    request = opened(store, 9)
    cache = PooledCache(store, np.array([request.slot]), request.pages[None])
    keys = torch.zeros(1, 1, 3, 32)
    cache.update(keys, keys, 0)
    with pytest.raises(RuntimeError, match="layer 0 runs where layer 1 is due"):
        model()(tokens(3)[None], past_key_values=cache)


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [("reset", ()), ("crop", (-1,)), ("reorder_cache", (torch.tensor([0]),))],
)
def test_what_would_change_requests_behind_the_pools_back(
    operation: str, arguments: tuple[object, ...]
) -> None:
    store = storage()
    request = opened(store, 9)
    cache = PooledCache(store, np.array([request.slot]), request.pages[None])
    with pytest.raises(NotImplementedError, match="in the pool, not in the cache"):
        getattr(cache, operation)(*arguments)
