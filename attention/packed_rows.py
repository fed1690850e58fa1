"""Packed FP8 rows of an MLA cache: what the bytes are, how to write and how to read them.

A row is what FlashMLA's FP8 kernels read ("FP8 KV cache" in its README) and what SGLang's
``quantize_k_cache`` writes (0.5.23, ``kernels/ops/quantization/dsa_quant_k_cache.py``):

    latent  512 × E4M3 | scales  4 × FP32 | rope  64 × BF16        512 + 16 + 128 = 656 bytes

Each group of 128 latents has the scale ``amax / 448`` (448 is the largest E4M3), and a latent reads
back as ``code · scale``. The rotated channels are not quantised: an error in them would be one of
position. Bytes are little-endian, as on the devices that read them.

The error of a latent x is at most ``max(|x| / 16, scale / 1024)``: half a step of the 3-bit
mantissa, or of the subnormal codes. Packing what was unpacked changes no byte if the latents
were BF16, so a row can be unpacked, moved and packed again without drifting.

Differences from SGLang's CUDA kernel, which multiplies by ``1 / scale`` where we divide (as its
PyTorch reference does): a latent half-way between two codes may take the other one. And a group of
zeros is zeros here; there it is NaN, from 0 / 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128  # latents per scale
E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Widths of a row, in channels. `ValueError` for widths that can not be packed."""

    latent: int = 512
    rope: int = 64

    def __post_init__(self) -> None:
        if self.latent <= 0 or self.latent % GROUP:
            raise ValueError(f"a latent of {self.latent} is not whole groups of {GROUP}")
        if self.rope < 0 or self.rope % 2:
            raise ValueError(f"{self.rope} rotated channels are not pairs")

    @property
    def scales_at_bytes(self) -> int:
        """Where the scales begin: 512."""
        return self.latent

    @property
    def rope_at_bytes(self) -> int:
        """Where the rope begins: 528. A multiple of 4, of 16 only by chance, and not of 128."""
        return self.latent + 4 * (self.latent // GROUP)

    @property
    def row_bytes(self) -> int:
        """Size of a row: 656."""
        return self.rope_at_bytes + 2 * self.rope

    @property
    def identity_bytes(self) -> tuple[int, int]:
        """``[0, 528)``: codes and scales, all that names the content wherever the row is used."""
        return 0, self.rope_at_bytes

    @property
    def rope_bytes(self) -> tuple[int, int]:
        """``[528, 656)``: what depends on the position the row was computed at."""
        return self.rope_at_bytes, self.row_bytes


MLA_ROW = PackedRow()


def pack(latent: Tensor, rope: Tensor) -> Tensor:
    """Rows of latents and rotated channels.

    Args:
        latent: ``[N, L]`` float, any strides; L a multiple of 128.
        rope: ``[N, R]`` float, rotated; rounded to BF16.

    Returns:
        ``[N, row_bytes]`` uint8, new. A group that holds NaN or ±inf reads back as NaN, all 128 of
        it: the fault stays visible, and within its group. A group whose scale underflows (amax below
        3e-43) is zeros.

    Raises:
        ValueError: shapes that are not two matrices of as many rows, or widths of no row.
    """
    if latent.dim() != 2 or rope.dim() != 2 or latent.shape[0] != rope.shape[0]:
        raise ValueError(
            f"latent {list(latent.shape)} and rope {list(rope.shape)} are not one row each"
        )
    tokens, row = latent.shape[0], PackedRow(latent.shape[1], rope.shape[1])
    grouped = (tokens, row.latent // GROUP, GROUP)
    groups = latent.to(torch.float32).reshape(grouped)
    scales = groups.abs().amax(-1) / E4M3_MAX  # [N, L/128]
    divisors = scales.masked_fill(scales == 0.0, torch.inf)  # x / inf = 0
    # The amax itself may come out a rounding above 448, which E4M3 without infinities makes NaN.
    codes = (groups / divisors[..., None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    rows = latent.new_empty((tokens, row.row_bytes), dtype=torch.uint8)
    rows[:, : row.scales_at_bytes] = codes.view(torch.uint8).view(tokens, row.latent)
    rows[:, row.scales_at_bytes : row.rope_at_bytes] = scales.view(torch.uint8)
    rows[:, row.rope_at_bytes :] = rope.to(torch.bfloat16).contiguous().view(torch.uint8)
    return rows


def unpack(rows: Tensor, dtype: torch.dtype = torch.bfloat16, row: PackedRow = MLA_ROW) -> Tensor:
    """Latents and rotated channels of rows.

    Args:
        rows: ``[N, row_bytes]`` uint8, any strides and any alignment; not modified.
        dtype: of the result. float32 is exact; bfloat16 is what the kernels compute with.
        row: the widths.

    Returns:
        ``[N, L + R]``, new: the row of an unpacked cache, values are ``[:, :L]``.

    Raises:
        ValueError: ``rows`` is not uint8 or not of these widths.
    """
    _check_rows(rows, row)
    # Copies: four bytes of a view that begins anywhere can not be seen as a float.
    codes = _copied(rows[:, : row.scales_at_bytes]).view(torch.float8_e4m3fn).to(torch.float32)
    scales = _copied(rows[:, row.scales_at_bytes : row.rope_at_bytes]).view(torch.float32)
    out = rows.new_empty((rows.shape[0], row.latent + row.rope), dtype=dtype)
    groups = codes.view(*scales.shape, GROUP).mul_(scales[..., None])  # [N, L/128, 128]
    out[:, : row.latent] = groups.view(codes.shape)
    if row.rope:  # no bytes can not be viewed either
        out[:, row.latent :] = _copied(rows[:, row.rope_at_bytes :]).view(torch.bfloat16)
    return out


def write_rows(pool: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """`pack` into a pool; other slots are not touched.

    Args:
        pool: ``[num_slots, row_bytes]`` uint8, any strides, updated.
        slots: ``[N]`` int64, each at most once.
        latent: ``[N, L]`` float.
        rope: ``[N, R]`` float.

    Raises:
        ValueError: as `pack`, or ``pool`` is not uint8 or not of these widths.
        IndexError: a slot outside the pool, on the CPU.
    """
    _check_rows(pool, PackedRow(latent.shape[-1], rope.shape[-1]))
    pool.index_copy_(0, slots, pack(latent, rope))


def read_rows(
    pool: Tensor, slots: Tensor, dtype: torch.dtype = torch.bfloat16, row: PackedRow = MLA_ROW
) -> Tensor:
    """`unpack` the rows in ``slots [N]`` int64, in that order, of a pool ``[num_slots, row_bytes]``.

    No other slot is read, whatever it holds. Returns ``[N, L + R]`` of ``dtype``, new. Raises
    ValueError as `unpack`, and on the CPU IndexError for a slot outside the pool.
    """
    _check_rows(pool, row)
    return unpack(pool.index_select(0, slots), dtype, row)


def _copied(rows: Tensor) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def _check_rows(rows: Tensor, row: PackedRow) -> None:
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != row.row_bytes:
        raise ValueError(
            f"rows are uint8 [N, {row.row_bytes}], got {rows.dtype} {list(rows.shape)}: "
            "view the pool as bytes, one row to a slot"
        )
