"""The demo as a user runs it: its claims hold, and no process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil

MARK = "TESSERA_DEMO_TEST"


def test_the_demo_holds_its_claims_and_leaves_no_process() -> None:
    environment = {**os.environ, MARK: "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tessera_sglang.cli", "demo", "--agents", "4", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["checks"], "the report says what it checked"
    assert all(check["holds"] for check in report["checks"])
    left = [process for process in psutil.process_iter() if _is_marked(process)]
    assert not left, left


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == "1"
    except psutil.Error:
        return False
