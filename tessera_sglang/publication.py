"""Forward passes as transactions over request rows: see :mod:`memory_pool.commit`.

SGLang plans a step ahead of what runs: its ``kv_committed_len`` counts tokens whose pass has not been
launched yet. So the cache asks here how far a row is valid. A pass is opened when the scheduler runs a
batch, and committed when the forward has been launched: whoever is handed the rows later reads them
behind it in stream order. An exception rolls it back.

A row begins with what its match lent it, when a pass or a publication first meets it, and ends when
SGLang releases it (finished, aborted or retracted).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tessera_sglang.memory_pool.commit import CommitRecord, Pass, Residency, RowSchema
from tessera_sglang.memory_pool.runs import PageIds, Path

from .compat import MHATokenToKVPool, MLATokenToKVPool, Req

ATTRIBUTE = "tessera_residency"  # of a Req that has a row


class Publication:
    """One per cache: what is valid of each row, and what a publication says of it."""

    def __init__(self, schema: RowSchema) -> None:
        self.schema = schema
        self.withheld = 0  # publications asked of rows that were not committed so far; only grows

    def residency(self, req: Req) -> Residency:
        """The row of a request that has one; begun with what its match lent."""
        row: Residency | None = getattr(req, ATTRIBUTE, None)
        if row is None:
            row = Residency(lent_tokens(req.last_node, self.schema.page_tokens))
            setattr(req, ATTRIBUTE, row)
        return row

    def open(self, writes: Iterable[tuple[Req, int, int]]) -> Pass:
        """A pass that writes row positions ``start .. end`` of each request."""
        opened = Pass()
        for req, start, end in writes:
            opened.write(self.residency(req), start, end)
        return opened

    def publishable(self, req: Req, up_to: int) -> int:
        """Tokens of the row that may be published when SGLang asks for ``up_to``."""
        committed = self.residency(req).committed_tokens
        if committed < up_to:
            self.withheld += 1
        return min(committed, up_to)

    def record(self, req: Req, tokens: tuple[int, int], pages: PageIds) -> None:
        """Say what was published: row positions ``tokens``, half-open, in these physical pages."""
        row = self.residency(req)
        row.publish(CommitRecord(self.schema, tokens, pages, row.committed_tokens))

    def release(self, req: Req) -> None:
        """The row is gone: nothing of it is valid for whoever gets it next."""
        row: Residency | None = getattr(req, ATTRIBUTE, None)
        if row is not None:
            row.end()
            setattr(req, ATTRIBUTE, None)


def lent_tokens(path: Path, page_tokens: int) -> int:
    """What a match and a fork put into a row."""
    copied = path.copied.rows if path.copied is not None else 0
    return len(path) * page_tokens + copied


def run_pass(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    """Hook around ``Scheduler.run_batch``: what it writes is valid once it was launched."""
    publication: Publication | None = getattr(scheduler.tree_cache, "publication", None)
    if publication is None:  # SGLang's own tree
        return original(scheduler, batch, *args, **kw)
    with publication.open(_written(batch)):
        return original(scheduler, batch, *args, **kw)


def _written(batch: Any) -> Iterator[tuple[Req, int, int]]:
    """Requests of a batch, and the row positions that its forward pass writes."""
    mode = batch.forward_mode
    if mode.is_idle() or mode.is_prebuilt():
        return
    assert batch.spec_algorithm.is_none(), "drafts are refused with the content index"
    if mode.is_split_prefill() and not _last_layers(batch):
        return
    encoded = batch.encoder_cached or [True] * len(batch.reqs)
    for number, req in enumerate(batch.reqs):
        if not req.kv.holds_kv:
            continue  # where two prefills do not overlap, one may end between planning and launch
        end: int = req.kv.kv_committed_len  # planned when this pass was
        start = end - (batch.extend_lens[number] if mode.is_extend() else 1)
        if not encoded[number]:
            start -= batch.encoder_lens_cpu[number]  # an encoder's rows come first
        yield req, start, end


def _last_layers(batch: Any) -> bool:
    """Whether a prefill that runs in pieces between decode steps computes its last layers now."""
    last: int = batch.model_config.num_hidden_layers
    return int(batch.split_index + batch.split_forward_count) >= last


def row_schema(pool: Any, *, page_tokens: int, rope_hash: str) -> RowSchema:
    """What the rows of SGLang's pool are. Strides are only known of pools that Tessera reads."""
    first: int = pool.start_layer or 0
    planes: tuple[torch.Tensor, ...] = ()
    if isinstance(pool, MLATokenToKVPool):
        planes = (pool.kv_buffer[0],)
    elif type(pool) is MHATokenToKVPool and not pool.use_hnd:
        planes = (pool.k_buffer[0], pool.v_buffer[0])
    return RowSchema(
        layers=(first, first + pool.layer_num),
        row_stride_bytes=tuple(plane[0].nbytes for plane in planes),
        dtype=str(pool.store_dtype).removeprefix("torch."),
        scales="none",  # quantised rows are refused at start
        rope_hash=rope_hash,
        page_tokens=page_tokens,
    )


_ROPE_FIELDS = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rope_interleave",
    "partial_rotary_factor",
    "max_position_embeddings",
    "qk_rope_head_dim",
    "head_dim",
)


def rope_hash(config: Any, *, pairing: str) -> str:
    """Names how keys are rotated: the model's text configuration, and the pairing of channels."""
    named = {field: getattr(config, field, None) for field in _ROPE_FIELDS}
    text = json.dumps({**named, "pairing": pairing}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
