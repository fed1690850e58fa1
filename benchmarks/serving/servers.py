"""Both sides, started at once and gone when the block is left."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.report import ROOT, progress
from tessera_sglang.bench.sides import STOCK, TESSERA, Launch, server_of
from tessera_sglang.config import PAGE_TOKENS, VARIABLE
from tessera_sglang.launch import Server, signals_raise

MODEL = ROOT / "examples/tiny-mla"
SIDES = (STOCK, TESSERA)
THREADS = 2  # of each server: only one works at a time
Urls = Mapping[str, str]  # by side


@contextmanager
def both(
    model: Path,
    pool_tokens: int,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Urls]:
    """Two servers that differ by their index alone.

    ``arguments`` are further ones of SGLang's launcher, ``environment`` further variables of both.
    """
    os.environ.pop(VARIABLE, None)  # both sides have all else by default
    settings = {"OMP_NUM_THREADS": str(THREADS), **(environment or {})}
    launch = Launch(
        str(model),
        whole_pages(pool_tokens),
        ("--enable-metrics", *arguments),
        environment=tuple(settings.items()),
    )
    progress(f"starting two servers with pools of {launch.pool_tokens:,} tokens")
    with signals_raise(), ExitStack() as stack:
        with ThreadPoolExecutor(len(SIDES)) as pool:  # most of a start is one thread that imports
            starts = [pool.submit(_start, stack, server_of(launch, side)) for side in SIDES]
        servers = [start.result() for start in starts]
        yield {side: server.url for side, server in zip(SIDES, servers, strict=True)}


def _start(stack: ExitStack, server: Server) -> Server:
    return stack.enter_context(server)


def whole_pages(tokens: int) -> int:
    """Rounded up."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
