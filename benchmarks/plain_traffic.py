"""Plain traffic through the server: the content index against SGLang's own tree.

    python -m benchmarks.plain_traffic [--quick] [--json] [--model DIR]

Two servers with ``--attention-backend tessera``, one with the content index and one with
``{"index": "radix"}``, get the same requests from ``sglang.benchmark.serving``, in turns: prompts that
share long beginnings, and random ones. The compared figure is output plus input tokens a second, the
median of all rounds. Nobody declares spans, so this is what Tessera costs those who do not use it; on a
CPU both sides run the same attention kernel, on a GPU both run SGLang's.

The example model is tiny, so the scheduler, and with it the index, is most of what is measured: a model
of any size hides differences that show here.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from tessera_sglang.demo.launch import Server

from .report import ROOT, Check, Report, Table, argument_parser, progress

SIDES = ("content", "radix")
BAR = 0.99
POOL_TOKENS = 131_072
ROUNDS, QUICK_ROUNDS = 7, 2
QUICK_SHARE = 4  # a quick round has a quarter of the prompts

WORKLOADS = {
    "shared prefixes": (
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "8"),
        *("--gsp-prompts-per-group", "{prompts}", "--gsp-system-prompt-len", "1024"),
        *("--gsp-question-len", "128", "--gsp-output-len", "32"),
    ),
    "random": (
        *("--dataset-name", "random-ids", "--num-prompts", "{prompts}"),
        *("--random-input-len", "768", "--random-output-len", "32", "--random-range-ratio", "0.5"),
    ),
}
PROMPTS = {"shared prefixes": 8, "random": 48}  # of a group; in all


def main() -> int:
    """Measure and report; 0 if the bar is met."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/tiny-mla")
    parser.add_argument("--rounds", type=int, help="of each side and workload")
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    with _server(options.model, "content") as content, _server(options.model, "radix") as radix:
        servers = dict(zip(SIDES, (content, radix), strict=True))
        figures: dict[str, dict[str, list[float]]] = {}
        for workload in WORKLOADS:
            found: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(-1, rounds):  # the first warms both up and is not counted
                order = SIDES if number % 2 else SIDES[::-1]
                for side in order:
                    progress(f"{workload}: round {number + 1} of {rounds}, {side}")
                    rate = _drive(servers[side], options.model, workload, number, options.quick)
                    if number >= 0:
                        found[side].append(rate)
            figures[workload] = found
    return _report(figures, rounds).emit(as_json=options.json)


def _server(model: Path, index: str) -> Server:
    return Server(model, index=index, pool_tokens=POOL_TOKENS, dtype="auto", inspect=False)


def _drive(server: Server, model: Path, workload: str, seed: int, quick: bool) -> float:
    """Tokens a second of one round on an empty cache."""
    urllib.request.urlopen(
        urllib.request.Request(f"{server.url}/flush_cache", method="POST"), timeout=60
    ).read()
    prompts = PROMPTS[workload] // (QUICK_SHARE if quick else 1)
    arguments = [argument.format(prompts=prompts) for argument in WORKLOADS[workload]]
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as scratch:
        output = Path(scratch) / "result.jsonl"
        command = [
            *(sys.executable, "-W", "ignore", "-m", "sglang.benchmark.serving"),
            *("--backend", "sglang", "--base-url", server.url),
            *("--model", str(model), "--tokenizer", str(model)),
            *("--seed", str(seed + 1), "--max-concurrency", "8", "--disable-tqdm"),
            *("--output-file", str(output), *arguments),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
        if ended.returncode != 0 or not output.is_file():
            raise RuntimeError(f"sglang.benchmark.serving failed:\n{ended.stderr[-2000:]}")
        result = json.loads(output.read_text().splitlines()[-1])
    wanted = prompts * (8 if workload == "shared prefixes" else 1)
    if result["completed"] != wanted:
        raise RuntimeError(f"{result['completed']} of {wanted} requests were answered")
    tokens = result["total_input_tokens"] + result["total_output_tokens"]
    return float(tokens / result["duration"])


def _report(figures: dict[str, dict[str, list[float]]], rounds: int) -> Report:
    checks, rows = [], []
    for workload, found in figures.items():
        medians = {side: statistics.median(found[side]) for side in SIDES}
        ratio = medians["content"] / medians["radix"]
        checks.append(Check.at_least(f"{workload}: throughput, content / radix", ratio, BAR))
        spread = [max(found[side]) / min(found[side]) - 1 for side in SIDES]
        rows.append(
            (
                workload,
                *(round(medians[side]) for side in SIDES),
                f"{ratio:.3f}",
                *(f"{share:.0%}" for share in spread),
            )
        )
    columns = ("workload", "content", "radix", "ratio", "spread", "spread")
    table = Table(f"Tokens a second, medians of {rounds} rounds in turns", columns, rows)
    return Report(
        "plain_traffic",
        checks=checks,
        figures={"tokens_per_s": figures, "rounds": rounds},
        tables=[table],
    )


if __name__ == "__main__":
    sys.exit(main())
