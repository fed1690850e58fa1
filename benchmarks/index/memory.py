"""Bytes that a cached token costs on each side, as inserted and once it was looked up.

A forked process fills one side and reads by how much its anonymous resident memory grew, after free
heap was given back to the system: what Python, numpy, torch and Rust allocate all counts alike. Prompts
are made on the way and dropped; the pools are there before the count starts. Then every prompt is looked
up, slots and all, and the memory is read again: a cache may keep what it derives from its pages.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from .sides import NEXT, Side, Tokens, request
from .workloads import numbered_sequence

METHOD = (
    "growth of RssAnon of a forked process per side, after gc.collect and malloc_trim, per token that "
    "the side says it holds"
)
SHAPES = ("own", "branches")  # sequences of 4,096 tokens; 512 tokens behind one prefix
_WARM_UP_TOKENS = 200_000


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per cached token."""

    inserted: float
    looked_up: float  # after every prompt was looked up once


def bytes_per_token(build: Callable[[int, int], Side], shape: str, tokens: int) -> Memory:
    """Memory of a side filled with ``tokens``; ``build(capacity_tokens, row_tokens)`` makes it."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(build, shape, tokens, there))
    process.start()
    there.close()
    try:
        measured: Memory = here.recv()
    except EOFError:
        raise RuntimeError("the process that measures memory died") from None
    finally:
        process.join()
    return measured


def _measure(
    build: Callable[[int, int], Side], shape: str, tokens: int, answer: Connection
) -> None:
    side = build(tokens + 2 * _WARM_UP_TOKENS, 8_192)
    warm = _fill(side, shape, 0, min(tokens, _WARM_UP_TOKENS))
    _look_up(side, shape, 0, warm)
    tokens_before, bytes_before = _held_tokens(side), _resident_bytes()
    end = _fill(side, shape, warm, tokens_before + tokens)
    added = _held_tokens(side) - tokens_before
    inserted = (_resident_bytes() - bytes_before) / added
    _look_up(side, shape, warm, end)
    answer.send(Memory(inserted, (_resident_bytes() - bytes_before) / added))
    answer.close()


def _prompt(shape: str, number: int) -> Tokens:
    if shape == "own":
        return numbered_sequence(number, 4_096)
    return numbered_sequence(-1, 4_096) + numbered_sequence(number, 512)


def _fill(side: Side, shape: str, first: int, until_tokens: int) -> int:
    """Insert prompts from number ``first`` on; returns the number behind the last."""
    number = first
    while _held_tokens(side) < until_tokens:
        side.insert(_prompt(shape, number))
        number += 1
    return number


def _look_up(side: Side, shape: str, first: int, end: int) -> None:
    for number in range(first, end):
        side.look_up(request(_prompt(shape, number) + NEXT))


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
