"""What a user sees of work that takes long, and does not see of the libraries that do it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator

PATIENCE_S = 1.0  # before a terminal is told what takes so long


@contextlib.contextmanager
def progress(doing: str) -> Iterator[None]:
    """Say so on a terminal where it takes long, and take it back."""
    if not os.isatty(2):
        yield
        return
    terminal = os.dup(2)  # whatever is redirected meanwhile
    late = threading.Timer(PATIENCE_S, os.write, (terminal, f"{doing} …".encode()))
    late.start()
    try:
        yield
    finally:
        late.cancel()
        late.join()
        os.write(terminal, b"\r\x1b[K")
        os.close(terminal)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What libraries say while they load is not our answer. It is said after all if that fails.

    Native code and child processes write to the descriptors, so those are what is redirected. Loggers
    that are made meanwhile keep a stream that goes wherever descriptor 2 does.
    """
    stream = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    with (
        tempfile.TemporaryFile() as said,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        kept = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in kept:
            os.dup2(said.fileno(), number)
        failed = True
        try:
            yield
            failed = False
        finally:
            stream.flush()
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
            if failed:
                said.seek(0)
                os.write(2, said.read())
