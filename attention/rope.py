"""Relative rotary rotation of queries: how a stored key serves every prompt offset.

A key stored at position ``p`` and used at position ``p + s`` would score
``R(t) q · R(p + s) k``. Rotations compose, so the same score is ``R(t - s) q · R(p) k``: turn
the query by ``-s`` and read the key as it lies. One copy of a page then serves any number of
offsets at once, and since each use is a single step from the stored record nothing drifts.

The engine's cos/sin table is the truth about a model's rotary embedding (whatever its config
says), so the usual way in is `RelativeRotation.from_cos_sin_table`, which accepts only tables
for which the sentence above is true: angles linear in position, one constant norm.

Sources: RoPE, Su et al., arXiv 2104.09864; YaRN, Peng et al., arXiv 2309.00071; the MLA softmax
scale and the ``mscale`` pair, ``modeling_deepseek.py`` of DeepSeek-V2 and V3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

_SAMPLED_ROWS = 4096  # of a table; positional schemes bend over stretches, not at single rows
_TAU = 2.0 * math.pi


class Pairing(Enum):
    """Which two channels a frequency turns. It is a property of the model: never guess it."""

    INTERLEAVED = "interleaved"  # (0,1) (2,3) …: DeepSeek, GPT-J
    HALF_SPLIT = "half_split"  # (0,d/2) (1,d/2+1) …: Llama, Qwen, GPT-NeoX


@dataclass(frozen=True, slots=True)
class RelativeRotation:
    """Turns vectors along the position axis without changing their norm.

    Angles and their cosines are taken in float64, the rotation itself in float32: an angle of
    10^6 radians keeps 10 decimals in float64 and one in float32.
    """

    inv_freq: Tensor  # [rotary_dim/2] float64, radians per position
    pairing: Pairing

    @property
    def rotary_dim(self) -> int:
        """Channels that turn."""
        return 2 * self.inv_freq.numel()

    @classmethod
    def from_inv_freq(cls, inv_freq: Tensor, pairing: Pairing) -> RelativeRotation:
        """From ``inv_freq [rotary_dim/2]``, radians per position; kept in float64."""
        if inv_freq.dim() != 1 or inv_freq.numel() == 0:
            raise ValueError(f"inv_freq must be a non-empty vector, got {list(inv_freq.shape)}")
        if not bool(torch.isfinite(inv_freq).all()):
            raise ValueError("inv_freq holds a value that is not finite")
        return cls(inv_freq.detach().to(torch.float64, copy=True), pairing)

    @classmethod
    def from_cos_sin_table(cls, table: Tensor, pairing: Pairing) -> RelativeRotation:
        """From SGLang's ``rotary_emb.cos_sin_cache [max_position, rotary_dim]``, any float dtype.

        The first half of a row is cosines, the second half sines, both times one factor (YaRN's
        ``mscale``), which is divided out. Start-up only: it reads the table on the host.

        Raises:
            ValueError: the table is not one linear-in-position rotation of constant norm, so
                that no rotation of the query can stand for a move of the key.
        """
        return cls(_linear_frequencies(table).to(table.device), pairing)

    def to(self, device: torch.device | str) -> RelativeRotation:
        """The same rotation with its frequencies on ``device``, so that `rotate` copies nothing."""
        return RelativeRotation(self.inv_freq.to(device), self.pairing)

    def cos_sin(self, offsets: int | Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for ``offsets`` (an int, or int64 ``[T]``), each float32.

        Shape ``[rotary_dim/2]`` for an int, ``[T, rotary_dim/2]`` for a tensor. They do not
        depend on the layer: compute them once per forward pass, use them with `rotate_by`.
        """
        if isinstance(offsets, int):
            angles = self.inv_freq * offsets  # [d/2] float64
        else:
            angles = offsets.to(torch.float64)[:, None] * self.inv_freq.to(offsets.device)
        return angles.cos().to(torch.float32), angles.sin().to(torch.float32)

    def rotate(self, q: Tensor, offsets: int | Tensor, *, start: int) -> Tensor:
        """Move ``q [T, H, D]`` to a position later by ``offsets`` (negative: earlier).

        Args:
            q: any float dtype and strides; not modified.
            offsets: positions; one int for all rows, or int64 ``[T]``, one per row.
            start: first rotary channel: ``kv_lora_rank`` for absorbed MLA (its rotary channels
                come last), 0 for GQA (they come first, and are usually all).

        Returns:
            A new contiguous ``[T, H, D]`` of q's dtype, rounded once from float32.
        """
        cos, sin = self.cos_sin(offsets)
        return self.rotate_by(q, cos, sin, start=start)

    def rotate_by(self, q: Tensor, cos: Tensor, sin: Tensor, *, start: int) -> Tensor:
        """`rotate` with the result of `cos_sin`."""
        return self.turn(q.clone(memory_format=torch.contiguous_format), cos, sin, start=start)

    def turn(self, q: Tensor, cos: Tensor, sin: Tensor, *, start: int) -> Tensor:
        """`rotate_by` in place, for vectors that are the caller's own; returns ``q``."""
        stop = start + self.rotary_dim
        if start < 0 or stop > q.shape[-1]:
            raise ValueError(f"rotary channels [{start}, {stop}) exceed a vector of {q.shape[-1]}")
        cos, sin = cos.to(q.device), sin.to(q.device)
        if cos.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]  # [T, 1, d/2], over the heads
        into_first, into_second = self._pairs(q[..., start:stop])  # [T, H, d/2] each
        first, second = into_first.to(torch.float32), into_second.to(torch.float32)
        turned = (first * cos).addcmul_(second, sin, value=-1.0)  # before the first changes
        into_second.copy_((first * sin).addcmul_(second, cos))
        into_first.copy_(turned)
        return q

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second member of each pair."""
        if self.pairing is Pairing.INTERLEAVED:
            return x[..., 0::2], x[..., 1::2]
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature ``0.1 · mscale · ln(factor) + 1`` (arXiv 2309.00071, section 3.4).

    A table built with a pair (mscale, mscale_all_dim) carries the ratio of the two, which is
    1.08573 for factor 40 and the pair (1.0, 0.707).
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def mla_softmax_scale(qk_head_dim: int, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """``qk_head_dim^-1/2 · yarn_mscale(factor, mscale_all_dim)²`` (DeepSeek-V2/V3 modelling).

    ``qk_head_dim`` is nope + rope, 192 in DeepSeek-V3, not the width of the latent.
    """
    return yarn_mscale(factor, mscale_all_dim) ** 2 / math.sqrt(qk_head_dim)


def yarn_inv_freq(
    base: float,
    dim: int,
    factor: float,
    original_max_position: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """YaRN's "NTK by parts" frequencies, float64 ``[dim/2]``, radians per position.

    Channels that turn more than ``beta_fast`` times within ``original_max_position`` keep their
    frequency, those that turn less than ``beta_slow`` times are slowed by ``factor``, linearly
    blended in between (arXiv 2309.00071, section 3.2, bounds rounded outwards as DeepSeek does).
    """

    def channel_turning(turns: float) -> float:
        return dim * math.log(original_max_position / (turns * _TAU)) / (2.0 * math.log(base))

    low = max(math.floor(channel_turning(beta_fast)), 0)
    high = min(math.ceil(channel_turning(beta_slow)), dim - 1)
    channel = torch.arange(dim // 2, dtype=torch.float64)  # [dim/2]
    plain = base ** (-2.0 * channel / dim)
    slowed = ((channel - low) / max(high - low, 0.001)).clamp(0.0, 1.0)  # 0 keeps, 1 slows
    return plain * (1.0 - slowed) + plain / factor * slowed


def _linear_frequencies(table: Tensor) -> Tensor:
    """The frequencies [d/2] float64 (host) of a table, or ValueError if there are none."""
    if table.dim() != 2 or table.shape[1] == 0 or table.shape[1] % 2:
        raise ValueError(f"a cos/sin table has an even, positive width, got {list(table.shape)}")
    if not table.is_floating_point():
        raise ValueError(f"a cos/sin table holds floats, got {table.dtype}")
    if table.shape[0] < 2:
        raise ValueError("a cos/sin table of fewer than 2 positions names no frequency")
    last = table.shape[0] - 1
    doubling = [1 << e for e in range(last.bit_length())]  # 1, 2, 4 … ≤ last
    spread = range(0, last, max(last // _SAMPLED_ROWS, 1))
    rows = torch.tensor(sorted({*doubling, *spread, last}))  # [n] int64
    sample = table.detach().index_select(0, rows.to(table.device)).to("cpu", torch.float64)
    cos, sin = sample.chunk(2, dim=-1)  # [n, d/2] each
    step = float(torch.finfo(table.dtype).eps)
    _check_norm(torch.hypot(cos, sin), rows, step)

    angle = torch.atan2(sin, cos)  # [n, d/2], modulo 2π
    position = rows.to(torch.float64)[:, None]  # [n, 1]
    # From 1 to 2 to 4 …: the error of an estimate at p shrinks with 1/p, so it always tells
    # which turn the angle at 2p belongs to. (A frequency past π aliases to one that turns
    # alike at every whole position, which is all that is asked of it.)
    freq = torch.zeros_like(angle[0])  # [d/2]
    for row in torch.searchsorted(rows, torch.tensor([*doubling, last])).tolist():
        p = position[row]
        freq = freq + _wrap(angle[row] - p * freq) / p
    # The table rounds each entry to its dtype, and had rounded position · frequency to float32.
    tolerance = 2.0 * step + position * freq.abs() * 2.0**-22  # [n, d/2] radians
    weight = tolerance**-2
    residual = _wrap(angle - position * freq)
    freq = freq + (weight * position * residual).sum(0) / (weight * position**2).sum(0)

    excess = _wrap(angle - position * freq).abs() / tolerance
    worst, at = excess.flatten().max(0)
    if float(worst) > 1.0:
        row, channel = divmod(int(at), freq.numel())
        raise ValueError(
            f"the cos/sin table's angle is not linear in position (position {int(rows[row])}, "
            f"channel pair {channel}: {float(worst):.1f} times the rounding error): a dynamic or "
            "per-position rotary embedding can not be moved by rotating the query"
        )
    return freq


def _check_norm(norm: Tensor, rows: Tensor, step: float) -> None:
    """One norm > 0 for all of ``norm [n, d/2]``, to a few rounding ``step``s."""
    if not bool(torch.isfinite(norm).all()):
        raise ValueError("the cos/sin table holds a value that is not finite")
    common = float(norm.median())
    deviation, at = (norm - common).abs().flatten().max(0)
    if common <= 0.0 or float(deviation) > 2.0 * step * common:
        row, channel = divmod(int(at), norm.shape[1])
        raise ValueError(
            f"the cos/sin table's norm is not constant ({float(norm[row, channel]):.6g} at "
            f"position {int(rows[row])}, channel pair {channel}, {common:.6g} elsewhere): a "
            "per-position or per-channel factor can not be divided out"
        )


def _wrap(angle: Tensor) -> Tensor:
    """To [-π, π]."""
    return angle.sub(torch.round(angle / _TAU), alpha=_TAU)
