"""The oracle's log-probabilities of a prompt's own tokens, behind its spans."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from oracle import OracleRequest, extend, one_thread
from transformers import PreTrainedModel


@one_thread()
@torch.inference_mode()
def score(
    model: PreTrainedModel,
    request: OracleRequest,
    *,
    page_size: int,
    link_pages: int,
    root: Sequence[int],
    start: int,
) -> torch.Tensor:
    """Log-softmax that each of ``prompt[start:]`` was drawn from, given all before it.

    ``start`` is behind the first token that follows the last span. float32 [tokens, vocab]
    """
    last = max((end for _, end in request.spans), default=0)
    if start <= last:
        raise ValueError(f"start {start} must be past the end of the last span, {last}")
    extended = extend(request, page_size=page_size, link_pages=link_pages, root=root)
    mask = torch.zeros(extended.sees.shape).masked_fill(~extended.sees, float("-inf"))
    tokens = len(request.prompt) - start
    output = model(
        input_ids=torch.tensor([extended.tokens]),
        position_ids=torch.tensor([extended.positions]),
        attention_mask=mask[None, None],
        logits_to_keep=tokens + 1,
    )
    return torch.log_softmax(output.logits[0, :-1].float(), dim=-1)
