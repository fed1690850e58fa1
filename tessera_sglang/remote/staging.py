"""Memory that engines read and write, in the shape in which they know SGLang's host pool.

To an engine it is a pool in host memory of one layer whose pages are one token long; a page is a whole
record. The first half of its slots is for reads, the other one for writes.
"""

from __future__ import annotations

import torch

from .record import BLOCK

STAGING_BYTES = 64 << 20  # for each direction
MOST_SLOTS = 128  # pages of one call: what SGLang's controller passes, and engines size buffers for


class StagingPool:
    """What HiCache backends use of a ``HostKVCache``; attribute and method names are theirs."""

    layout = "page_first"
    page_size = 1
    dtype = torch.uint8
    device = "cpu"
    layer_num = 1
    pin_memory = False
    allocator = None
    dcp_rank = 0
    dcp_size = 1
    stores_page_envelope = False

    def __init__(self, record_bytes: int) -> None:
        """``record_bytes``: a multiple of BLOCK."""
        self.slots = max(1, min(MOST_SLOTS, STAGING_BYTES // record_bytes))
        self.page_num = 2 * self.slots
        self.size_per_token = record_bytes
        memory = torch.zeros(self.page_num * record_bytes + BLOCK, dtype=torch.uint8)
        start = -memory.data_ptr() % BLOCK
        self.kv_buffer = memory[start : start + self.page_num * record_bytes].view(
            self.page_num, record_bytes
        )  # uint8 [page_num, record_bytes], starting on a block
        self.rows = [memoryview(row.numpy()) for row in self.kv_buffer]

    def get_size_per_token(self) -> int:
        """Bytes of a page."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """Bytes of what an engine stores under one key."""
        return self.size_per_token

    def get_page_buffer_element_size(self) -> int:
        """Bytes of what an engine stores under one key."""
        return self.size_per_token

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of slots, one each."""
        base = self.kv_buffer.data_ptr()
        pointers = [base + index * self.size_per_token for index in indices.tolist()]
        return pointers, [self.size_per_token] * len(pointers)

    def get_data_page(self, index: torch.Tensor | int, flat: bool = True) -> torch.Tensor:
        """A slot: uint8 [record_bytes], a view."""
        return self.kv_buffer[int(index)]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Memory for one page: uint8 [record_bytes]."""
        return torch.zeros(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: torch.Tensor | int, data_page: torch.Tensor) -> None:
        """Copy a page that an engine brought elsewhere."""
        self.kv_buffer[int(index)].copy_(data_page.reshape(-1).view(torch.uint8))

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """All of its memory."""
        return [self.kv_buffer]

    def is_stride_page_aligned(self, alignment: int) -> bool:
        """Whether every slot starts at a multiple of it."""
        return self.kv_buffer.data_ptr() % alignment == 0 == self.size_per_token % alignment
