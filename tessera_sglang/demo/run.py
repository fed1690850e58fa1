"""The demo from end to end: find the model, run both servers one after the other, report."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tessera_sglang import machine
from tessera_sglang.launch import signals_raise

from . import report
from .agents import MLA, TEXT, Prompt, Workload, prompts
from .client import RequestError
from .measure import PHASES, Measurement, measure
from .sides import server_of

DTYPE = {"mla": "bfloat16", "text": "bfloat16"}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class DemoError(RuntimeError):
    """The demo can not run; the message says what is missing and what to do."""


def run(*, text: bool = False, agents: int = 16, as_json: bool = False) -> int:
    """Run, print, and return 0 when every check holds."""
    workload = TEXT if text else MLA
    model = _model(workload)
    asked = prompts(workload, agents, model)
    with signals_raise():
        measured = _both_sides(workload, model, asked)
    found = report.checks(measured, asked, workload)
    if as_json:
        print(json.dumps(_figures(workload, asked, measured, found), indent=2))
    else:
        report.show(measured, found, asked, workload)
    return 0 if all(check.holds for check in found) else 1


def _both_sides(workload: Workload, model: Path, asked: list[Prompt]) -> list[Measurement]:
    measured: list[Measurement] = []
    requests = len(report.SIDES) * len(PHASES) * len(asked)
    with tqdm(total=requests, unit="answer", file=sys.stderr) as progress:
        for index, side in report.SIDES.items():
            progress.set_description(f"{side}: starting the server")
            with server_of(
                model,
                index=index,
                pool_tokens=_pool_tokens(workload, asked),
                dtype=DTYPE[workload.name],
            ) as server:
                for phase in PHASES:
                    progress.set_description(f"{side}: agents arrive {phase}")
                    try:
                        one = measure(
                            server.url, index, phase, asked, workload.new_tokens, progress.update
                        )
                    except RequestError as error:
                        raise DemoError(f"{error}\n{server.end_of_log()}") from error
                    measured.append(one)
        progress.set_description("done")
    return measured


def _pool_tokens(workload: Workload, asked: list[Prompt]) -> int:
    """Room for every prompt and answer of the stock side at once, and a quarter more."""
    needed = sum(len(prompt.tokens) + workload.new_tokens + 64 for prompt in asked)
    return -(-needed * 5 // (4 * 4096)) * 4096


def _model(workload: Workload) -> Path:
    script = EXAMPLES / ("smollm2/convert.py" if workload is TEXT else "tiny-mla/train.py")
    if not script.exists():
        raise DemoError(f"{script} is missing: the demo runs from a clone of the repository")
    if workload is MLA:
        return script.parent
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DemoError(f"{script} failed; it needs the extra: pip install -e '.[sglang,text]'")
    return Path(done.stdout.splitlines()[-1])


def _figures(
    workload: Workload,
    asked: list[Prompt],
    measured: list[Measurement],
    found: list[report.Check],
) -> dict[str, Any]:
    first = measured[0]
    return {
        "demo": workload.name,
        "agents": len(asked),
        "document_tokens": first.document_tokens,
        "page_tokens": first.page_tokens,
        "hardware": machine.hardware(),
        "versions": machine.versions("tessera-sglang", "sglang", "torch", "transformers"),
        "measurements": [
            {
                "phase": one.phase,
                "cache": report.SIDES[one.index],
                "prompt_tokens": one.prompt_tokens,
                "computed_tokens": one.computed_tokens,
                "cached_tokens": one.cached_tokens,
                "held_tokens": one.held_tokens,
                "document_pages": one.document_pages,
                "copies": one.copies,
                "ttft_p50_s": one.ttft_p50_s,
                "wall_s": one.wall_s,
                "requests": [dataclasses.asdict(answer) for answer in one.answers],
            }
            for one in measured
        ],
        "checks": [dataclasses.asdict(check) for check in found],
    }
