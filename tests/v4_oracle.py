"""What transformers' DeepSeek-V4 answers on its own cache, in the passes that a server takes.

A prompt runs page by page, an answer token by token. Where a conversation goes on, the cache does: it is
the run that was never interrupted. The indexer's top-k is no continuous function, so shapes matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

PAGE = 128
TIE = 0.02
"""Logits this close to the best one may win where a pass has another shape; their deviation is 1.7."""


def load_v4(directory: Path) -> DeepseekV4ForCausalLM:
    """The model that `models.write_v4` wrote."""
    model = DeepseekV4ForCausalLM(DeepseekV4Config.from_pretrained(directory)).eval()
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model


@dataclass
class Talk:
    """A conversation on transformers' own cache."""

    model: DeepseekV4ForCausalLM
    length: int = 0
    told: list[int] = field(default_factory=list)  # all tokens of it
    cache: DynamicCache = field(init=False)
    last: torch.Tensor = field(init=False)  # logits behind the last token

    def __post_init__(self) -> None:
        self.cache = DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def hear(self, tokens: list[int]) -> None:
        """Tokens of a prompt, cut at the ends of pages."""
        while tokens:
            piece = PAGE - self.length % PAGE
            self.last = self._pass(tokens[:piece])
            tokens = tokens[piece:]

    @torch.inference_mode()
    def check(self, answer: list[int]) -> int:
        """Assert that each token is the best one, or as good; returns how many were not the best.

        What was answered is taken as told, so that later ones are judged in its context.
        """
        ties = 0
        for number, token in enumerate(answer):
            best = int(self.last.argmax())
            short = float(self.last[best] - self.last[token])
            assert short <= TIE, (
                f"answer {number} at {self.length}: {token}, not {best}, by {short}"
            )
            ties += token != best
            self.last = self._pass([token])
        return ties

    def _pass(self, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens])
        logits: torch.Tensor = self.model(input_ids=ids, past_key_values=self.cache).logits
        self.length += len(tokens)
        self.told += tokens
        return logits[0, -1]
