"""``tessera-sglang bench`` as a user runs it, and what is left of its servers when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from server import Server

pytestmark = pytest.mark.server

TINY_MLA = Path(__file__).parents[2] / "examples" / "tiny-mla"
MARK = "TESSERA_BENCH_TEST"
BEGUN_S = 240  # importing SGLang takes its time on a busy machine
GONE_S = 30


def started(*arguments: str, mark: str) -> subprocess.Popen[str]:
    """The command, with ``mark`` in the environment of all that it starts."""
    environment = {**os.environ, MARK: mark, "HF_HUB_OFFLINE": "1"}
    environment.pop("TESSERA_CONFIG", None)
    return subprocess.Popen(
        [sys.executable, "-m", "tessera_sglang.cli", "bench", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in the background has them ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def report(*arguments: str, mark: str) -> dict[str, Any]:
    process = started("--json", *arguments, mark=mark)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _has(process, mark)]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def test_agents_find_their_documents_cached_on_tessera_alone() -> None:
    shape = (
        "--agents",
        "4",
        "--documents",
        "2",
        "--document-tokens",
        "640",
        "--output-tokens",
        "4",
    )
    found = report("--ab", "--model-path", str(TINY_MLA), *shape, "--rounds", "1", mark="ab")
    stock, tessera = (found["sides"][side]["rounds"] for side in ("stock", "tessera"))
    assert len(stock) == len(tessera) == 1
    for count in ("requests", "prompt_tokens", "output_tokens"):
        assert stock[0][count] == tessera[0][count], "the same requests"
    assert (stock[0]["requests"], stock[0]["output_tokens"]) == (4, 16)
    assert stock[0]["cached_share"] < 0.05, "nothing before a document is shared"
    # of each document 9 of 10 pages are shared, and one of four agents computes them
    least = 3 * 2 * 9 * 64 / tessera[0]["prompt_tokens"]
    assert tessera[0]["cached_share"] == pytest.approx(least, abs=0.02)
    for name, value in tessera[0].items():
        assert value > 0, name
    assert found["client"] == "sglang.benchmark.serving"
    assert found["gain"]["throughput_tokens_per_s"] > 0
    assert not marked("ab")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_servers_end_with_the_command(number: signal.Signals, status: int) -> None:
    mark = number.name
    random_ids = ("--dataset-name", "random-ids")  # needs nothing before the server
    process = started("--model-path", str(TINY_MLA), *random_ids, mark=mark)
    try:
        deadline = time.monotonic() + BEGUN_S
        while len(marked(mark)) < 3:  # the command, the guard, the server
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(number)
        out, err = process.communicate(timeout=BEGUN_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (status, "")
    assert "Traceback" not in err
    deadline = time.monotonic() + GONE_S
    while marked(mark):
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.2)


# --- a server that runs already ------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("model") / "tiny-mla"
    shutil.copytree(TINY_MLA, model)  # the log is written there
    with Server(model, pool_tokens=65536, dtype=None, tokenizer=True) as started:
        yield started


def test_a_running_server_is_measured_with_sglangs_data_sets(server: Server) -> None:
    shared = (
        *(
            "--gsp-num-groups",
            "1",
            "--gsp-prompts-per-group",
            "4",
            "--gsp-system-prompt-len",
            "256",
        ),
        *("--gsp-question-len", "64", "--gsp-output-len", "4", "--max-concurrency", "1"),
    )
    name = ("--dataset-name", "generated-shared-prefix", "--rounds", "2")
    found = report("--url", server.url, *name, "--", *shared, mark="url")
    assert list(found["sides"]) == ["server"]
    (first, second) = found["sides"]["server"]["rounds"]
    assert first["requests"] == second["requests"] == 4
    assert first["cached_share"] > 0.3, "one group shares a beginning"
    assert found["gain"]["throughput_tokens_per_s"] is None
    assert found["sides"]["server"]["spread"]["throughput_tokens_per_s"] >= 0


def test_its_tokenizer_is_found_and_spans_are_read(server: Server) -> None:
    shape = (
        "--agents",
        "3",
        "--documents",
        "1",
        "--document-tokens",
        "320",
        "--output-tokens",
        "2",
    )
    with_spans = report("--url", server.url, *shape, "--rounds", "1", mark="url")
    without = report("--url", server.url, *shape, "--rounds", "1", "--no-spans", mark="url")
    shares = [found["sides"]["server"]["median"]["cached_share"] for found in (with_spans, without)]
    assert shares[0] > 0.2
    assert shares[1] < 0.05


def test_what_the_client_refuses_is_bad_usage(server: Server) -> None:
    process = started("--url", server.url, "--", "--no-such-option", mark="url")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert "unrecognized arguments: --no-such-option" in err


def test_no_server_at_the_address_is_a_failure() -> None:
    process = started("--url", "http://127.0.0.1:1", mark="url")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("no server answers at http://127.0.0.1:1: ")
