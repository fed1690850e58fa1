"""What is indexed and looked up: synthetic prompts with a fixed seed, and recorded agent sessions."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .sides import PAGE_SIZE, Tokens

VOCABULARY = 128_000
_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Workloads (a) to (c), tokens as SGLang holds them."""

    long: tuple[Tokens, ...]  # (a) long sequences of their own
    shared: tuple[Tokens, ...]  # (b) one prefix, and a tail each
    shared_next_turn: tuple[Tokens, ...]  # (b) each and another page
    bodies: tuple[Tokens, ...]  # (c) [root | body] of each span
    readers: tuple[Tokens, ...]  # (c) prompts that hold one span each, at a random offset

    @property
    def total_tokens(self) -> int:
        """Tokens in all prompts that are indexed."""
        return sum(len(t) for part in (self.long, self.shared, self.bodies) for t in part)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        parts = (self.long, self.shared_next_turn, self.bodies, self.readers)
        return max(len(tokens) for part in parts for tokens in part)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each; the defaults are those the project states."""

    long_count: int = 16
    long_tokens: int = 32_768
    shared_count: int = 1_000
    prefix_tokens: int = 4_096
    own_tokens: int = 512
    span_count: int = 64
    span_tokens: int = 8_192
    root_tokens: int = PAGE_SIZE
    widest_offset: int = 4_096


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a session and what the model answered."""

    prompt: Tokens
    output: Tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    source: str
    requests: tuple[TraceRequest, ...]
    skipped: int = 0  # requests without a prompt

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(r.prompt) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(r.output) for r in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(len(r.prompt) + len(r.output) for r in self.requests)


def make_prompts(sizes: Sizes, seed: int = 0) -> Prompts:
    """Workloads (a) to (c)."""
    rng = np.random.default_rng(seed)
    prefix, root = random_tokens(rng, sizes.prefix_tokens), random_tokens(rng, sizes.root_tokens)
    spans = [random_tokens(rng, sizes.span_tokens) for _ in range(sizes.span_count)]
    shared = [prefix + random_tokens(rng, sizes.own_tokens) for _ in range(sizes.shared_count)]
    return Prompts(
        long=tuple(random_tokens(rng, sizes.long_tokens) for _ in range(sizes.long_count)),
        shared=tuple(shared),
        shared_next_turn=tuple(tokens + random_tokens(rng, PAGE_SIZE) for tokens in shared),
        bodies=tuple(root + span for span in spans),
        readers=tuple(
            random_tokens(rng, int(rng.integers(1, sizes.widest_offset + 1)))
            + span
            + random_tokens(rng, PAGE_SIZE)
            for span in spans
        ),
    )


def random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    """Uniform token ids."""
    return array("q", rng.integers(0, VOCABULARY, count, dtype=np.int64).tobytes())


def numbered_sequence(number: int, tokens: int) -> Tokens:
    """The sequence of that number, the same whenever it is asked for."""
    return random_tokens(np.random.default_rng((7, number + 1)), tokens)


def load_trace(directory: Path) -> Trace:
    """Sessions recorded in ``directory`` (``*.jsonl``), or a synthetic one where there are none.

    Every line is an object with ``timestamp``, ``input`` and ``output``. Words, with the blank before
    them, and runs of punctuation are tokens; ids are given in the order of appearance.
    """
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    if not lines:
        return synthetic_trace()
    lines.sort(key=lambda line: line["timestamp"])
    ids: dict[str, int] = {}

    def tokenize(text: str) -> Tokens:
        return array("q", [ids.setdefault(word, len(ids)) for word in _WORD.findall(text)])

    requests = [TraceRequest(tokenize(line["input"]), tokenize(line["output"])) for line in lines]
    served = tuple(r for r in requests if len(r.prompt))
    return Trace(str(directory), served, skipped=len(requests) - len(served))


def synthetic_trace(sessions: int = 8, turns: int = 24, seed: int = 1) -> Trace:
    """Sessions of agents that share a growing conversation, each behind its own role.

    An agent's context is its role, then the newest messages of the conversation in order: a prefix of
    what it saw before as long as nothing has fallen out at the front. Sessions run interleaved.
    """
    rng = np.random.default_rng(seed)
    roles = [random_tokens(rng, int(rng.integers(80, 500))) for _ in range(4)]
    streams = [list(_session(rng, roles, turns)) for _ in range(sessions)]
    requests = [request for turn in zip(*streams, strict=True) for request in turn]
    return Trace("synthetic", tuple(requests))


def _session(rng: np.random.Generator, roles: list[Tokens], turns: int) -> Iterator[TraceRequest]:
    messages = [random_tokens(rng, int(rng.integers(50, 400)))]
    first_seen = [0] * len(roles)
    for _ in range(turns):
        agent = int(rng.integers(len(roles)))
        if rng.random() < 0.1:  # the agent's context was summarised: it starts at a later message
            first_seen[agent] = int(rng.integers(first_seen[agent], len(messages)))
        prompt = sum(messages[first_seen[agent] :], roles[agent])
        output = random_tokens(rng, int(rng.integers(40, 400)))
        yield TraceRequest(prompt, output)
        messages.append(output)
