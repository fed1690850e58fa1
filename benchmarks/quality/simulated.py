"""What others reuse, simulated in ``transformers``: for comparison only, never in the product.

    model = Simulator.load(path)
    cache = model.assembled(tokens, [Moved(donor, 10, 200, to=50), ...])
    scored = model.score(cache, question, answer, of=...)

KV of a document is taken from another request (the *donor*), moved to its place by rotating keys by the
difference of positions, and put between what is computed in place, in prompt order: every token that
is computed sees all KV before it, whoever computed that. A donor ``[root | body]`` makes this the
visibility of spans, so the simulation can be held against the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera_sglang.verify.client import Scored

CHUNK = 1024  # tokens computed at a time: bounds the scores of attention in memory


@dataclass(frozen=True, slots=True)
class Moved:
    """Tokens [start, end) of a donor's cache, whose first one is wanted at ``to`` of the prompt."""

    donor: Any  # DynamicCache
    start: int
    end: int
    to: int


@dataclass(frozen=True, slots=True)
class Simulator:
    """A model in float32, and how its cache holds positions."""

    model: Any
    frequencies: Tensor  # [rope / 2] radians a token
    latent: bool  # MLA: a cache of latents and, in place of values, rotated channels

    @classmethod
    def load(cls, path: Path) -> Simulator:
        """A checkpoint. Raises what transformers raises."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        frequencies = model.model.rotary_emb.inv_freq.double()
        return cls(model, frequencies, model.config.model_type.startswith("deepseek"))

    def computed(self, tokens: Sequence[int]) -> Any:
        """The cache that a plain request leaves behind."""
        return self.assembled(tokens, [])

    def assembled(self, tokens: Sequence[int], parts: Sequence[Moved]) -> Any:
        """The cache of ``tokens``: the parts, which ascend, as they were, the rest computed."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        at = 0
        for part in parts:
            self._compute(cache, tokens[at : part.to])
            self._append(cache, part)
            at = part.to + part.end - part.start
        self._compute(cache, tokens[at:])
        return cache

    @torch.inference_mode()
    def score(
        self, cache: Any, question: Sequence[int], answer: Sequence[int], of: Sequence[int]
    ) -> Scored:
        """As the server scores ``answer`` behind the cache and ``question``; the cache stays."""
        size = cache.get_seq_length()
        logits = self._forward(cache, [*question, *answer[:-1]], keep=len(answer))
        cache.crop(size - cache.get_seq_length())
        logprobs = torch.log_softmax(logits.double(), dim=-1)  # [answer, vocabulary]
        best = logprobs.max(dim=-1)
        return Scored(
            chosen=tuple(logprobs[torch.arange(len(answer)), list(answer)].tolist()),
            top=tuple({int(t): float(p)} for p, t in zip(best.values, best.indices, strict=True)),
            of=tuple(dict(zip(of, row, strict=True)) for row in logprobs[:, list(of)].tolist()),
        )

    def _compute(self, cache: Any, tokens: Sequence[int]) -> None:
        for at in range(0, len(tokens), CHUNK):
            self._forward(cache, tokens[at : at + CHUNK], keep=1)

    @torch.inference_mode()
    def _forward(self, cache: Any, tokens: Sequence[int], *, keep: int) -> Tensor:
        """Logits of the last ``keep`` tokens, [keep, vocabulary] float32."""
        first = cache.get_seq_length()
        output = self.model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=torch.arange(first, first + len(tokens))[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        found: Tensor = output.logits[0].float()
        return found

    @torch.inference_mode()
    def _append(self, cache: Any, part: Moved) -> None:
        for number, layer in enumerate(part.donor.layers):
            keys, values = (
                tensor[..., part.start : part.end, :] for tensor in (layer.keys, layer.values)
            )
            if self.latent:
                values = self._rotated(values, part.to - part.start)
            else:
                keys = self._rotated(keys, part.to - part.start)
            cache.update(keys, values, number)

    def _rotated(self, keys: Tensor, by: int) -> Tensor:
        """Keys [1, H, T, rope], whose channels pair with those half the width further on, moved on."""
        angles = self.frequencies * by
        cos, sin = angles.cos().float(), angles.sin().float()  # [rope / 2]
        first, second = keys.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
