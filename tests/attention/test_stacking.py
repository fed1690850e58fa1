"""Buckets of parts and tables of pages, against brute force."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from work import DECODE, STACKED, VERIFY, Sizes, part_slots, work_of

from tessera_sglang.attention.kernels.flashinfer import planned_heads
from tessera_sglang.attention.kernels.flashmla import key_indices, padded_heads
from tessera_sglang.attention.kernels.paging import blind_rows, in_pages, page_plan
from tessera_sglang.attention.kernels.stacking import buckets, stack

# --- stacking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_buckets_against_brute_force(powers_of_two: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, (2, 5, 40, 3, 17, 1)[seed] + 1, size=random.integers(1, 30))
    indptr = np.concatenate([[0], np.cumsum(counts)])
    found, place = buckets(indptr, powers_of_two=powers_of_two)

    assert sorted(part for bucket in found for part in bucket.parts) == list(np.flatnonzero(counts))
    classes = [int(np.ceil(np.log2(counts[bucket.parts].max()))) for bucket in found]
    assert classes == sorted(set(classes))
    rows_in_places = np.concatenate([np.empty(0, np.int64), *(bucket.gather for bucket in found)])
    assert np.array_equal(rows_in_places[place], np.arange(indptr[-1]))
    for bucket in found:
        most = int(counts[bucket.parts].max())
        assert bucket.rows == (1 << (most - 1).bit_length() if powers_of_two else most)
        assert bool((2 * counts[bucket.parts] > bucket.rows).all()), "less than half is padding"
        for part, line in zip(bucket.parts, bucket.gather.reshape(-1, bucket.rows), strict=True):
            first, last = indptr[part], indptr[part + 1]
            padding = bucket.rows - (last - first)
            assert list(line) == [first] * padding + list(range(first, last))


@pytest.mark.parametrize("powers_of_two", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("parts", [DECODE, STACKED, VERIFY, ((0, 9), (2, 64), (0, 0), (2, 3))])
def test_a_stacked_batch_holds_the_parts(parts: Sizes, causal: bool, powers_of_two: bool) -> None:
    work, _ = work_of(parts, causal)
    stacking = stack(work, powers_of_two=powers_of_two)
    q = torch.randn(work.rows, 3, 8)
    own = part_slots(work)
    stacked = [batch.stack(q) for batch in stacking.batches]
    assert torch.equal(stacking.restore(stacked), q)
    for batch, rows in zip(stacking.batches, stacked, strict=True):
        tokens, visible = batch.key_tokens(work), batch.visible_keys(work)
        table = batch.block_table(work, tokens)
        indices = key_indices(table, visible, causal)
        indptr, slots = batch.key_slots(work)
        for entry, part in enumerate(batch.host_parts.tolist()):
            count, keys = parts[part]
            first, last = work.host_query_indptr[part : part + 2]
            assert torch.equal(rows[entry, batch.rows - count :], q[first:last])
            assert int(tokens[entry]) == keys
            paged = (table[entry].long()[:, None] * 64 + torch.arange(64)).reshape(-1)
            assert torch.equal(paged[:keys], own[part])
            assert bool((table[entry, -(-keys // 64) :] == 0).all())
            assert torch.equal(slots[indptr[entry] : indptr[entry + 1]], own[part])
            for row in range(count):
                seen = max(keys - count + row + 1, 0) if causal else keys
                at = batch.rows - count + row
                assert int(visible[entry, at]) == seen
                listed = indices[entry, at]
                assert torch.equal(listed[:seen].long(), own[part][:seen])
                assert bool((listed[seen:] == -1).all())


def test_equal_parts_are_neither_copied_nor_indexed() -> None:
    work, _ = work_of(DECODE)
    (batch,) = stack(work, powers_of_two=True).batches
    q = torch.randn(work.rows, 3, 8)
    assert batch.stack(q).data_ptr() == q.data_ptr()
    indptr, slots = batch.key_slots(work)
    assert torch.equal(indptr, work.key_indptr)
    assert slots is work.slots
    strided = torch.randn(work.rows, 2, 3, 8)[:, 1]
    assert torch.equal(batch.stack(strided)[:, 0], strided)


def test_static_work_has_the_shapes_of_its_capacity() -> None:
    shapes = set()
    for parts in (((3, 65), (3, 0)), ((3, 1), (3, 190))):
        work, _ = work_of(parts, capacity=192)
        (batch,) = stack(work, powers_of_two=True).batches
        assert (batch.rows, batch.parts, batch.gather) == (3, None, None)
        tokens = batch.key_tokens(work)
        table = batch.block_table(work, tokens)
        for line, (_, keys), slots in zip(table, parts, part_slots(work), strict=True):
            assert torch.equal(
                (line.long()[:, None] * 64 + torch.arange(64)).view(-1)[:keys], slots
            )
        shapes.add((table.shape, batch.visible_keys(work).shape))
    assert shapes == {((2, 3), (2, 3))}


def test_a_run_of_parts_shares_the_table_of_slots() -> None:
    work, _ = work_of(((1, 5), (2, 65), (2, 3), (4, 9)))
    two = stack(work).batches[1]
    assert two.host_parts.tolist() == [1, 2]
    indptr, slots = two.key_slots(work)
    assert slots is work.slots
    assert indptr.tolist() == [5, 70, 73]


# --- pages on the host ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_blind_rows(causal: bool) -> None:
    work, _ = work_of(((3, 0), (2, 5), (4, 2), (0, 0), (1, 1)), causal)
    assert blind_rows(work).tolist() == ([0, 1, 2, 5, 6] if causal else [0, 1, 2])


def test_page_plan_against_brute_force() -> None:
    work, _ = work_of(STACKED)
    plan = page_plan(work)
    assert all(
        tensor.dtype == torch.int32
        for tensor in (plan.query_indptr, plan.page_indptr, plan.key_tokens, plan.last_page_tokens)
    )
    assert plan.query_indptr.tolist() == work.query_indptr.tolist()
    assert plan.key_tokens.tolist() == [keys for _, keys in STACKED]
    assert plan.page_indptr.tolist() == work.page_indptr.tolist()
    for (first, last), tail, (_, keys) in zip(
        pairwise(plan.page_indptr.tolist()), plan.last_page_tokens.tolist(), STACKED, strict=True
    ):
        assert keys == (max(last - first - 1, 0)) * 64 + tail
        assert (1 <= tail <= 64) == (keys > 0)


def test_a_pool_in_pages_is_a_view() -> None:
    pool = torch.arange(10 * 2 * 3).view(10, 2, 3)
    pages = in_pages(pool, 4)
    assert pages.shape == (2, 4, 2, 3)
    assert pages.data_ptr() == pool.data_ptr()
    assert torch.equal(pages[1, 3], pool[7])


def test_padded_heads() -> None:
    assert [padded_heads(heads) for heads in (1, 16, 64, 65, 128)] == [64, 64, 64, 128, 128]
    with pytest.raises(ValueError, match="at most 128"):
        padded_heads(129)
    assert [planned_heads(heads) for heads in (1, 9, 16, 40, 128)] == [1, 16, 16, 64, 128]
