"""Requests of different lengths through the model, cut where states are saved.

The model takes a batch of one length. Requests that have equally many tokens, and bring equally many,
share a forward pass; all others have passes of their own.

A state can be saved only where a request stands: a window goes on, and what it dropped is gone. So a
pass that would run over a boundary where a state is wanted ends there, and another takes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from .cache import PooledCache
from .requests import Request
from .storage import LayerStorage


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens for one request, behind those that it has."""

    request: Request
    ids: torch.Tensor  # int64 [tokens], at least one


def run(
    model: Any, storage: LayerStorage, work: Sequence[Work], *, save_every_tokens: int = 0
) -> list[torch.Tensor]:
    """Logits of each request's tokens, [tokens, vocabulary], in the order of ``work``.

    ``model`` is a ``DeepseekV4ForCausalLM``. States are saved at multiples of ``save_every_tokens``,
    which is a whole number of pages; 0 for none. Requests must be distinct and have reserved their
    pages; raises ValueError where not.
    """
    if save_every_tokens % storage.page_tokens:
        raise ValueError(
            f"states are saved at the ends of pages of {storage.page_tokens} tokens, so not every "
            f"{save_every_tokens}"
        )
    if len({one.request.slot for one in work}) != len(work):
        raise ValueError("a request stands twice in one call; give it all its tokens at once")
    logits: list[list[torch.Tensor]] = [[] for _ in work]
    pieces = [
        [(index, piece) for piece in cut(one.ids, one.request.length, save_every_tokens)]
        for index, one in enumerate(work)
    ]
    for turn in zip_longest(*pieces):
        for batch in _batches(work, [piece for piece in turn if piece is not None]):
            requests = [work[index].request for index, _ in batch]
            found = _forward(model, storage, requests, torch.stack([ids for _, ids in batch]))
            for (index, _), rows in zip(batch, found, strict=True):
                logits[index].append(rows)
            if save_every_tokens and requests[0].length % save_every_tokens == 0:
                for request in requests:
                    request.save()
    return [torch.cat(rows) for rows in logits]


def cut(ids: torch.Tensor, start: int, every: int) -> Iterator[torch.Tensor]:
    """Tokens that come behind ``start``, in pieces that end at multiples of ``every`` (0 for none)."""
    if not every:
        yield ids
        return
    while len(ids):
        piece = every - start % every
        yield ids[:piece]
        ids, start = ids[piece:], start + piece


_Piece = tuple[int, torch.Tensor]  # which of the work, and tokens of it


def _batches(work: Sequence[Work], pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces that may share a pass."""
    batches: dict[tuple[int, int, int], list[_Piece]] = {}
    for index, ids in pieces:
        request = work[index].request
        alike = (request.length, request.own_length, len(ids))
        batches.setdefault(alike, []).append((index, ids))
    return list(batches.values())


@torch.inference_mode()
def _forward(
    model: Any, storage: LayerStorage, requests: Sequence[Request], ids: torch.Tensor
) -> torch.Tensor:
    """One pass; ``ids`` is int64 [requests, tokens]. Returns [requests, tokens, vocabulary]."""
    logits: torch.Tensor = advance(model, storage, requests, ids).logits
    return logits


def advance(
    model: Any, storage: LayerStorage, requests: Sequence[Request], ids: torch.Tensor
) -> Any:
    """One pass of requests that have equally many tokens; ``ids`` is int64 [requests, tokens].

    ``model`` may also be the part without a head, a ``DeepseekV4Model``. Returns what it returns. Raises
    ValueError for a request that has too few pages.
    """
    start, tokens = requests[0].length, ids.shape[1]
    pages = storage.pool.geometry.pages(requests[0].own_length + tokens)
    if any(len(request.pages) < pages for request in requests):
        raise ValueError(
            f"a request has fewer than {pages} pages; reserve them for {tokens} tokens"
        )
    slots = np.array([request.slot for request in requests])
    table = np.stack([request.pages[:pages] for request in requests])
    parts = [request.parts for request in requests] if requests[0].parts else ()
    cache = PooledCache(storage, slots, table, start, parts)
    output = model(input_ids=ids, past_key_values=cache, use_cache=True)
    for request in requests:
        request.length += tokens
    return output
