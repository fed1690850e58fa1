"""Packed FP8 rows: bytes where the format has them, errors within E4M3's, faults where they are."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tessera_sglang.attention.packed_rows import (
    GROUP,
    MLA_ROW,
    PackedRow,
    pack,
    read_rows,
    unpack,
    write_rows,
)

POISON = 0xFF  # NaN as E4M3, as FP32 and as BF16


def random_rows(tokens: int, row: PackedRow = MLA_ROW, seed: int = 0) -> tuple[Tensor, Tensor]:
    """BF16 latents whose groups differ in size by powers of ten, and BF16 rope."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(tokens, row.latent, generator=generator)
    size = torch.randint(-3, 4, (tokens, row.latent // GROUP), generator=generator)
    latent *= (10.0**size).repeat_interleave(GROUP, dim=1)
    return latent.bfloat16(), torch.randn(tokens, row.rope, generator=generator).bfloat16()


def bound(latent: Tensor) -> Tensor:
    """What an unpacked latent may be off by: half a step of E4M3, and float32's last bits."""
    groups = latent.float().view(len(latent), -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 448.0
    return torch.maximum(groups.abs() / 16, scales / 1024).flatten(1) * (1 + 1e-6)


def test_the_layout_of_deepseek() -> None:
    """Case 17."""
    assert (MLA_ROW.latent, MLA_ROW.rope) == (512, 64)
    assert MLA_ROW.scales_at_bytes == 512
    assert MLA_ROW.rope_at_bytes == 528
    assert MLA_ROW.rope_at_bytes % GROUP == 16, "not a boundary of a scale's group"
    assert MLA_ROW.row_bytes == 656
    assert MLA_ROW.identity_bytes == (0, 528)
    assert MLA_ROW.rope_bytes == (528, 656)


def test_every_byte_of_a_row() -> None:
    latent, rope = torch.zeros(1, 512), torch.zeros(1, 64)
    latent[0, 0], latent[0, 1] = 448.0, -1.0  # scale 1
    latent[0, 129], latent[0, 130] = -896.0, 2.0**-8  # scale 2; 2^-9 is E4M3's smallest
    rope[0, 63] = 1.5
    row = pack(latent, rope)[0]
    expected = torch.zeros(656, dtype=torch.uint8)
    expected[0], expected[1] = 0x7E, 0xB8  # 0.1111.110 = 448, 1.0111.000 = -1
    expected[129], expected[130] = 0xFE, 0x01
    expected[512:528] = torch.tensor([1.0, 2.0, 0.0, 0.0]).view(torch.uint8)
    expected[654], expected[655] = 0xC0, 0x3F
    assert torch.equal(row, expected)
    assert torch.equal(unpack(row[None], torch.float32), torch.cat([latent, rope], dim=1))


@pytest.mark.parametrize("row", [MLA_ROW, PackedRow(128, 2), PackedRow(384, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_e4m3(row: PackedRow, dtype: torch.dtype) -> None:
    latent, rope = random_rows(200, row)
    got = unpack(pack(latent, rope), dtype, row)
    assert got.shape == (200, row.latent + row.rope)
    assert got.dtype == dtype
    rounding = got[:, : row.latent].float().abs() * (2**-8 if dtype == torch.bfloat16 else 0.0)
    error = (got[:, : row.latent].float() - latent.float()).abs()
    assert bool((error <= bound(latent) + rounding).all())
    assert float((error / bound(latent)).max()) > 0.9, "the bound is no looser than it has to be"
    assert torch.equal(got[:, row.latent :].to(torch.bfloat16), rope), "rope is not quantised"


def test_the_error_of_a_whole_row() -> None:
    """2.7 % of the latent's norm for normally distributed latents: what attention sees of FP8."""
    latent = torch.randn(500, 512, generator=torch.Generator().manual_seed(1))
    error = unpack(pack(latent, torch.zeros(500, 64)), torch.float32)[:, :512] - latent
    relative = error.norm(dim=1) / latent.norm(dim=1)
    assert float(relative.min()) > 0.02
    assert float(relative.max()) < 0.032


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_what_was_unpacked_changes_no_byte(dtype: torch.dtype) -> None:
    latent, rope = random_rows(300)
    latent[:128, 0] = torch.arange(128, 256).bfloat16()  # each mantissa a BF16 amax can have,
    latent[:128, 1:128] = latent[:128, 1:128].clamp(-1, 1)
    rows = pack(latent, rope)
    again = unpack(rows, dtype)
    assert torch.equal(pack(again[:, :512], again[:, 512:]), rows)


def test_only_a_zero_scale_is_zero() -> None:
    latent, rope = random_rows(2)
    latent[0, 128:256] = 0.0
    latent[1, 0:128] = 1e-45  # its scale is no float32
    rows = pack(latent, rope)
    got = unpack(rows, torch.float32)
    assert torch.equal(got[0, 128:256], torch.zeros(128))
    assert torch.equal(got[1, 0:128], torch.zeros(128))
    assert torch.equal(rows[0, 516:520], torch.zeros(4, dtype=torch.uint8))
    assert bool(got.isfinite().all())
    tiny = torch.full((1, 512), 1e-38)  # subnormal, as is its scale
    back = unpack(pack(tiny, rope[:1]), torch.float32)[:, :512]
    torch.testing.assert_close(back, tiny, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_fault_stays_visible_and_within_its_group(fault: float) -> None:
    latent, rope = random_rows(3)
    clean = unpack(pack(latent, rope))
    latent[1, 200] = fault
    rope[2, 5] = fault
    got = unpack(pack(latent, rope))
    assert bool(got[1, 128:256].isnan().all())
    assert got[2, 517].isnan() if math.isnan(fault) else got[2, 517] == fault
    got[1, 128:256] = clean[1, 128:256]
    got[2, 517] = clean[2, 517]
    assert torch.equal(got, clean)


def test_slots_of_a_pool() -> None:
    """Unused slots are neither written nor read, and rows come back in the order of the slots."""
    latent, rope = random_rows(100)
    pool = torch.full((256, 656), POISON, dtype=torch.uint8)
    slots = torch.randperm(256)[:100]
    write_rows(pool, slots, latent, rope)
    assert torch.equal(pool[slots], pack(latent, rope))
    unused = torch.ones(256, dtype=torch.bool).index_fill(0, slots, False)
    assert bool((pool[unused] == POISON).all())
    assert bool(unpack(pool[unused]).isnan().all()), "the poison would show"
    order = torch.randperm(100).repeat(2)  # reading a slot twice is fine
    assert torch.equal(read_rows(pool, slots[order]), unpack(pack(latent, rope))[order])
    assert read_rows(pool, slots[:0]).shape == (0, 576)
    for slot in (-1, 256):
        with pytest.raises(IndexError):
            read_rows(pool, torch.tensor([slot]))
        with pytest.raises(IndexError):
            write_rows(pool, torch.tensor([slot]), latent[:1], rope[:1])


def test_a_page_that_is_copied_is_the_same_page() -> None:
    """Pages move as bytes: page 3 to page 1, and to a host buffer and back."""
    latent, rope = random_rows(64)
    pool = torch.full((4 * 64, 656), POISON, dtype=torch.uint8)
    pages = pool.view(4, 64 * 656)
    write_rows(pool, torch.arange(192, 256), latent, rope)
    pages[1] = pages[3]
    pages[0] = torch.frombuffer(bytearray(pages[1].numpy().tobytes()), dtype=torch.uint8)
    for page in (0, 1):
        assert torch.equal(pages[page], pages[3])
        assert torch.equal(pool[page * 64 : (page + 1) * 64], pack(latent, rope))
    assert bool((pages[2] == POISON).all())


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_may_lie_anywhere(offset: int, tokens: int) -> None:
    """Odd offsets and odd strides, where no FP32 can be viewed."""
    latent, rope = random_rows(tokens)
    pool = torch.full((tokens, 661), POISON, dtype=torch.uint8)[:, offset : offset + 656]
    write_rows(pool, torch.arange(tokens), latent, rope)
    assert torch.equal(unpack(pool), unpack(pack(latent, rope)))
    assert torch.equal(read_rows(pool, torch.arange(tokens)), unpack(pool))
    flat = torch.empty(offset + tokens * 656, dtype=torch.uint8)[offset:].view(tokens, 656)
    flat.copy_(pool)
    assert torch.equal(unpack(flat), unpack(pool))


def test_inputs_may_be_strided_and_are_not_modified() -> None:
    latent, rope = random_rows(20)
    both = torch.stack([torch.cat([latent, rope], dim=1).float()] * 2, dim=2)  # [N, 576, 2]
    copy = both.clone()
    assert torch.equal(pack(both[:, :512, 1], both[:, 512:, 0]), pack(latent, rope))
    assert torch.equal(both, copy)


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("whole groups of 128", lambda: PackedRow(500, 64)),
    ("whole groups of 128", lambda: pack(torch.zeros(2, 64), torch.zeros(2, 64))),
    ("not pairs", lambda: PackedRow(512, 63)),
    ("not one row each", lambda: pack(torch.zeros(2, 512), torch.zeros(3, 64))),
    ("not one row each", lambda: pack(torch.zeros(2, 1, 512), torch.zeros(2, 64))),
    (r"uint8 \[N, 656\]", lambda: unpack(torch.zeros(2, 576))),
    (r"uint8 \[N, 656\]", lambda: unpack(torch.zeros(2, 655, dtype=torch.uint8))),
    (r"uint8 \[N, 656\]", lambda: read_rows(torch.zeros(2, 1, 656).byte(), torch.tensor([0]))),
]


@pytest.mark.parametrize(("message", "misuse"), REFUSED)
def test_misuse_is_refused(message: str, misuse: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        misuse()


def upstream(path: str) -> Path:
    """A file of the installed SGLang, found without importing it (10 s)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed: nothing to compare with")
    file = Path(spec.origin).parent / path
    if not file.exists():
        pytest.skip(f"this SGLang has no {path}")
    return file


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sglang_writes_the_same_bytes() -> None:
    """Its PyTorch reference, given float32: with BF16 it rounds its scales to BF16, as its kernel
    does not."""
    reference = load(upstream("test/kernels/dsa_k_cache_reference.py"))
    latent, rope = random_rows(256)
    ours = pack(latent, rope)
    theirs = reference._quantize_k_cache_ref(latent.float().view(4, 64, 1, 512))
    assert torch.equal(theirs.view(torch.uint8).view(256, 528), ours[:, :528])
    whole = reference._quantize_k_cache_ref(torch.cat([latent, rope], dim=1).view(4, 64, 1, 576))
    assert torch.equal(whole.view(torch.uint8).view(256, 656)[:, 528:], ours[:, 528:])


READ_BY_SGLANG = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from dequant_k_cache import dequantize_k_cache
rows = torch.load(sys.argv[2])
got = dequantize_k_cache(rows.view(torch.float8_e4m3fn).view(1, len(rows), 1, 656))
torch.save(got.view(len(rows), 576), sys.argv[2])
"""


def test_sglang_reads_the_same_values(tmp_path: Path) -> None:
    """Its Triton kernel in Triton's interpreter, which must be asked for before the import.

    The interpreter drops the last 16 bits for BF16 where a GPU rounds (and it misrounds E4M3, so
    that SGLang's other kernel can not be checked like this).
    """
    folder = upstream("kernels/ops/attention/dsa/dequant_k_cache.py").parent
    latent, rope = random_rows(64)
    latent[3, :128] = 0.0
    rows, file = pack(latent, rope), tmp_path / "rows.pt"
    torch.save(rows, file)
    command = [sys.executable, "-c", READ_BY_SGLANG, str(folder), str(file)]
    subprocess.run(command, check=True, env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    exact = unpack(rows, torch.float32)
    truncated = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    assert torch.equal(torch.load(file).float(), truncated)
