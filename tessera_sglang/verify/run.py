"""The command: a server, prompts, settings, a verdict."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tessera_sglang.config import BACKEND, ConfigError
from tessera_sglang.launch import LaunchError, Server, signals_raise
from tessera_sglang.root import root_tokens

from . import defaults, report
from .client import Client, ServerError, ServerState
from .figures import summarize
from .measure import Measured, Meter
from .prompts import Encoder, Prompt, PromptError, read
from .settings import OwnRoot, Setting, grid
from .verdict import judge

START_TIMEOUT_S = 3600  # large checkpoints take their time; a start that fails ends at once

VOCABULARY = 1 << 31  # ids of a root's text come from the tokenizer; the server checks them


class UsageError(Exception):
    """Options that do not go together, or nothing to measure with; says what to do."""


def run(options: argparse.Namespace) -> int:
    """0: the server's own settings pass. 1: they do not, or nothing could be measured. 2: bad usage."""
    try:
        with signals_raise(), _server(options) as url:
            found = _report(options, Client(url, options.api_key))
    except (UsageError, PromptError) as error:
        print(f"tessera-sglang verify: {error}", file=sys.stderr)
        return 2
    except (ServerError, LaunchError) as error:
        print(f"tessera-sglang verify: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report.as_json(found), indent=2))
    else:
        report.show(found)
    return 0 if found.verdict.server_passes else 1


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    given = (*shlex.split(options.server_args), *options.client)
    if options.url:
        if given:
            raise UsageError(
                f"{given[0]}: a running server takes no arguments; give "
                "--model-path to start one with them"
            )
        yield options.url
        return
    print(f"starting a server of {options.model_path}", file=sys.stderr)
    arguments = ("--attention-backend", BACKEND, *given)
    with Server(options.model_path, arguments, {}, start_timeout_s=START_TIMEOUT_S) as server:
        yield server.url


def _report(options: argparse.Namespace, client: Client) -> report.Report:
    state = client.state()
    tokenizer = cache(lambda: load_tokenizer(options, state))
    encoder = Encoder(tokenizer, state.page_tokens)
    prompts = read(Path(options.prompts), encoder) if options.prompts else defaults.prompts(encoder)
    own = None
    if options.root is not None:
        own = OwnRoot(options.root, _own_tokens(options.root, tokenizer(), state.page_tokens))
    roots = options.roots if own is None else tuple(dict.fromkeys((*options.roots, "own")))
    settings = grid(roots, options.link_pages, own)
    measured = _measured(client, prompts, settings, options.tokens)
    summaries = {setting: summarize(measured.figures[setting]) for setting in settings}
    return report.Report(
        state=state,
        prompts=len(prompts),
        new_tokens=options.tokens,
        measured=measured,
        summaries=summaries,
        verdict=judge(summaries, options.threshold),
    )


def _measured(
    client: Client, prompts: Sequence[Prompt], settings: Sequence[Setting], tokens: int
) -> Measured:
    meter = Meter(client, f"tessera-verify-{secrets.token_hex(8)}", tokens)
    total = len(prompts) * (len(settings) + 1)
    options: dict[str, Any] = {}
    if not sys.stderr.isatty():  # a line now and then, so that a log shows that it goes on
        options = {
            "mininterval": 15,
            "ncols": 0,
            "bar_format": "{n} of {total} prompts, {elapsed}\n",
        }
    with tqdm(total=total, unit="prompt", file=sys.stderr, **options) as progress:
        return meter.everything(prompts, settings, progress.update)


def _own_tokens(text: str, tokenizer: Any, page_tokens: int) -> tuple[int, ...]:
    try:
        found = root_tokens(text, tokenizer=tokenizer, vocab_size=VOCABULARY, page_size=page_tokens)
    except ConfigError as error:
        raise UsageError(f"--root: {error}") from error
    return tuple(found)


def load_tokenizer(options: argparse.Namespace, state: ServerState) -> Any:
    """Of --tokenizer, else of what the server names.

    Raises:
        UsageError: it can not be loaded here.
    """
    from transformers import AutoTokenizer

    name = options.tokenizer or state.tokenizer
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # transformers raises what it likes
        raise UsageError(
            f"the tokenizer {name} can not be loaded here: {str(error)[:300]}\ngive its path or name "
            "as --tokenizer, or prompts with input_ids"
        ) from error
