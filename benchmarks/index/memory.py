"""Bytes that a cached token costs on each side.

A forked process fills one side and reads by how much its anonymous resident memory grew, after free
heap was given back to the system: what Python, numpy, torch and Rust allocate all counts alike. Prompts
are made on the way and dropped; the pools are there before the count starts.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from .sides import Side, Tokens
from .workloads import numbered_sequence

METHOD = (
    "growth of RssAnon of a forked process per side, after gc.collect and malloc_trim, per token that "
    "the side says it holds"
)
SHAPES = ("own", "branches")  # sequences of 4,096 tokens; 512 tokens behind one prefix
_WARM_UP_TOKENS = 200_000


def bytes_per_token(build: Callable[[int, int], Side], shape: str, tokens: int) -> float:
    """Memory of a side filled with ``tokens``; ``build(capacity_tokens, row_tokens)`` makes it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(build, shape, tokens, there))
    process.start()
    there.close()
    try:
        measured: float = here.recv()
    except EOFError:
        raise RuntimeError("the process that measures memory died") from None
    finally:
        process.join()
    return measured


def _measure(
    build: Callable[[int, int], Side], shape: str, tokens: int, answer: Connection
) -> None:
    side = build(tokens + 2 * _WARM_UP_TOKENS, 8_192)
    prompts = _prompts(shape)
    _fill(side, prompts, min(tokens, _WARM_UP_TOKENS))
    tokens_before, bytes_before = _held_tokens(side), _resident_bytes()
    _fill(side, prompts, tokens_before + tokens)
    answer.send((_resident_bytes() - bytes_before) / (_held_tokens(side) - tokens_before))
    answer.close()


def _prompts(shape: str) -> Iterator[Tokens]:
    prefix = numbered_sequence(0, 4_096)
    number = 1
    while True:
        if shape == "own":
            yield numbered_sequence(number, 4_096)
        else:
            yield prefix + numbered_sequence(number, 512)
        number += 1


def _fill(side: Side, prompts: Iterator[Tokens], until_tokens: int) -> None:
    while _held_tokens(side) < until_tokens:
        side.insert(next(prompts))


def _held_tokens(side: Side) -> int:
    total = side.cache.total_size()
    return int(total[0] if isinstance(total, tuple) else total)


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")
