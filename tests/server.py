"""A real SGLang server for tests: the stock launcher in a process of its own, on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

START_TIMEOUT_S = 240
REQUEST_TIMEOUT_S = 300


@dataclass(frozen=True)
class Answer:
    """What a request got. ``logprobs`` belong to ``tokens``, one each."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    prompt: int
    meta: dict[str, Any]


class RequestError(RuntimeError):
    """The server answered with an error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


class Server:
    """``with Server(model) as server: server.generate([1, 2, 3])``."""

    def __init__(
        self,
        model: Path,
        *arguments: str,
        config: dict[str, Any] | None = None,
        pool_tokens: int = 32768,
        environment: dict[str, str] | None = None,
        dtype: str | None = "float32",
        tokenizer: bool = False,
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = Path(model) / f"server-{self.port}.log"
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--attention-backend", "tessera", "--max-total-tokens", str(pool_tokens)),
            *("--mem-fraction-static", "0.3", "--enable-metrics"),
            *(["--dtype", dtype] if dtype else []),
            *([] if tokenizer else ["--skip-tokenizer-init"]),
            *arguments,
        ]
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TESSERA_CONFIG": json.dumps(config or {}),
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Launch and wait until it answers. Raises RuntimeError with the end of the log."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{self.log()[-6000:]}")
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not answer:\n{self.log()[-6000:]}")

    def stop(self) -> None:
        """End the server and all that it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                self._process.pid, signal.SIGKILL
            )  # a graceful end would wait for diagnostics
        self._process.wait(30)
        self._process = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        """Whether the launcher still runs and answers."""
        if self._process is None or self._process.poll() is not None:
            return False
        return requests.get(f"{self.url}/health", timeout=60).status_code == 200

    def log(self) -> str:
        """Everything the server wrote so far."""
        return self.log_path.read_text(errors="replace")

    # --- requests --------------------------------------------------------------------------------

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        """POST JSON."""
        return requests.post(f"{self.url}{path}", json=body, timeout=REQUEST_TIMEOUT_S)

    def generate(
        self,
        prompt: list[int],
        spans: Any = None,
        *,
        steps: int = 16,
        rid: str | None = None,
        **fields: Any,
    ) -> Answer:
        """Greedy tokens with log-probabilities. ``fields`` go to the request as they are."""
        params: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": steps,
            "ignore_eos": True,
            **fields.pop("sampling", {}),
        }
        if spans is not None:
            params["custom_params"] = {"tessera": {"spans": spans}}
        body = {
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
            **({"rid": rid} if rid else {}),
            **fields,
        }
        response = self.post("/generate", body)
        if response.status_code != 200:
            raise RequestError(response.status_code, response.text)
        answer = response.json()
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise RequestError(meta["finish_reason"].get("status_code") or 499, str(meta))
        return Answer(
            tokens=answer["output_ids"],
            logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or []],
            cached=meta["cached_tokens"],
            prompt=meta["prompt_tokens"],
            meta=meta,
        )

    def generate_all(
        self, items: list[tuple[list[int], Any]], *, workers: int = 16, **fields: Any
    ) -> list[Answer]:
        """Many requests at once, answers in order."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda item: self.generate(item[0], item[1], **fields), items))

    def flush(self) -> None:
        """Empty the cache; the request just answered may take a moment to let go."""
        for _ in range(100):
            response = self.post("/flush_cache", {})
            if response.status_code == 200:
                return
            time.sleep(0.1)
        raise RequestError(response.status_code, response.text)

    def abort(self, rid: str) -> None:
        """Abort a request."""
        self.post("/abort_request", {"rid": rid})

    def state(self, rank: int = 0) -> dict[str, Any]:
        """What the server says of its cache."""
        info = requests.get(f"{self.url}/server_info", timeout=60).json()
        state: dict[str, Any] = info["internal_states"][rank]["tessera"]
        return state


def _free_port() -> int:
    """Below the range from which connections get theirs, so that it is free when the server binds."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
