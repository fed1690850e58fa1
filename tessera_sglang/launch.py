"""A server in a process of its own, for as long as a ``with`` block lasts.

    with Server(model, ["--attention-backend", "tessera"], {}) as server:
        server.url

Whatever ends the block (an exception, Ctrl-C, a signal turned into an exception by
:func:`signals_raise`) ends the server and all that it started. If this process is killed outright,
a guard that leads the server's process group notices and does the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

START_TIMEOUT_S = 300
END_TIMEOUT_S = 20
REAP_TIMEOUT_S = 5
LOG_LINES = 30  # of a failed start, shown to the user

# Leads the server's process group. We hold the other end of its standard input: when that closes,
# we are gone, whatever the reason, and it ends the group.
_GUARD = """
import os, signal, subprocess, sys, threading

def watch():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)

server = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.DEVNULL)
threading.Thread(target=watch, daemon=True).start()
sys.exit(server.wait())
"""


class LaunchError(RuntimeError):
    """The server did not come up; the message carries the end of its log."""


class Server:
    """SGLang on a free local port."""

    def __init__(
        self,
        model: Path | str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """``arguments`` are of SGLang's launcher; ``environment`` adds to this process's."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._start_timeout_s = start_timeout_s
        self._scratch = tempfile.TemporaryDirectory(prefix="tessera-")
        self._log = Path(self._scratch.name) / "server.log"
        self.command = (
            *(sys.executable, "-c", _GUARD, "-m", "sglang.launch_server"),
            *("--model-path", str(model), *arguments),
            *("--host", "127.0.0.1", "--port", str(port)),
        )
        self.environment = {
            "OMP_NUM_THREADS": _threads(),
            **os.environ,
            "TMPDIR": self._scratch.name,  # sockets that a killed server leaves behind
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self) -> None:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: ended as one, deaf to our Ctrl-C
            )
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise LaunchError(f"the server did not start:\n{self.end_of_log()}")
            if _healthy(self.url):
                return
            time.sleep(0.25)
        raise LaunchError(f"no answer within {self._start_timeout_s:g} s:\n{self.end_of_log()}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _kill_group(process.pid)
            process.wait(END_TIMEOUT_S)
            if process.stdin is not None:
                process.stdin.close()
            _await_empty_group(process.pid)
        self._scratch.cleanup()

    def end_of_log(self) -> str:
        """The last lines that the server wrote."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that ``with`` blocks are left properly."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _threads() -> str:
    """Half of the cores, the other half being for the other processes; small models need few."""
    return str(max(1, min(8, len(os.sched_getaffinity(0)) // 2)))


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _await_empty_group(group: int) -> None:
    """Orphans of a killed group vanish once init has reaped them; not every container does."""
    deadline = time.monotonic() + REAP_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def _healthy(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy


def _free_port() -> int:
    """Below the range from which connections get theirs, so that it is free when the server binds."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
