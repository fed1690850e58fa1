"""Merging parts is exact, and empty parts do not show."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tessera_sglang.attention.merge import merge, merge_into
from tessera_sglang.attention.reference import attend_reference

Part = tuple[Tensor, Tensor]  # out [T, H, Dv], lse [T, H]
T, H, D = 6, 3, 8


def parts_and_whole(lengths: list[int], spread: float = 1.0) -> tuple[list[Part], Part]:
    torch.manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v = torch.randn(T, H, D) * spread, torch.randn(total, 1, D), torch.randn(total, 1, 5)
    mask = torch.ones(T, total, dtype=torch.bool)
    parts, at = [], 0
    for n in lengths:
        run = slice(at, at + n)
        parts.append(attend_reference(q, k[run], v[run], mask[:, run], 1.0))
        at += n
    return parts, attend_reference(q, k, v, mask, 1.0)


def close(got: Part, expected: Part) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6)


def in_place(parts: list[Part]) -> Part:
    out, lse = torch.full((T, H, 5), math.nan), torch.full((T, H), -math.inf)
    for part_out, part_lse in parts:
        merge_into(out, lse, part_out, part_lse)
    return out, lse


@pytest.mark.parametrize("lengths", [[7], [1, 1], [64, 1, 200], [3, 0, 5], [0, 4], [1] * 12])
@pytest.mark.parametrize("spread", [1.0, 40.0])  # 40: scores of ±300, far past exp's range
def test_parts_merge_to_the_whole(lengths: list[int], spread: float) -> None:
    parts, whole = parts_and_whole(lengths, spread)
    close(merge([p[0] for p in parts], [p[1] for p in parts]), whole)
    close(in_place(parts), whole)


def test_order_does_not_matter() -> None:
    parts, whole = parts_and_whole([5, 9, 2])
    close(merge([p[0] for p in parts[::-1]], [p[1] for p in parts[::-1]]), whole)


def test_what_an_empty_part_holds_does_not_show() -> None:
    parts, whole = parts_and_whole([4, 4])
    for garbage in (math.nan, math.inf, 1e30):
        empty = torch.full((T, H, 5), garbage), torch.full((T, H), -math.inf)
        for order in ([empty, *parts], [*parts, empty], [parts[0], empty, parts[1]]):
            close(merge([p[0] for p in order], [p[1] for p in order]), whole)
            close(in_place(order), whole)


def test_rows_that_are_empty_everywhere() -> None:
    parts, whole = parts_and_whole([4, 4])
    for out, lse in parts:
        out[2], lse[2] = math.nan, -math.inf
    for out, lse in (merge([p[0] for p in parts], [p[1] for p in parts]), in_place(parts)):
        assert bool((out[2] == 0).all())
        assert bool((lse[2] == -math.inf).all())
        rest = [0, 1, 3, 4, 5]
        close((out[rest], lse[rest]), (whole[0][rest], whole[1][rest]))


def test_a_part_for_some_rows_leaves_the_others_alone() -> None:
    parts, whole = parts_and_whole([4, 4])
    out, lse = parts[0][0].clone(), parts[0][1].clone()
    rows = slice(2, 5)
    merge_into(out, lse, parts[1][0][rows], parts[1][1][rows], rows)
    close((out[rows], lse[rows]), (whole[0][rows], whole[1][rows]))
    for others in (slice(0, 2), slice(5, 6)):
        assert torch.equal(out[others], parts[0][0][others])
        assert torch.equal(lse[others], parts[0][1][others])


def test_inputs_are_not_modified() -> None:
    parts, _ = parts_and_whole([4, 4])
    copies = [(out.clone(), lse.clone()) for out, lse in parts]
    merge([p[0] for p in parts], [p[1] for p in parts])
    in_place(parts)
    for part, copy in zip(parts, copies, strict=True):
        assert torch.equal(part[0], copy[0])
        assert torch.equal(part[1], copy[1])


def test_a_broken_lse_shows() -> None:
    parts, _ = parts_and_whole([4, 4])
    parts[1][1][0, 0] = math.nan
    out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
    assert bool(out[0, 0].isnan().all())
    assert bool(lse[0, 0].isnan())


def test_misuse_is_refused() -> None:
    parts, _ = parts_and_whole([4, 4])
    with pytest.raises(ValueError, match="at least one"):
        merge([], [])
    with pytest.raises(ValueError, match="2 outputs and 1 lses"):
        merge([p[0] for p in parts], [parts[0][1]])
    with pytest.raises(ValueError, match="for rows of"):
        merge_into(*parts[0], *parts[1], slice(0, 2))
