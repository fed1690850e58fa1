"""SGLang's own attention backends inside ours, so that plain batches run exactly the stock path.

SGLang asks its backend for more than attention: whether it needs lengths on the host, where its reads
of shared tables end, metadata for prefill graphs. For a plain batch the right answers are those of the
stock backend, so `adopt` takes them over; and MLA layers choose their forward method by a backend's
name, so `forward_method` gives them the stock one, and `keep_prefix_chunks` leaves it every way of
prefilling that it has.
"""

from __future__ import annotations

from typing import Any

from .compat import (
    PREFIX_CHUNK_BACKENDS,
    AttentionBackend,
    AttentionBackendRegistry,
    absorbed_mla,
    attention_backends,
    build_backend,
    current_backend,
    default_backend_of,
    get_server_args,
    hybrid_backend,
    picks_keys,
    verifies_as_decode,
)
from .config import BACKEND


class StockBackend:
    """The backend that SGLang would have used, and what it is called in each phase."""

    def __init__(self, backend: Any, prefill: str, decode: str) -> None:
        self.backend = backend
        self.prefill = prefill
        self.decode = decode

    def name(self, forward_mode: Any) -> str:
        """What serves a batch of this mode."""
        as_decode = forward_mode.is_decode_or_idle() or (
            forward_mode.is_target_verify() and verifies_as_decode()
        )
        return self.decode if as_decode else self.prefill


def build_stock(runner: Any, prefill: str, decode: str) -> StockBackend:
    """Construct SGLang's backends for plain batches."""
    backend = build_backend(runner, prefill)
    if decode != prefill:
        backend = hybrid_backend(runner, backend, build_backend(runner, decode))
    return StockBackend(backend, prefill, decode)


def stand_aside(stock: StockBackend) -> Any:
    """The stock backend itself, for a server on which nobody reads spans."""
    backend = stock.backend
    backend.plain_backend_name = lambda batch: stock.name(batch.forward_mode)
    return backend


def adopt(ours: Any, stock: Any) -> None:
    """Answer as ``stock`` does wherever ``ours`` says nothing of its own.

    Attributes of SGLang's base class would hide the stock ones behind their defaults, so they are set
    on the instance; what only the stock backend has is found by `TesseraBackend.__getattr__`.
    """
    own = type(ours).__dict__
    for name, value in AttentionBackend.__dict__.items():
        if name.startswith("_") and name != "_snapshot_prefill_shared_reads":
            continue
        if name not in own and not isinstance(value, property):
            setattr(ours, name, getattr(stock, name))


def keep_prefix_chunks(*args: Any, **kwargs: Any) -> None:
    """Before ``maybe_disable_chunked_prefix_cache``: whether MLA may prefill over a cached prefix in
    expanded chunks.

    SGLang allows it by the prefill backend's name, for good, and before any layer is built. Plain
    prefills are the inner backend's, so ours is allowed where that one is.
    """
    if BACKEND not in attention_backends() or BACKEND in PREFIX_CHUNK_BACKENDS:
        return
    server_args = get_server_args()
    if not picks_keys(server_args) and default_backend_of(server_args) in PREFIX_CHUNK_BACKENDS:
        PREFIX_CHUNK_BACKENDS.append(BACKEND)


def register_forward_method() -> None:
    """MLA layers ask `forward_method` under our name."""
    AttentionBackendRegistry.register(BACKEND, forward_method)


def forward_method(attention: Any, forward_batch: Any) -> Any:
    """How an MLA layer computes a batch: the stock way, or absorbed, so that K/V are never expanded."""
    name = getattr(current_backend(), "plain_backend_name", lambda batch: None)(forward_batch)
    if name is None:
        return absorbed_mla(attention, forward_batch)
    attention.current_attention_backend = name  # what the layer's fused paths go by
    return AttentionBackendRegistry.get_handler(name)(attention, forward_batch)
