"""Runs the agents against a server and counts: tokens, pages, seconds."""

from __future__ import annotations

import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tessera_sglang.memory_pool.keys import page_digest

from .agents import Prompt
from .client import Answer, CacheState, cache_state, flush, generate

Phase = Literal["together", "one by one"]
PHASES: tuple[Phase, ...] = ("together", "one by one")
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """One phase on one server. Sums over the agents, state of the cache right afterwards."""

    index: str
    phase: Phase
    answers: tuple[Answer, ...]
    wall_s: float
    page_tokens: int
    held_tokens: int
    document_pages: int  # distinct physical pages that hold nothing but the document
    document_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were asked for."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Tokens that were found."""
        return sum(answer.cached_tokens for answer in self.answers)

    @property
    def computed_tokens(self) -> int:
        """Tokens that were not found."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def copies(self) -> float:
        """How often the document lies in the pool."""
        return self.document_pages * self.page_tokens / self.document_tokens

    @property
    def ttft_p50_s(self) -> float:
        """Median time to the first token."""
        return statistics.median(answer.ttft_s for answer in self.answers)


def measure(
    url: str,
    index: str,
    phase: Phase,
    prompts: Sequence[Prompt],
    new_tokens: int,
    answered: Callable[[], object],
) -> Measurement:
    """Run one phase on an empty cache; ``answered`` is called after each answer, by any thread."""
    generate(url, prompts[0].tokens[:WARM_UP_TOKENS], (), 1)
    flush(url)

    def ask(prompt: Prompt) -> Answer:
        answer = generate(url, prompt.tokens, (prompt.document,), new_tokens)
        answered()
        return answer

    started = time.perf_counter()
    answers = _all_at_once(ask, prompts) if phase == "together" else [ask(p) for p in prompts]
    wall_s = time.perf_counter() - started
    state = cache_state(url)
    start, end = prompts[0].document
    return Measurement(
        index=index,
        phase=phase,
        answers=tuple(answers),
        wall_s=wall_s,
        page_tokens=state.page_tokens,
        held_tokens=state.held_tokens,
        document_pages=_document_pages(state, prompts),
        document_tokens=end - start,
    )


def _all_at_once(ask: Callable[[Prompt], Answer], prompts: Sequence[Prompt]) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(prompts)
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            answers[number] = ask(prompts[number])
        except Exception as error:
            errors.append(error)

    # daemons: on Ctrl-C nobody waits for answers of a server that is being ended
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answer for answer in answers if answer is not None]


def _document_pages(state: CacheState, prompts: Sequence[Prompt]) -> int:
    """Distinct physical pages whose tokens are a page of the document.

    The same question to either side: pages cut as a prefix tree cuts them, at each agent's own
    offset in its prompt, and pages cut from the document's first token on.
    """
    size = state.page_tokens
    wanted: set[str] = set()
    for prompt in prompts:
        start, end = prompt.document
        for first in {start, -(-start // size) * size}:
            for page in range(first, end - size + 1, size):
                tokens = array("q", prompt.tokens[page : page + size])
                wanted.add(page_digest(tokens.tobytes()))
    return len({page for digest, page in state.cached_pages if digest in wanted})
