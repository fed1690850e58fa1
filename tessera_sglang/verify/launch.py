"""A server of the user's model, for as long as the measurement takes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from tessera_sglang.demo import launch

START_TIMEOUT_S = 3600  # large checkpoints take their time; a start that fails ends at once


class ModelServer(launch.Server):
    """SGLang with ``--attention-backend tessera``, the user's own arguments and TESSERA_CONFIG."""

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        super().__init__(Path(model), index="content", pool_tokens=0, dtype="auto", inspect=False)
        guarded_launcher = self._command[: self._command.index("--model-path")]
        self._command = [
            *(*guarded_launcher, "--model-path", model, "--attention-backend", "tessera"),
            *(*arguments, "--host", "127.0.0.1", "--port", str(self._port)),
        ]
        self._environment = {
            "OMP_NUM_THREADS": self._environment["OMP_NUM_THREADS"],
            **os.environ,
            "TMPDIR": self._environment["TMPDIR"],
        }

    def _start(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            super()._start()
        except launch.LaunchError:
            while self._process is not None and self._process.poll() is None:
                if launch._healthy(self.url):
                    return
                if time.monotonic() > deadline:
                    break
                time.sleep(1)
            raise
