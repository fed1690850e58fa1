"""A needle at every depth: what BF16 and packed FP8 rows cost, and that 16 runs cost nothing more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.needle import BOUNDS, LATENT, Attend, Finding, depths, haystack, measure, report
from tessera_sglang.attention.kernels.torch_kernel import TorchKernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as measured
    yield
    torch.set_num_threads(threads)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return TorchKernel().attend(q, keys, values, slots, scale=scale, causal_from=None)


def find(attend: Attend, keys: int, at: list[int], heads: int = 4) -> list[Finding]:
    return list(measure(attend, haystack(keys, CPU), heads, at))


def check(findings: list[Finding], at: list[int]) -> None:
    ways = {(f.dtype, f.runs, f.depth) for f in findings}
    assert len(findings) == len(ways) == len(BOUNDS) * 2 * len(at)
    for finding in findings:
        assert 0.3 < finding.mass < 0.7, "neither lost nor alone"
        assert finding.within(BOUNDS[finding.dtype]), finding


def test_a_needle_among_4096() -> None:
    at = [0, 255, 256, 2085, 4095]  # both ends, both sides of a run's boundary, within a page
    findings = find(attend, 4096, at)
    check(findings, at)
    assert report(findings, {}).holds


@pytest.mark.slow
def test_a_needle_among_131072_at_20_depths() -> None:
    at = depths(131_072)
    assert len(at) == 20
    check(find(attend, 131_072, at), at)


def test_depths_are_distinct_and_cover_the_context() -> None:
    for keys in (4096, 8192, 131_072):
        at = depths(keys)
        assert len(set(at)) == 20
        assert at == sorted(at)
        assert at[0] == 0
        assert at[-1] == keys - 1
        assert {keys // 16 - 1, keys // 16, 63, 64} <= set(at)


def last_key_lost(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return attend(q, keys, values, slots[:-1], scale)


def scores_off_by_4_percent(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return attend(q, keys, values, slots, scale * 1.04)  # 1 % would drown in FP8's own error


def lse_of_base_2(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, keys, values, slots, scale)
    return out, lse / torch.log(torch.tensor(2.0))


def rope_ignored(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    content = torch.cat([q[..., :LATENT], torch.zeros_like(q[..., LATENT:])], dim=-1)
    return attend(content, keys, values, slots, scale)


@pytest.mark.parametrize(
    "broken", [last_key_lost, scores_off_by_4_percent, lse_of_base_2, rope_ignored]
)
def test_the_bounds_notice(broken: Attend) -> None:
    """A needle at the end of a run of 256 keys, through kernels with one mistake each."""
    findings = {(f.dtype, f.runs): f for f in find(broken, 4096, [255])}
    for dtype, bounds in BOUNDS.items():
        assert not findings[dtype, 16].within(bounds), (dtype, broken)
