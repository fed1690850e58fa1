"""Throughput, latency, memory and growth of the content index against stock SGLang's tree."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.report import Check, Report, Table, argument_parser, progress
from benchmarks.workloads.traces import VARIABLE

from . import forks, growth, memory
from .sides import OURS, PAGE_SIZE, Side, available_cores, build_side
from .timing import Rounds, prompts_scenario, run_rounds, trace_scenario
from .workloads import Prompts, Sizes, Trace, load_trace, make_prompts

CHECKED = ("a.", "b.", "e.")
LONGEST_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured."""

    sizes: Sizes = field(default_factory=Sizes)
    rounds: int = 9
    repeats: int = 8  # look-ups of each long sequence and span in a round
    memory_tokens: int = 4_000_000
    growth_levels: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    growth_repetitions: int = 40


QUICK = Settings(
    sizes=Sizes(long_count=8, shared_count=200, span_count=16),
    rounds=3,
    repeats=4,
    memory_tokens=2_000_000,
    growth_levels=(100_000, 1_000_000),
    growth_repetitions=10,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0 if all checks hold."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--traces",
        type=Path,
        default=Path(os.environ.get(VARIABLE, "../shared/data/agent-traces")),
        help="folder of recorded sessions (*.jsonl); a synthetic trace is used where it has none",
    )
    options = parser.parse_args(arguments)
    report = measure(QUICK if options.quick else Settings(), load_trace(options.traces))
    return report.emit(as_json=options.json, save=options.save)


def measure(settings: Settings, trace: Trace) -> Report:
    """Everything, as a report."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the imports; what the sides hold is looked through as it is in a server
    try:
        return _measure(settings, trace)
    finally:
        gc.unfreeze()


def _measure(settings: Settings, trace: Trace) -> Report:
    cores = available_cores()
    stock = [name for name, missing in cores.items() if missing is None]
    names = (OURS, *stock)
    prompts = make_prompts(settings.sizes)
    report = Report("index", settings={**asdict(settings), "page_size": PAGE_SIZE})
    report.figures["trace_source"] = trace.source
    report.figures["stock_cores"] = {name: missing or "compared" for name, missing in cores.items()}
    report.notes += _notes(cores)

    _add_memory(report, names, settings.memory_tokens)  # first: it forks this process while small
    sides = [_side(name, 2 * prompts.total_tokens, prompts.longest) for name in names]
    _add_prompts(report, sides, prompts, settings)
    sides = [
        _side(name, 2 * (trace.prompt_tokens + trace.output_tokens), trace.longest)
        for name in names
    ]
    _add_trace(report, sides, trace, settings)
    _add_forks(report, trace)
    room = settings.growth_levels[-1] + (1 << 16)
    _add_growth(report, [_side(name, room, growth.SEQUENCE_TOKENS) for name in names], settings)
    return report


def _side(name: str, capacity_tokens: int, row_tokens: int) -> Side:
    return build_side(
        name,
        capacity_tokens=capacity_tokens,
        row_tokens=row_tokens,
        clock=time.process_time_ns,
    )


def _notes(cores: dict[str, str | None]) -> list[str]:
    notes = [
        "a: long sequences. b: requests that share a prefix; match is on arrival, match_again in the "
        "next turn. c: spans. d: publication of a, b and c. e: a recorded trace of agents, or a "
        "synthetic one where --traces names no folder of *.jsonl. Memory is that of the index, not of "
        "KV: own for sequences without a common prefix, branches for many off one.",
        "Times are processor time of the process: what else runs on the machine does not count. They "
        "are medians over rounds in which the sides take turns; a ratio compares sides in a round.",
        "Match is match_prefix up to the prompt's last token; +slots adds path_device_indices. Insert "
        "is checkpoint, with all that it frees, repoints and locks. Ours looks for forks meanwhile.",
        "Stock finds a span's tokens only as a prompt of their own (c.match): a reader that holds them "
        "at an offset (c.readers) gets nothing from it.",
    ]
    notes += [f"Stock's {name} core does not load: {why}" for name, why in cores.items() if why]
    return notes


def _add_memory(report: Report, names: Sequence[str], tokens: int) -> None:
    progress("memory per cached token")
    found = {
        shape: {
            name: memory.bytes_per_token(
                lambda capacity, row, name=name: _side(name, capacity, row),  # type: ignore[misc]
                shape,
                tokens,
            )
            for name in names
        }
        for shape in memory.SHAPES
    }
    by_state = {
        f"{shape}, {state}": {name: float(getattr(side, state)) for name, side in sides.items()}
        for shape, sides in found.items()
        for state in ("inserted", "looked_up")
    }
    report.figures["memory"] = {
        "method": memory.METHOD,
        "tokens": tokens,
        "bytes_per_token": by_state,
    }
    report.tables.append(
        Table(
            "Bytes per cached token",
            ("shape", *names),
            [(shape, *sides.values()) for shape, sides in by_state.items()],
        )
    )
    for shape, bytes_of in by_state.items():
        for core in names[1:]:
            name = f"memory.{shape}: bytes per token, ours / {core}"
            report.checks.append(Check.at_most(name, bytes_of[OURS] / bytes_of[core], 1.0))


def _add_prompts(
    report: Report, sides: Sequence[Side], prompts: Prompts, settings: Settings
) -> None:
    progress("workloads a to d")
    rounds = run_rounds(sides, settings.rounds, prompts_scenario(prompts, settings.repeats))
    _add_rounds(report, sides, rounds, "Workloads a to d")
    spans = sum(len(tokens) - settings.sizes.root_tokens for tokens in prompts.bodies)
    found = {side.name: sum(rounds.hits(side.name)["c.readers"]) for side in sides}
    ours = sum(hit - settings.sizes.root_tokens for hit in _bodies(rounds, prompts))
    report.figures["spans"] = {
        "span_tokens": spans,
        "found_by_prompt": found,
        "found_as_spans": ours,
    }
    report.tables.append(
        Table(
            f"Tokens found of {len(prompts.readers)} spans at random offsets ({spans:,} in all)",
            ("by", *(side.name for side in sides)),
            [
                ("the reader's prompt", *found.values()),
                ("the span's own chain [root | body]", ours, *(None for _ in sides[1:])),
            ],
        )
    )
    report.checks.append(Check.equals("c.spans: tokens found at random offsets", ours, spans))


def _bodies(rounds: Rounds, prompts: Prompts) -> list[int]:
    """Tokens found of each [root | body] that is looked up."""
    return rounds.hits(OURS)["c.match"][: len(prompts.bodies)]


def _add_trace(report: Report, sides: Sequence[Side], trace: Trace, settings: Settings) -> None:
    progress("workload e")
    rounds = run_rounds(sides, settings.rounds, trace_scenario(trace))
    report.figures["trace"] = {
        "requests": len(trace.requests),
        "skipped_without_prompt": trace.skipped,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
    }
    _add_rounds(
        report, sides, rounds, f"Workload e: {len(trace.requests)} requests, {trace.source}"
    )


def _add_rounds(report: Report, sides: Sequence[Side], rounds: Rounds, title: str) -> None:
    stock = [side.name for side in sides[1:]]
    rows = []
    for operation in rounds.operations:
        summaries = {side.name: rounds.summary(side.name, operation) for side in sides}
        throughput = {core: rounds.throughput_ratio(core, operation) for core in stock}
        p99 = {core: rounds.p99_ratio(core, operation) for core in stock}
        report.figures[operation] = {
            "sides": summaries,
            "throughput_ratio": throughput,
            "p99_ratio": p99,
        }
        for name, summary in summaries.items():
            rows.append(
                (
                    operation,
                    name,
                    summary["tokens_per_s"] / 1e6,
                    summary["p50_us"],
                    summary["p99_us"],
                    throughput.get(name),
                    p99.get(name),
                )
            )
        if operation.startswith(CHECKED):
            for core in stock:
                report.checks += [
                    Check.at_least(
                        f"{operation}: throughput, ours / {core}", throughput[core], 1.0
                    ),
                    Check.at_least(f"{operation}: p99 latency, {core} / ours", p99[core], 1.0),
                ]
    columns = ("operation", "side", "M tokens/s", "p50 µs", "p99 µs", "ours / it", "its p99 / ours")
    report.tables.append(Table(title, columns, rows))
    ours = rounds.hits(OURS)
    for workload in ours:
        for core in stock:
            differ = sum(
                one != other
                for one, other in zip(ours[workload], rounds.hits(core)[workload], strict=True)
            )
            name = f"{workload}: look-ups with another hit length than {core}"
            report.checks.append(Check.equals(name, differ, 0))


def _add_forks(report: Report, trace: Trace) -> None:
    progress("partial-page forks")
    without = forks.replay(trace, None)
    with_forks = forks.replay(trace, forks.SMALLEST_FORK)
    saved = without.recomputed_share - with_forks.recomputed_share
    report.figures["forks"] = {
        "smallest_fork": forks.SMALLEST_FORK,
        "recomputed_share_without": without.recomputed_share,
        "recomputed_share_with": with_forks.recomputed_share,
        "share_saved": saved,
        "without": asdict(without),
        "with": asdict(with_forks),
    }
    report.tables.append(
        Table(
            "Prompt tokens recomputed over the trace",
            ("", "share", "tokens", "forks", "rows copied"),
            [
                (
                    label,
                    f"{r.recomputed_share:.2%}",
                    r.prompt_tokens - r.page_tokens - r.fork_rows,
                    r.forks,
                    r.fork_rows,
                )
                for label, r in (("whole pages only", without), ("with forks", with_forks))
            ],
        )
    )
    report.checks += [
        Check.below(
            "forks: share recomputed, with / without",
            with_forks.recomputed_share / without.recomputed_share,
            1.0,
        ),
        Check.equals(
            "forks: copied rows with other tokens than the prompt's", with_forks.wrong_rows, 0
        ),
    ]


def _add_growth(report: Report, sides: Sequence[Side], settings: Settings) -> None:
    progress("growth")
    found = growth.measure_growth(sides, settings.growth_levels, settings.growth_repetitions)
    costs = ("match_ns", "match_again_ns", "insert_ns")
    ratios = {
        name: {cost: growth.ratio(levels, cost) for cost in costs} for name, levels in found.items()
    }
    report.figures["growth"] = {
        "sequence_tokens": growth.SEQUENCE_TOKENS,
        "sample_sequences": growth.SAMPLE,
        "levels": {name: [asdict(level) for level in levels] for name, levels in found.items()},
        "highest_by_lowest": ratios,
    }
    report.tables.append(
        Table(
            "Nanoseconds a token by the size of the index",
            ("side", "indexed tokens", "match", "match again", "insert"),
            [
                (name, level.tokens, level.match_ns, level.match_again_ns, level.insert_ns)
                for name, levels in found.items()
                for level in levels
            ],
        )
    )
    span = f"{settings.growth_levels[-1]:.0e} by {settings.growth_levels[0]:.0e} tokens"
    for cost in costs:
        report.checks.append(
            Check.at_most(f"growth.{cost}: of a token, {span}", ratios[OURS][cost], LONGEST_GROWTH)
        )
