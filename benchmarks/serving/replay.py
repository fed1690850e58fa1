"""One request after the other on a cache that stays warm between them.

For what `compare` can not say: how the hit rate moves along a sequence of requests. Nothing is flushed;
do that with `tessera_sglang.demo.client.flush` where the sequence begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera_sglang.bench.agents import Request
from tessera_sglang.bench.sides import TESSERA
from tessera_sglang.demo.client import Answer, generate


def replay(
    url: str,
    side: str,
    requests: Sequence[Request],
    answered: Callable[[], object] = lambda: None,
    *,
    link_pages: int | None = None,
) -> list[Answer]:
    """Answers in the order of the requests; ``answered`` is called after each.

    ``link_pages`` overrides the server's.

    Raises:
        RequestError: a request was not answered.
    """
    found = []
    for request in requests:
        spans = request.spans if side == TESSERA else ()
        tokens, new_tokens = request.input_ids, request.output_tokens
        found.append(generate(url, tokens, spans, new_tokens, link_pages=link_pages))
        answered()
    return found


def hit_rates(answers: Sequence[Answer], width: int) -> list[float]:
    """Cached by prompt tokens of each ``width`` answers in a row; the last may be fewer."""
    return [hit_rate(answers[first : first + width]) for first in range(0, len(answers), width)]


def hit_rate(answers: Sequence[Answer]) -> float:
    """Cached by prompt tokens of all of them."""
    return sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)
