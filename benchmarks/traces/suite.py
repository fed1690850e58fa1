"""Recorded sessions and SGLang's own data sets, on both sides."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import models
from benchmarks.report import Report, argument_parser, progress
from benchmarks.serving import servers
from benchmarks.serving.progress import bar
from benchmarks.workloads.jsonl import tokenizer
from benchmarks.workloads.traces import (
    POLICIES,
    VARIABLE,
    Options,
    Session,
    folder_of,
    replayed,
)
from benchmarks.workloads.traces import sessions as sessions_in

from . import sessions, sglang_sets

POOL_TOKENS = 65_536
ROUNDS, SET_ROUNDS = 2, 2
DEFAULT = Options()
QUICK_SESSIONS = 2  # the shortest
_NO_SESSIONS = (
    f"no recorded sessions: give --traces DIR or {VARIABLE}, a folder of *.jsonl; skipped"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, how often. ``link_pages`` None: the server's default."""

    spans: Options
    link_pages: int | None
    rounds: int
    set_rounds: int
    quick: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 0 if all checks hold, and where there is nothing to measure."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--traces", type=Path, help=f"folder of sessions; else {VARIABLE}")
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT.policy, help="what is a span")
    parser.add_argument("--least-tokens", type=int, default=DEFAULT.least_tokens, help="of a span")
    parser.add_argument(
        "--link-pages", type=int, help="of Tessera's server, instead of its default"
    )
    parser.add_argument("--rounds", type=int, help="passes of each side")
    parser.add_argument(
        "--agentic-trace", type=Path, help="a file of that data set instead of one made of sessions"
    )
    options = parser.parse_args(arguments)
    folder = folder_of(options.traces)
    if folder is None:
        progress(_NO_SESSIONS)
        return 0
    recorded = sessions_in(folder)
    if options.quick:
        recorded = sorted(recorded, key=_characters)[:QUICK_SESSIONS]
    spans = Options(options.policy, options.least_tokens)
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    try:
        model = models.ready("trace")
    except models.ModelError as error:
        progress(f"{error}; skipped")
        return 0
    plan = Plan(
        spans, options.link_pages, rounds, 1 if options.quick else SET_ROUNDS, options.quick
    )
    report = measure(model, recorded, plan, options.agentic_trace)
    return report.emit(as_json=options.json, save=options.save)


def measure(
    model: Path,
    recorded: Sequence[Session],
    plan: Plan,
    agentic: Path | None,
) -> Report:
    """Everything, as a report. ``agentic`` is a file of that data set, instead of the sessions."""
    encode, _ = tokenizer(model)
    requests = {one.name: replayed(one, encode, plan.spans) for one in recorded}
    steps = 2 * (plan.rounds * sum(map(len, requests.values())) + 2 * plan.set_rounds)
    report = Report("traces", settings=asdict(plan))
    report.notes += _NOTES
    with (
        tempfile.TemporaryDirectory(prefix="tessera-bench-") as scratch,
        servers.both(model, POOL_TOKENS, ("--enable-cache-report",)) as urls,
        bar(steps, "request") as moving,
    ):
        outcomes = [
            sessions.measure(urls, *one, plan.rounds, moving, link_pages=plan.link_pages)
            for one in requests.items()
        ]
        file = agentic or sglang_sets.write_agentic(recorded, Path(scratch) / "agentic.json")
        sets = sglang_sets.measure(urls, model, file, plan.set_rounds, moving, quick=plan.quick)
    sessions.add(report, outcomes)
    sglang_sets.add(report, sets)
    return report


def _characters(session: Session) -> int:
    return sum(len(call.prompt) for call in session.calls)


_NOTES = (
    "Prompts of a session are sent one after the other, in their recorded order, as token ids that are "
    "the same on both sides. Answers are not those recorded: the KV of an answer is never found again "
    "here, on either side, where a real session would find it in its next turn.",
    "shifted: tokens of messages of a page or more that were sent before in the session and stand "
    "outside what the prompt shares with any earlier one. cached: of the prompts' tokens. computed: as "
    "the engine counts, so a span's pages that are computed on their own and in place count twice.",
)
