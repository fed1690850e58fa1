"""Attention on this CPU: against PyTorch's own, with spans and without, shared, and its planning."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from benchmarks.report import Report, argument_parser

from . import planning, sdpa, spans
from .results import Lines
from .sdpa import Case
from .spans import Reading
from .timing import Turns
from .world import Request, llama, mla

DTYPES = (torch.float32, torch.bfloat16)
HEADS = 16  # of MLA, as on one of eight ranks of DeepSeek-V3 and in V2-Lite


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the project promises."""

    of_sdpa: float = 0.9  # throughput, at least
    spans_by_flat: float = 1.15  # time, at most
    shared_gain: float = 2.0  # throughput, at least
    planning: float = 0.05  # of a forward pass, below


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured; the defaults are the sizes that the project states."""

    prefill_tokens: int = 4096
    decode_requests: int = 16
    decode_keys: int = 8192
    reading: tuple[Reading, ...] = (
        Reading("prefill 1k behind 4 x 1k", 1, new=1024, cached=1024, spans=4, span_tokens=1024),
        Reading("decode 8 x 8k, 4 spans", 8, new=1, cached=1023, spans=4, span_tokens=1792),
    )
    readers: int = 16
    shared_tokens: int = 8192
    own_tokens: int = 64
    planned: planning.Sizes = field(default_factory=lambda: planning.Sizes(64, 8, 256, 256))
    rounds: int = 5
    short_rounds: int = 15  # of what takes a fraction of a second
    threads: int = 1
    quick: bool = False
    bounds: Bounds = field(default_factory=Bounds)

    def turns(self, *, short: bool) -> Turns:
        """How calls are timed; short ones more often."""
        clock = time.process_time if self.threads == 1 else time.perf_counter
        return Turns(self.short_rounds if short else self.rounds, clock)


# Contexts as long, which the promises depend on, for fewer requests and new tokens.
QUICK = Settings(
    quick=True,
    prefill_tokens=768,
    decode_requests=1,
    reading=(
        Reading("prefill 128 behind 4 x 1k", 1, new=128, cached=1024, spans=4, span_tokens=1024),
        Reading("decode 2 x 8k, 4 spans", 2, new=1, cached=1023, spans=4, span_tokens=1792),
    ),
    planned=planning.Sizes(64, 8, 64, 128),
    rounds=3,
    short_rounds=3,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0 if all checks hold."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="of PyTorch; with 1, times are processor time, so that a busy machine does not count",
    )
    options = parser.parse_args(arguments)
    settings = replace(QUICK if options.quick else Settings(), threads=options.threads)
    return measure(settings).emit(as_json=options.json, save=options.save)


@torch.no_grad()
def measure(settings: Settings) -> Report:
    """Everything, as a report."""
    torch.set_num_threads(settings.threads)
    clock = "processor" if settings.threads == 1 else "wall"
    report = Report("attention", {**asdict(settings), "clock": clock})
    report.notes += _NOTES
    if settings.quick:
        report.notes.append("Quick sizes: less work to spread planning and merging over.")
    _add_sdpa(report, settings)
    _add_spans(report, settings)
    planning.measure(report, settings.planned, settings.turns(short=True), settings.bounds.planning)
    return report


def _add_sdpa(report: Report, settings: Settings) -> None:
    prefill = Request(settings.prefill_tokens, settings.prefill_tokens)
    decode = Request(settings.decode_keys)
    cases = (
        Case(f"prefill {settings.prefill_tokens}", (prefill,)),
        Case(
            f"decode {settings.decode_requests} x {settings.decode_keys}",
            (decode,) * settings.decode_requests,
        ),
    )
    lines = Lines("(a) one layer, a plain batch", "ours / it")
    for case in cases:
        for dtype in DTYPES:
            for shape in (llama(dtype), mla(HEADS, dtype)):
                turns = settings.turns(short=False)
                sdpa.measure(report, lines, case, shape, turns, settings.bounds.of_sdpa)
    report.tables.append(lines.table())


def _add_spans(report: Report, settings: Settings) -> None:
    lines = Lines("(b) one layer, with spans and without", "spans / flat")
    for case in settings.reading:
        for shape in (llama(torch.bfloat16), *(mla(HEADS, dtype) for dtype in DTYPES)):
            turns = settings.turns(short=case.new == 1)
            spans.measure_reading(report, lines, case, shape, turns, settings.bounds.spans_by_flat)
    report.tables.append(lines.table())
    lines = Lines("(c) one layer, decode over one span", "shared gains")
    for dtype in DTYPES:
        spans.measure_shared(
            report,
            lines,
            mla(HEADS, dtype),
            readers=settings.readers,
            span_tokens=settings.shared_tokens,
            own_tokens=settings.own_tokens,
            turns=settings.turns(short=True),
            bound=settings.bounds.shared_gain,
        )
    report.tables.append(lines.table())


_NOTES = (
    "Every way has the same number of threads. With more than one, times are wall time; with one, "
    "processor time. A time is the median of its rounds, in which the ways take turns; a ratio "
    "compares ways inside a round.",
    "a, b, c: a call of ours is a forward pass of one layer: plan, look-up of slots, rows gathered from "
    "a paged pool, merge. In a server the first two are paid once for all layers. SDPA gets "
    "contiguous tensors. Checked is the fastest SDPA call of the same shape; 'heads as rows', a "
    "KV head's query heads as query rows, is not of the same shape and is reported only.",
    "b: all new tokens see all spans, so both sides have as many pairs of query and key to score.",
    "d: a forward pass is its attention alone, one layer times the layers of DeepSeek-V2-Lite: less "
    "than a server's, so planning's share is overstated.",
)
