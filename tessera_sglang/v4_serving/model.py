"""DeepSeek-V4 as a model class for SGLang: transformers' own model, a request at a time.

Forward passes end at page boundaries, where the state is saved, and where a shared run comes to be seen:
a prompt runs page by page, whatever the chunks of SGLang's prefill are, so an answer does not depend on
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

from tessera_sglang.compat import LogitsProcessor, attention_backends
from tessera_sglang.config import BACKEND
from tessera_sglang.reader import ReaderId
from tessera_sglang.v4 import LayerStorage
from tessera_sglang.v4.forward import advance

from .config import as_read
from .rows import Rows, Turn


class TesseraV4ForCausalLM(nn.Module):
    """What SGLang asks of a model class: built from a config, filled with weights, run on a batch."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        if BACKEND not in attention_backends():
            raise ValueError("DeepSeek-V4 on a CPU needs --attention-backend tessera")
        if quant_config is not None:
            raise ValueError(
                f"DeepSeek-V4 on a CPU runs unquantised weights, not {quant_config.get_name()}"
            )
        self.config = as_read(config)
        self.model = DeepseekV4ForCausalLM(self.config).requires_grad_(False).eval()
        self.logits_processor = LogitsProcessor(self.config)
        self._storage: LayerStorage | None = None
        self._rows: Rows | None = None
        self._table: Tensor | None = None

    def bind(self, storage: LayerStorage, rows: Rows, table: Tensor) -> None:
        """The pool to run on; ``table`` is SGLang's ``req_to_token``."""
        self._storage, self._rows, self._table = storage, rows, table

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill all tensors. ValueError where a name is missing or unknown."""
        found = dict(weights)
        own = self.model.state_dict()
        if found.keys() != own.keys():
            found = self._as_transformers_reads_them(own.keys() - found.keys())
        self.model.load_state_dict(found)

    def _as_transformers_reads_them(self, missing: Iterable[str]) -> dict[str, Tensor]:
        """Under the names of the published checkpoint, which transformers translates."""
        path = self.config.name_or_path
        model, report = DeepseekV4ForCausalLM.from_pretrained(
            path, dtype=torch.get_default_dtype(), output_loading_info=True
        )
        wrong = {kind: sorted(names) for kind, names in report.items() if names}
        if wrong:
            raise ValueError(
                f"{path}: weights do not fit, by transformers' account {wrong}; "
                f"first missing by name: {sorted(missing)[:3]}"
            )
        state: dict[str, Tensor] = model.state_dict()
        return state

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **kwargs: Any
    ) -> Any:
        """Logits, as SGLang's processor picks them. ``input_ids`` is [tokens of all requests]."""
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise ValueError(
                f"the batch brings {unknown}, which DeepSeek-V4 on a CPU does not take"
            )
        hidden = self._hidden(input_ids.long(), forward_batch)
        return self.logits_processor(input_ids, hidden, self.model.lm_head, forward_batch)

    def _hidden(self, ids: Tensor, forward_batch: Any) -> Tensor:
        """Of the last layer, [tokens, channels]."""
        storage, rows, table = self._storage, self._rows, self._table
        assert storage is not None, "no pool was bound"
        assert rows is not None
        assert table is not None
        turns = list(turns_of(forward_batch, table, storage.page_tokens))
        if not turns:
            return torch.empty((0, self.config.hidden_size), dtype=self.model.dtype)
        hidden: list[Tensor] = []
        at = 0
        for row, turn in zip(rows.begin(turns), turns, strict=True):
            for piece in row.pieces(storage, ids[at : at + turn.tokens]):
                output = advance(self.model.model, storage, [row.request], piece[None])
                hidden.append(output.last_hidden_state[0])
                rows.save(row)
            at += turn.tokens
        return torch.cat(hidden)


def turns_of(forward_batch: Any, table: Tensor, page_tokens: int) -> Iterator[Turn]:
    """Rows of a batch, from the lists that SGLang keeps on the host; ``table`` has a row's tokens."""
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return
    lengths: list[int] = forward_batch.seq_lens_cpu.tolist()
    tokens = [1] * len(lengths) if mode.is_decode() else forward_batch.extend_seq_lens_cpu
    rows: list[int] = forward_batch.req_pool_indices.tolist()
    for row, length, new, rid in zip(rows, lengths, tokens, forward_batch.rids, strict=True):
        pages = (table[row, :length:page_tokens] // page_tokens).cpu().numpy().astype(np.int64)
        layout = rid.layout if isinstance(rid, ReaderId) else None
        yield Turn(row, length - new, new, pages, layout)
