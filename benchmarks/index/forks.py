"""What forking partly equal pages saves: the agent trace, replayed without an engine.

A prompt's tokens are recomputed unless a whole page of them is found or, with forks, their rows are
copied out of a page that begins alike. Every fork is checked against what was published into its page.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from tessera_sglang.memory_pool.index import ContentIndex
from tessera_sglang.memory_pool.keys import Namespace

from .sides import PAGE_SIZE, Tokens
from .workloads import Trace

SMALLEST_FORK = 8


@dataclass(frozen=True, slots=True)
class Replay:
    """One pass over the trace."""

    prompt_tokens: int
    page_tokens: int  # found in whole pages
    forks: int
    fork_rows: int
    wrong_rows: int  # whose tokens were not those of the prompt

    @property
    def recomputed_share(self) -> float:
        """Of the prompt tokens."""
        return (self.prompt_tokens - self.page_tokens - self.fork_rows) / self.prompt_tokens


def replay(trace: Trace, smallest_fork: int | None) -> Replay:
    """Match every prompt up to its last token, then publish it with the output that was run."""
    index = ContentIndex(PAGE_SIZE, smallest_fork=smallest_fork)
    root = Namespace("benchmark").root_key()
    contents: dict[int, Tokens] = {}  # physical page -> tokens, as published
    prompt_tokens = page_tokens = forks = fork_rows = wrong_rows = 0
    for recorded in trace.requests:
        prompt = recorded.prompt
        found = index.match(index.chain(root, prompt), len(prompt) - 1)
        prompt_tokens += len(prompt)
        page_tokens += found.pages * PAGE_SIZE
        if found.fork is not None:
            source, at = found.fork.page_id, found.pages * PAGE_SIZE
            assert source is not None, "nothing is evicted here"
            forks += 1
            fork_rows += found.fork.rows
            wrong_rows += _different(prompt[at : at + found.fork.rows], contents[source])
        row = prompt + recorded.output
        row = row[: len(row) - bool(recorded.output)]
        held = index.path(found.segments()).page_ids()
        pages = len(row) // PAGE_SIZE
        own = range(len(contents), len(contents) + pages - found.pages)
        for page, page_id in enumerate(own, found.pages):
            contents[page_id] = row[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
        index.publish(index.chain(root, row), np.array([*held, *own], dtype=np.int64))
    return Replay(prompt_tokens, page_tokens, forks, fork_rows, wrong_rows)


def _different(wanted: array[int], page: array[int]) -> int:
    return sum(one != other for one, other in zip(wanted, page[: len(wanted)], strict=True))
