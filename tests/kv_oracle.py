"""What a row must hold, position by position, from the Hugging Face model alone.

    layers = expected_rows(model, OracleRequest(prompt, spans), generated, page_size=64, link_pages=1,
                           root=root)
    layers[2].rows       # [tokens, width] float32: latent and rotary key, or keys and values
    layers[2].positions  # [tokens]: where each token's rotary phase stands

Hidden states come from the sequence that `oracle` lays out, so they have seen what a reader's tokens
may see. Keys are taken before their rotation and turned by transformers' own functions to the position
at which the pool keeps them: a shared page's behind the root, all others' in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from oracle import OracleRequest, extend, one_thread, shared_runs
from transformers import PreTrainedModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.llama import modeling_llama as llama


@dataclass(frozen=True)
class Layer:
    rows: torch.Tensor  # [tokens, width] float32
    positions: list[int]  # [tokens]


@one_thread()
@torch.inference_mode()
def expected_rows(
    model: PreTrainedModel,
    request: OracleRequest,
    generated: Sequence[int],
    *,
    page_size: int,
    link_pages: int,
    root: Sequence[int],
) -> list[Layer]:
    """Every layer's row of a request that generated so much, in the order of its row."""
    extended = extend(request, page_size=page_size, link_pages=link_pages, root=root)
    count = len(extended.tokens)
    tokens = torch.tensor([[*extended.tokens, *generated]])
    after = range(len(request.prompt), len(request.prompt) + len(generated))
    positions = torch.tensor([[*extended.positions, *after]])
    sees = torch.zeros(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    sees[:count, :count] = extended.sees
    sees[count:, :count] = extended.generated_sees
    sees[count:, count:] = torch.ones(len(generated), len(generated)).tril().bool()
    mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[None, None]
    seen = _Outputs(model)
    model(input_ids=tokens, position_ids=positions, attention_mask=mask)
    seen.remove()

    at: list[int] = []  # index into `tokens` of each row position
    stored: list[int] = []
    begin = 0
    for run in shared_runs(request, page_size=page_size, link_pages=link_pages):
        behind_root = range(len(root) + run.visible - run.start, len(root) + run.end - run.start)
        at += [begin + place for place in behind_root]
        stored += behind_root
        begin += len(root) + run.end - run.start
    at += range(begin, tokens.shape[1])
    stored += positions[0, begin:].tolist()
    return [Layer(rows, stored) for rows in seen.rows(at, stored)]


class _Outputs:
    """Outputs of the modules that make a layer's keys, of one forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.mla = hasattr(model.model.layers[0].self_attn, "kv_a_layernorm")
        names = ("kv_a_layernorm", "kv_a_proj_with_mqa") if self.mla else ("k_proj", "v_proj")
        self._seen: list[tuple[torch.Tensor, ...]] = []
        self._handles = []
        for layer in model.model.layers:
            found: dict[str, torch.Tensor] = {}
            for name in names:
                module = getattr(layer.self_attn, name)
                self._handles.append(module.register_forward_hook(self._keep(found, name)))
            self._handles.append(
                layer.register_forward_hook(
                    lambda *args, found=found: self._seen.append(tuple(found[n] for n in names))
                )
            )

    @staticmethod
    def _keep(found: dict[str, torch.Tensor], name: str) -> Any:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            found[name] = output[0].float().clone()  # [T, channels]

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def rows(self, at: list[int], positions: list[int]) -> list[torch.Tensor]:
        make = self._latent_rows if self.mla else self._head_rows
        return [make(one[at], other[at], positions) for one, other in self._seen]

    def _latent_rows(
        self, latent: torch.Tensor, projected: torch.Tensor, positions: list[int]
    ) -> torch.Tensor:
        """[tokens, latent + rope]. A frequency turns two neighbours; transformers moves the first
        members of all pairs to the front when it rotates, the pool keeps them where they were."""
        keys = projected[None, None, :, latent.shape[1] :]  # [1, 1, T, rope]
        cos, sin = self._turns(keys, positions)
        moved = deepseek.apply_rotary_pos_emb_interleave(keys, keys, cos, sin)[1][0, 0]
        pairs = torch.stack(moved.chunk(2, dim=-1), dim=-1)  # [T, rope/2, 2]
        return torch.cat([latent, pairs.flatten(1)], dim=-1)

    def _head_rows(
        self, keys: torch.Tensor, values: torch.Tensor, positions: list[int]
    ) -> torch.Tensor:
        """[tokens, keys of all heads + values of all heads]. The halves of a head are paired."""
        heads = keys.unflatten(-1, (-1, self.model.config.head_dim)).transpose(0, 1)[None]
        cos, sin = self._turns(heads, positions)
        moved = llama.apply_rotary_pos_emb(heads, heads, cos, sin)[1][0]  # [H, T, D]
        return torch.cat([moved.transpose(0, 1).flatten(1), values], dim=-1)

    def _turns(self, x: torch.Tensor, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.model.model.rotary_emb(x, torch.tensor([positions]))
        return cos, sin
