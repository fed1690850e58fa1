"""One run on one side: what the client timed and what the server counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera_sglang.bench.agents import Request
from tessera_sglang.bench.client import Requests, drive
from tessera_sglang.bench.metrics import Metrics
from tessera_sglang.bench.sides import TESSERA

from .state import State, state_of


@dataclass(frozen=True, slots=True)
class Run:
    """Times are the client's. Shares are of prompt tokens."""

    requests: int
    prompt_tokens: int
    cached_tokens: int  # as answers say
    computed_tokens: int  # as the engine counts its prefills: spans, roots and linked pages too
    prefix_hit_tokens: int
    span_hit_tokens: int
    span_prefills: int
    evicted_pages: int | None  # None where SGLang's tree serves
    held_tokens: int  # of the pool, right afterwards
    wall_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    throughput_tokens_per_s: float  # prompt and output

    @property
    def cached_share(self) -> float:
        """Hit rate of all kinds."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def prefix_hit_share(self) -> float:
        """Hit rate of plain prefixes."""
        return self.prefix_hit_tokens / self.prompt_tokens

    @property
    def span_hit_share(self) -> float:
        """Hit rate of spans."""
        return self.span_hit_tokens / self.prompt_tokens


def run(
    url: str,
    side: str,
    model: Path,
    requests: Sequence[Request],
    *,
    seed: int = 1,
    arguments: Sequence[str] = (),
) -> Run:
    """All requests on an empty cache, arriving together unless the client's ``arguments`` say else.

    Raises:
        ClientError: a request was not answered.
    """
    command = (
        *("--backend", "sglang", "--model", str(model), "--tokenizer", str(model)),
        # its own warm-up would be counted; a round that is not counted does it
        *("--warmup-requests", "0", *arguments),
    )
    before = state_of(url)
    sent = Requests(requests, spans=side == TESSERA)
    metrics = drive(url, command, seed=seed, requests=sent)
    return read(metrics, before, state_of(url))


def read(metrics: Metrics, before: State, after: State) -> Run:
    """What the client said, and what the server counted between two looks."""
    cached = metrics.cached_tokens or 0
    prefix, spans = cached, 0  # SGLang's tree knows prefixes alone
    if after.prefix_hit_tokens is not None and after.span_hit_tokens is not None:
        prefix = after.prefix_hit_tokens - (before.prefix_hit_tokens or 0)
        spans = after.span_hit_tokens - (before.span_hit_tokens or 0)
    evicted = after.evicted_pages
    return Run(
        requests=metrics.requests,
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=cached,
        computed_tokens=after.computed_tokens - before.computed_tokens,
        prefix_hit_tokens=prefix,
        span_hit_tokens=spans,
        span_prefills=after.span_prefills - before.span_prefills,
        evicted_pages=None if evicted is None else evicted - (before.evicted_pages or 0),
        held_tokens=after.held_tokens,
        wall_s=metrics.duration_s,
        ttft_p50_s=metrics.ttft_p50_s,
        ttft_p99_s=metrics.ttft_p99_s,
        itl_p50_s=metrics.itl_p50_s,
        throughput_tokens_per_s=metrics.throughput_tokens_per_s,
    )
