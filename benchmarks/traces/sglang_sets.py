"""Two of SGLang's own data sets on both sides. Nobody declares spans in them: nothing is to be gained.

``generated-shared-prefix`` needs no file. ``agentic-trace`` reads conversations, each a list of turns
with the messages that are new in it, and feeds the server's own answers back; SGLang ships no such file.
The one used here is made of recorded sessions: a conversation is a run of prompts that each begin with
the messages of the one before.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report, Table
from benchmarks.serving.servers import SIDES, Urls
from benchmarks.workloads.traces import Session, messages
from tessera_sglang.bench.client import drive
from tessera_sglang.bench.metrics import Metrics
from tessera_sglang.bench.sides import STOCK, TESSERA

if TYPE_CHECKING:
    from tqdm import tqdm

SHARED_PREFIX, AGENTIC = "generated-shared-prefix", "agentic-trace"
OUTPUT_TOKENS = 16
Message = Mapping[str, str]
Measured = Mapping[str, Mapping[str, Sequence[Metrics]]]  # data set, side


def arguments(name: str, model: Path, *, file: Path, quick: bool) -> tuple[str, ...]:
    """Of SGLang's client for a data set."""
    common = ("--model", str(model), "--tokenizer", str(model), "--dataset-name", name)
    if name == SHARED_PREFIX:
        return (
            *(*common, "--backend", "sglang", "--max-concurrency", "8"),
            *("--gsp-num-groups", "4", "--gsp-prompts-per-group", "2" if quick else "8"),
            *("--gsp-system-prompt-len", "1024", "--gsp-question-len", "128"),
            *("--gsp-output-len", str(OUTPUT_TOKENS)),
        )
    return (
        *(*common, "--backend", "sglang-oai-chat", "--max-concurrency", "4"),
        *("--dataset-path", str(file), "--num-prompts", "2" if quick else "20"),
        *("--sharegpt-output-len", str(OUTPUT_TOKENS)),
    )


def measure(
    urls: Urls, model: Path, file: Path, rounds: int, bar: tqdm[Any], *, quick: bool
) -> Measured:
    """Rounds in turns, each on an empty cache; ``file`` is that of ``agentic-trace``."""
    found: dict[str, dict[str, list[Metrics]]] = {}
    for name in (SHARED_PREFIX, AGENTIC):
        found[name] = {side: [] for side in SIDES}
        command = arguments(name, model, file=file, quick=quick)
        for number in range(rounds):
            for side in SIDES if number % 2 else reversed(SIDES):
                bar.set_description(f"{name}, {side}")
                found[name][side].append(drive(urls[side], command, seed=number + 1))
                bar.update()
    return found


def add(report: Report, found: Measured) -> None:
    """Figures and the table. No throughput: the client counts no prompts of ``agentic-trace``."""
    rows: list[tuple[object, ...]] = []
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, sides in found.items():
        figures[name] = {side: _medians(metrics) for side, metrics in sides.items()}
        one = [figures[name][side] for side in (STOCK, TESSERA)]
        shares = (f"{side['cached_share']:.1%}" for side in one)
        walls = [side["wall_s"] for side in one]
        shown = (f"{wall:.2f}" for wall in walls)
        rows.append((name, int(one[0]["requests"]), *shares, *shown, walls[1] / walls[0]))
    report.figures["sglang_sets"] = figures
    heads = (f"{what}, {side}" for what in ("cached", "wall s") for side in SIDES)
    columns = ("data set", "requests", *heads, "wall, tessera / stock")
    report.tables.append(Table("SGLang's own data sets, without spans", columns, rows))


def _medians(rounds: Sequence[Metrics]) -> dict[str, float]:
    return {
        "requests": rounds[0].requests,
        "cached_share": statistics.median(one.cached_share or 0 for one in rounds),
        "wall_s": statistics.median(one.duration_s for one in rounds),
    }


def write_agentic(sessions: Sequence[Session], path: Path) -> Path:
    """Recorded sessions as a file of ``agentic-trace``."""
    conversations = [
        [{"messages": list(turn), "prompt_tokens": 0} for turn in conversation]
        for session in sessions
        for conversation in _conversations(session)
    ]
    path.write_text(json.dumps({"metadata": {}, "conversations": conversations}), "utf-8")
    return path


def _conversations(session: Session) -> list[list[tuple[Message, ...]]]:
    """Turns of at least two prompts that continue each other. Answers are the server's, so left out."""
    open_: list[tuple[list[Message], list[tuple[Message, ...]]]] = []
    for call in session.calls:
        said = _messages(call.prompt)
        longest = max(
            (one for one in open_ if said[: len(one[0])] == one[0] and len(said) > len(one[0])),
            key=lambda one: len(one[0]),
            default=None,
        )
        new = said[len(longest[0]) :] if longest else said
        asked = tuple(message for message in new if message["role"] != "assistant")
        if not asked:
            continue
        if longest is None:
            open_.append((said, [asked]))
        else:
            open_[open_.index(longest)] = (said, [*longest[1], asked])
    return [turns for _, turns in open_ if len(turns) > 1]


def _messages(prompt: str) -> list[Message]:
    found: list[Message] = []
    role = "user"
    for text, is_content in messages(prompt):
        if is_content:
            found.append({"role": role, "content": text})
        elif text.endswith(": "):
            role = text.removesuffix(": ")
    return found
