"""A needle among many latents: one key that matters, at every depth, in each dtype of the cache.

    .venv/bin/python -m benchmarks.needle [--device cuda] [--quick] [--json]

One decoded token reads an MLA cache whose keys are noise, apart from a needle that holds about half of
the probability, where an error of its score moves the most. The needle is planted at one depth
after the other and read plainly (one run of keys) and split (16 runs, merged by their log-sum-exp).

The needle's probability is read off the *output*: it alone has a value in one latent channel, the
marker, of which queries see nothing. So what is measured is what attention did, not what it would
have to do. The truth is float64 over float32 rows, softmax and all in one piece.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor

from tessera_sglang.attention.kernels.torch_kernel import TorchKernel
from tessera_sglang.attention.merge import merge
from tessera_sglang.attention.packed_rows import MLA_ROW, read_rows, write_rows

from .report import Check, Report, Table, argument_parser, progress

LATENT, ROPE = MLA_ROW.latent, MLA_ROW.rope
PAGE = 64  # tokens; pages of the pool are shuffled
MARKER = 0  # latent channel
SCALE = 192**-0.5  # DeepSeek: nope 128 + rope 64
CHUNK = 8192  # tokens converted at a time


class Attend(Protocol):
    """Full attention of ``q [T, H, D]`` to ``slots [S]`` of a pool: ``TorchKernel.attend`` or alike."""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """``out [T, H, Dv]`` and natural-log ``lse [T, H]``, float32."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a dtype may cost at any depth, split or not."""

    mass: float  # absolute error of the needle's probability
    output: float  # norm of the output's error over the norm of the output
    cosine: float  # how far the output's cosine may be below 1
    lse: float  # absolute


# Twice and more the worst of 20 depths × 4 heads at 131,072 keys, which was, in the same order,
# bf16 0.0014, 0.0032, 1.5e-6, 0.0027 and fp8-packed 0.019, 0.044, 3.6e-4, 0.037; split 1.8e-6.
BOUNDS = {
    "bf16": Bounds(mass=5e-3, output=1e-2, cosine=1e-5, lse=1e-2),
    "fp8-packed": Bounds(mass=5e-2, output=1e-1, cosine=2e-3, lse=1e-1),
}
SPLIT_BOUND = 1e-5  # plain against split, absolute-or-relative: the same sum in another order


@dataclass(frozen=True, slots=True)
class Finding:
    """One needle, one dtype, one way to read; errors are the worst over the heads."""

    dtype: str  # "bf16" or "fp8-packed"
    runs: int  # of keys: 1 = plain
    depth: int  # of the needle, in tokens
    mass: float  # true probability of the needle, the least over the heads
    mass_error: float
    output_error: float
    cosine: float  # below 1
    lse_error: float
    from_plain: float  # largest |difference| / (1 + |plain|) to the plain reading; 0 = is plain

    def within(self, bounds: Bounds) -> bool:
        """Whether every error is, and reading in runs changed nothing; NaN never is."""
        return (
            self.mass_error <= bounds.mass
            and self.output_error <= bounds.output
            and self.cosine <= bounds.cosine
            and self.lse_error <= bounds.lse
            and self.from_plain <= SPLIT_BOUND
        )


@dataclass(frozen=True, slots=True)
class Needle:
    """A key that holds about half of the probability, and the query that looks for it."""

    row: Tensor  # [576] float32: latent | rope
    q: Tensor  # [1, H, 576] float32, absorbed

    @classmethod
    def random(cls, keys: int, heads: int, device: torch.device, seed: int) -> Needle:
        """A needle for ``keys`` rows of `haystack`: its score is about the lse of all the others.

        ``seed`` is not 0, which is the haystack's.
        """
        generator = torch.Generator(device).manual_seed(seed)
        row = torch.randn(LATENT + ROPE, generator=generator, device=device)
        q = torch.randn(1, heads, LATENT + ROPE, generator=generator, device=device)
        row[MARKER], q[..., MARKER] = 0.0, 0.0
        q /= SCALE * q.norm(dim=-1, keepdim=True)  # scores of N(0, 1)
        square = float(row.square().sum())
        score = math.log(keys) + 0.5  # lse of as many N(0, 1)
        for _ in range(8):  # pointing the queries at the needle widens the others' scores
            score = math.log(keys) + 0.5 * (1.0 + score**2 / square)
        q += (score / SCALE - (q @ row)[..., None]) * row / square
        row[MARKER] = 4.0  # as large as noise gets: it does not set the FP8 scale by itself
        return cls(row, q)


def haystack(keys: int, device: torch.device) -> Tensor:
    """Rows ``[keys, 576]`` float32 of normal noise that hold nothing in the marker."""
    generator = torch.Generator(device).manual_seed(0)  # no needle's: that would be in there
    rows = torch.randn(keys, LATENT + ROPE, generator=generator, device=device)
    rows[:, MARKER] = 0.0
    return rows


def depths(keys: int, count: int = 20, runs: int = 16) -> list[int]:
    """Both ends, both sides of the middle of a page and of a run, and evenly in between."""
    run = keys // runs
    edges = {0, PAGE - 1, PAGE, run - 1, run, keys - run - 1, keys - run, keys - 1}
    rest = count - len(edges)
    return sorted(edges | {(2 * i + 1) * keys // (2 * rest) for i in range(rest)})


def truth(rows: Tensor, needle: Needle, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mass [H], output [H, 512] and lse [H], float64, of the rows with the needle at ``depth``."""
    q = needle.q[0].double()  # [H, D]

    def chunk(at: int) -> Tensor:
        some = rows[at : at + CHUNK].double()
        if at <= depth < at + CHUNK:
            some[depth - at] = needle.row.double()
        return some

    starts = range(0, len(rows), CHUNK)
    scores = torch.cat([q @ chunk(at).T for at in starts], dim=1) * SCALE  # [H, S]
    lse = scores.logsumexp(1)
    p = (scores - lse[:, None]).exp()
    out = torch.zeros(len(q), LATENT, dtype=torch.float64, device=q.device)
    for at in starts:
        out += p[:, at : at + CHUNK] @ chunk(at)[:, :LATENT]
    return p[:, depth], out, lse


class Pool:
    """The context in one dtype, pages shuffled, every slot that is not its own poisoned."""

    def __init__(self, rows: Tensor, dtype: str, seed: int = 1) -> None:
        keys, device = len(rows), rows.device
        if keys % PAGE:
            raise ValueError(f"{keys} keys are not whole pages of {PAGE}")
        self.packed = dtype == "fp8-packed"
        order = torch.randperm(keys // PAGE + 1, generator=torch.Generator().manual_seed(seed))
        first = order[: keys // PAGE, None] * PAGE  # one page stays unused
        self.slots = (first + torch.arange(PAGE)).flatten().to(device)  # [S]
        width = MLA_ROW.row_bytes if self.packed else 2 * (LATENT + ROPE)
        self.bytes = torch.full((keys + PAGE, width), 0xFF, dtype=torch.uint8, device=device)
        for at in range(0, keys, CHUNK):
            self.write(self.slots[at : at + CHUNK], rows[at : at + CHUNK])

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store float32 rows ``[N, 576]``."""
        if self.packed:
            write_rows(self.bytes, slots, rows[:, :LATENT], rows[:, LATENT:])
        else:
            self.bytes.view(torch.bfloat16)[slots] = rows.bfloat16()

    def run(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """A buffer [num_slots, 1, 576] bfloat16 and the slots of keys [begin, end) in it."""
        slots = self.slots[begin:end]
        if not self.packed:
            return self.bytes.view(torch.bfloat16)[:, None], slots
        starts = range(0, len(slots), CHUNK)
        unpacked = torch.cat([read_rows(self.bytes, slots[at : at + CHUNK]) for at in starts])
        return unpacked[:, None], torch.arange(len(slots), device=slots.device)

    def marker(self, depth: int) -> float:
        """The needle's marker as it is stored."""
        buffer, slots = self.run(depth, depth + 1)
        return float(buffer[slots[0], 0, MARKER])


def read(attend: Attend, q: Tensor, pool: Pool, runs: int) -> tuple[Tensor, Tensor]:
    """Output [1, H, 512] and lse [1, H] over the pool's keys in ``runs`` parts."""
    keys, parts = len(pool.slots), []
    for n in range(runs):
        buffer, slots = pool.run(n * keys // runs, (n + 1) * keys // runs)
        parts.append(attend(q, buffer, buffer[..., :LATENT], slots, SCALE))
    if runs == 1:
        return parts[0]
    return merge([out for out, _ in parts], [lse for _, lse in parts])


def measure(
    attend: Attend, rows: Tensor, heads: int, at: Iterable[int], *, runs: int = 16
) -> Iterator[Finding]:
    """Findings of ``attend`` for a needle at each of the depths ``at``, plain and in ``runs``.

    ``rows [S, 576]`` float32 are a `haystack`, S whole pages. Each depth has a needle of its own.
    """
    pools = {dtype: Pool(rows, dtype) for dtype in BOUNDS}
    for depth in at:
        needle = Needle.random(len(rows), heads, rows.device, seed=1 + depth)
        true_mass, true_out, true_lse = truth(rows, needle, depth)
        for dtype, pool in pools.items():
            slot = pool.slots[depth : depth + 1]
            kept = pool.bytes[slot]
            pool.write(slot, needle.row[None])
            marker = pool.marker(depth)
            plain: Tensor | None = None  # [H, 512]
            for way in (1, runs):
                found, lse = read(attend, needle.q, pool, way)
                out = found[0].double()
                plain = out if plain is None else plain
                norm = true_out.norm(dim=1)
                yield Finding(
                    dtype=dtype,
                    runs=way,
                    depth=depth,
                    mass=float(true_mass.min()),
                    mass_error=float((out[:, MARKER] / marker - true_mass).abs().max()),
                    output_error=float(((out - true_out).norm(dim=1) / norm).max()),
                    cosine=float((1 - torch.cosine_similarity(out, true_out, dim=1)).max()),
                    lse_error=float((lse[0].double() - true_lse).abs().max()),
                    from_plain=float(((out - plain).abs() / (1 + plain.abs())).max()),
                )
            pool.bytes[slot] = kept


def report(findings: list[Finding], settings: dict[str, object]) -> Report:
    """Worst case of each dtype and way over the depths, against `BOUNDS`."""
    result = Report("needle", settings, figures={"findings": [asdict(f) for f in findings]})
    result.notes.append(
        "The truth is float64 over float32 rows: errors are those of the dtype too."
    )
    result.figures["least_mass"] = min(f.mass for f in findings)
    rows = []
    for dtype, bounds in BOUNDS.items():
        for runs in sorted({f.runs for f in findings}):
            some = [f for f in findings if (f.dtype, f.runs) == (dtype, runs)]
            worst = {
                "mass_error": (max(f.mass_error for f in some), bounds.mass),
                "output_error": (max(f.output_error for f in some), bounds.output),
                "cosine": (max(f.cosine for f in some), bounds.cosine),
                "lse_error": (max(f.lse_error for f in some), bounds.lse),
                "from_plain": (max(f.from_plain for f in some), SPLIT_BOUND),
            }
            for name, (value, bound) in worst.items():
                result.checks.append(Check.at_most(f"{dtype}, {runs} runs: {name}", value, bound))
            rows.append((dtype, runs, *(f"{value:.2g}" for value, _ in worst.values())))
    columns = ("dtype", "runs", "mass", "output", "1 - cosine", "lse", "from plain")
    result.tables.append(Table("worst error over heads and depths", columns, rows))
    return result


def main(arguments: list[str] | None = None) -> int:
    """Measure the PyTorch kernel; returns the exit status."""
    parser = argument_parser("a needle among many latents, by depth and dtype of the cache")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--keys", type=int, default=131_072, help="length of the context, tokens")
    parser.add_argument("--heads", type=int, default=4, help="query heads")
    options = parser.parse_args(arguments)
    keys = 8192 if options.quick else options.keys
    kernel = TorchKernel()

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        return kernel.attend(q, keys, values, slots, scale=scale, causal_from=None)

    rows = haystack(keys, torch.device(options.device))
    findings = []
    for finding in measure(attend, rows, options.heads, depths(keys)):
        progress(f"{finding.dtype}, {finding.runs} runs, depth {finding.depth:,}")
        findings.append(finding)
    settings = {"keys": keys, "heads": options.heads, "device": options.device}
    return report(findings, settings).emit(as_json=options.json, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
