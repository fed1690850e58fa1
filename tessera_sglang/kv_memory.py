"""The KV buffers that SGLang allocated, as pages of bytes: what forks, latent checks and lower
tiers need of them.

SGLang keeps one tensor per layer (MLA) or two (keys, values), rows of tokens one behind the other, so
that a page is a contiguous slice of each. Pools with another layout are not touched: there is no
``KvMemory`` for them, and what needs one is off.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera_sglang.memory_pool.model_geometry import ModelConfigError, read_model
from tessera_sglang.memory_pool.rows import KvFormat
from tessera_sglang.memory_pool.storage import equal_units

from .compat import MHATokenToKVPool, MLATokenToKVPool

logger = logging.getLogger(__name__)

_FORMATS = {
    torch.bfloat16: KvFormat.BF16,
    torch.float16: KvFormat.FP16,
    torch.float32: KvFormat.FP32,
}


class KvMemory:
    """Pages of a pool whose layout is known."""

    def __init__(self, buffers: list[torch.Tensor], page_size: int) -> None:
        """``buffers`` are [slots, ...] each, contiguous, with whole pages of ``page_size`` slots."""
        self._pages = [
            buffer.view(torch.uint8).view(len(buffer) // page_size, page_size, -1)
            for buffer in buffers
        ]

    @property
    def layout(self) -> list[tuple[int, int]]:
        """Rows of a page and bytes of a row, buffer by buffer: how :meth:`read` lays a page out."""
        return [(pages.shape[1], pages.shape[2]) for pages in self._pages]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return sum(pages[0].numel() for pages in self._pages)

    def copy_rows(self, source_page: int, target_page: int, rows: int) -> None:
        """Copy the first ``rows`` tokens of a page in every layer. Slices only, nothing waits."""
        for pages in self._pages:
            pages[target_page, :rows] = pages[source_page, :rows]

    def read(self, pages: npt.NDArray[np.int64]) -> torch.Tensor:
        """Copies of whole pages on the host: uint8 [pages, page_bytes], layer by layer in a page.

        Waits for the device.
        """
        chosen = torch.from_numpy(pages).to(self._pages[0].device)
        parts = [layer.index_select(0, chosen).flatten(1) for layer in self._pages]
        return torch.cat(parts, dim=1).cpu()

    def write(self, pages: npt.NDArray[np.int64], data: torch.Tensor) -> None:
        """Fill pages with what :meth:`read` gave, uint8 [pages, page_bytes], on the host."""
        device = self._pages[0].device
        chosen = torch.from_numpy(pages).to(device)
        at = 0
        for layer in self._pages:
            width = layer[0].numel()
            part = data[:, at : at + width].to(device, non_blocking=True)
            layer.index_copy_(0, chosen, part.reshape(len(pages), *layer.shape[1:]))
            at += width

    def equal(
        self, pages: npt.NDArray[np.int32], others: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Whether pages hold the same bytes in every layer, pair by pair."""
        return equal_units(self._pages, pages, others)


def kv_memory(pool: Any, page_size: int) -> KvMemory | None:
    """The pages of SGLang's pool, None where its layout is not one that is known."""
    if type(pool) is MLATokenToKVPool:
        buffers = list(pool.kv_buffer)
    elif type(pool) is MHATokenToKVPool and not pool.use_hnd:
        buffers = [*pool.k_buffer, *pool.v_buffer]
    else:
        return None
    whole = all(b.is_contiguous() and len(b) % page_size == 0 for b in buffers)
    return KvMemory(buffers, page_size) if buffers and whole else None


def compare_with_ledger(
    memory: KvMemory, *, config: Any, dtype: torch.dtype, page_size: int, tensor_parallel: int
) -> None:
    """Log what a page costs, and warn where that is not what ``tessera-sglang layout`` says.

    ``config`` is the model's Hugging Face configuration. A model that the ledger does not know is
    served like any other.
    """
    try:
        geometry = read_model(config.to_dict(), type(config).__name__).geometry(
            _FORMATS.get(dtype), page_tokens=page_size, tensor_parallel=tensor_parallel
        )
    except (ModelConfigError, ValueError) as error:
        logger.info("paged tier: %d B a page; not in the ledger: %s", memory.page_bytes, error)
        return
    if geometry.page_bytes == memory.page_bytes:
        logger.info("paged tier: %d B a page, as the ledger has it", memory.page_bytes)
    else:
        logger.warning(
            "paged tier: %d B a page, but the ledger has %d: tessera-sglang layout does not "
            "describe this server",
            memory.page_bytes,
            geometry.page_bytes,
        )
