"""``sglang.benchmark.serving`` in this process: one run against one server.

Plugins are loaded before it. It is called through its command line, so whatever it takes can be passed
on, and what it measures (TTFT, ITL, TPOT, throughput) is defined by it alone. It runs here and not in a
process of its own because loading takes longer than most runs.

Its data sets carry a request body of their own for every request (``DatasetRow.extra_request_body``),
but none of its file formats can say so for ``/generate``. So requests with spans take the place of the
data set ``custom``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tessera_sglang import terminal

from .agents import Request
from .metrics import Metrics, read

CLIENT = "sglang.benchmark.serving"
NATIVE = ("sglang", "sglang-native")  # its names of /generate
OURS = ("--base-url", "--host", "--port", "--seed", "--output-file", "--dataset-name")
_SHOWN = 2000  # characters of what the client said when it failed


class ClientError(RuntimeError):
    """The server at ``url`` could not be measured; the message says what the client said."""

    def __init__(self, message: str, url: str) -> None:
        super().__init__(message)
        self.url = url


class UsageError(ValueError):
    """The client does not take these arguments."""


class Requests:
    """Requests as a data set of the client. ``spans`` says whether they are declared."""

    def __init__(self, requests: Sequence[Request], *, spans: bool) -> None:
        self._requests = requests
        self.spans_declared = spans
        self._arguments = Namespace()

    def from_args(self, arguments: Namespace) -> Requests:
        """The client asks a data set's class for an instance; we are both."""
        if arguments.backend not in NATIVE:
            raise UsageError(
                f"--backend {arguments.backend} can not carry token ids with spans; "
                f"use --backend {NATIVE[0]}"
            )
        self._arguments = arguments
        return self

    def load(self, tokenizer: Any, model_id: str | None = None) -> list[Any]:
        """Rows of the client. Their sampling parameters replace its own, so they repeat those."""
        from sglang.benchmark.datasets import DatasetRow

        return [
            DatasetRow(
                prompt=list(request.input_ids),
                prompt_len=len(request.input_ids),
                output_len=request.output_tokens,
                extra_request_body={"sampling_params": self._sampling(request)},
            )
            for request in self._requests
        ]

    def _sampling(self, request: Request) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "temperature": self._arguments.temperature,
            "max_new_tokens": request.output_tokens,
            "ignore_eos": not self._arguments.disable_ignore_eos,
        }
        if self._arguments.top_p < 1:
            parameters["top_p"] = self._arguments.top_p
        if self.spans_declared:
            parameters["custom_params"] = {"tessera": {"spans": [list(s) for s in request.spans]}}
        return parameters


def load_plugins() -> None:
    """Load SGLang's plugins and the client. Takes some ten seconds the first time.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
    """
    with terminal.progress("loading SGLang"), terminal.quiet():
        from sglang.srt.plugins import load_plugins as load

        load()
        from sglang.benchmark import serving  # noqa: F401 # with the plugins in force


def drive(
    url: str, arguments: Sequence[str], *, seed: int, requests: Requests | None = None
) -> Metrics:
    """One run on an empty cache, with the client's ``arguments``.

    Raises:
        ClientError: the server or the client failed, or a request was not answered.
        UsageError: the client refuses its arguments.
    """
    load_plugins()
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as scratch:
        output = Path(scratch) / "result.jsonl"
        said = io.StringIO()
        command = [
            *arguments,
            *(["--dataset-name", "custom"] if requests is not None else []),
            *("--base-url", url, "--seed", str(seed), "--output-file", str(output)),
            *("--output-details", "--disable-tqdm", "--cache-report", "--flush-cache"),
        ]
        with _data_set(requests), contextlib.redirect_stdout(said):
            _run(command, said, url)
        if not output.is_file():
            raise ClientError(f"{CLIENT} wrote no result:\n{said.getvalue()[-_SHOWN:]}", url)
        result: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    _complete(result, url)
    if requests is not None and requests.spans_declared:
        _spans_are_read(result, url)
    return read(result)


def _run(command: Sequence[str], said: io.StringIO, url: str) -> None:
    from sglang.benchmark import serving

    complaint = io.StringIO()
    try:
        with _command_line(command), _stderr(complaint):
            serving.cli_main()
    except SystemExit as error:
        if error.code == 2:
            raise UsageError(complaint.getvalue().strip().rpartition("\n")[2]) from error
        if error.code != 1:  # not the client's: a signal that ends us
            raise
        heard = said.getvalue() + complaint.getvalue()
        raise ClientError(f"{CLIENT} gave up:\n{heard[-_SHOWN:]}", url) from error
    except (UsageError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ClientError(f"{CLIENT} failed: {reason[-_SHOWN:]}", url) from error


@contextlib.contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, [CLIENT, *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _stderr(into: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stderr(into), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _data_set(requests: Requests | None) -> Iterator[None]:
    """Let ``--dataset-name custom`` name our requests for a while."""
    if requests is None:
        yield
        return
    from sglang.benchmark.datasets import DATASET_MAPPING

    before, DATASET_MAPPING["custom"] = DATASET_MAPPING["custom"], requests
    try:
        yield
    finally:
        DATASET_MAPPING["custom"] = before


def _complete(result: dict[str, Any], url: str) -> None:
    errors = [error for error in result["errors"] if error]
    asked = len(result["errors"])
    if errors or result["completed"] != asked or not asked:
        why = errors[0].strip()[-_SHOWN:] if errors else "the server's answers were empty"
        raise ClientError(f"{result['completed']} of {asked} requests were answered: {why}", url)


def _spans_are_read(result: dict[str, Any], url: str) -> None:
    """A server that ignores spans answers all the same, and would be measured as Tessera."""
    state = (result.get("server_info") or {}).get("internal_states") or [{}]
    tessera = state[0].get("tessera")
    if tessera is None:
        raise ClientError(
            f"the server at {url} does not run with --attention-backend tessera; "
            "measure it without spans: --no-spans",
            url,
        )
    refused = (tessera.get("spans") or {}).get("refused")
    if refused:
        raise ClientError(
            f"the server at {url} reads no spans: {refused}. Measure it without: --no-spans", url
        )
