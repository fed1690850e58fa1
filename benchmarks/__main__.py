"""All benchmarks, one after the other, then plots and the tables of README.md.

    python -m benchmarks             # Tessera beside stock, and what spans cost: 40 minutes, saved
    python -m benchmarks --all       # and tools, head shapes, index, attention: an hour
    python -m benchmarks --quick     # agents, retrieval, latency: smaller, under 5 minutes, not saved
    python -m benchmarks --only rag tools

Each runs in a process of its own, and the next one runs also after one whose checks do not hold. At the
end stands how long each took. The exit status is 0 if all of them returned 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from benchmarks.report import ROOT, progress
from tessera_sglang import tables

# Fast and quiet ones first: an index measured beside a server that ends is measured wrongly.
COMMANDS = (
    *(
        "index",
        "attention",
        "store",
        "plain_traffic",
        "latency",
        "multi_agent",
        "tools",
        "rag",
        "traces",
    ),
    *("restart", "head_shapes", "quality"),
)
BY_DEFAULT = frozenset({"plain_traffic", "latency", "multi_agent", "rag", "traces", "quality"})
QUICK = frozenset({"latency", "multi_agent", "rag"})
ONE_THREAD = frozenset({"index"})  # of the scheduler, which is what it measures


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended."""

    name: str
    status: int
    took_s: float


def main() -> int:
    """Run them; 0 if every one returned 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, nothing is saved")
    parser.add_argument("--all", action="store_true", help="those left out by default, too")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, metavar="NAME")
    options = parser.parse_args()
    size = "--quick" if options.quick else "--save"
    wanted = options.only or (COMMANDS if options.all else QUICK if options.quick else BY_DEFAULT)
    done = [_run(name, size) for name in COMMANDS if name in wanted]
    if not options.quick:
        done += [_run("plots"), _run("readme")]
    tables.show(_times(done))
    return int(any(one.status for one in done))


def _run(name: str, *options: str) -> Done:
    progress(f"\n=== {name}")
    threads = {"OMP_NUM_THREADS": "1"} if name in ONE_THREAD else {}
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *options]
    start = time.perf_counter()
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **threads}, check=False)
    return Done(name, status.returncode, time.perf_counter() - start)


def _times(done: list[Done]) -> tables.Table:
    said = {0: "done", 1: "checks do not hold"}
    rows = [
        (one.name, said.get(one.status, f"exit {one.status}"), f"{one.took_s:.0f}") for one in done
    ]
    total = f"{sum(one.took_s for one in done):.0f}"
    return tables.Table(
        "Time", ("benchmark", "", "seconds"), (*rows, ("all", "", total)), left=frozenset({0, 1})
    )


if __name__ == "__main__":
    sys.exit(main())
