"""An attention backend with nothing to attend to: the model's layers attend by themselves."""

from __future__ import annotations

from typing import Any, NoReturn

from tessera_sglang.compat import AttentionBackend, ForwardBatch


class V4Backend(AttentionBackend):  # type: ignore[misc] # untyped base
    """What SGLang asks of a backend, for :class:`.model.TesseraV4ForCausalLM`."""

    needs_cpu_seq_lens = True  # rows are looked up on the host

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing: the model plans its own passes."""

    def support_triton(self) -> bool:
        """Whether SGLang may prepare a batch with Triton: on a CPU it can not."""
        return False

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: no layer of the model calls it."""
        raise RuntimeError("a layer asks for attention that this model's layers do themselves")

    forward_extend = forward_decode = forward
