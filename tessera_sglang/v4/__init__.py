"""DeepSeek-V4 on the two-tier pool: transformers' own model, unmodified, over Tessera's storage.

transformers keeps a V4 cache behind one object per layer. The objects here answer to the same calls and
hold nothing: compressed entries and indexer keys are rows of pages; windows, overlaps and groups in the
making are rows of a request's arena slot. So a request is its slot, its pages and its length::

    pool = TwoTierPool(pool_geometry(model.config), pages=64, slots=8)
    storage = LayerStorage(pool, model.config)
    request = Request.open(pool)
    request.reserve(len(ids))
    (logits,) = run(model, storage, [Work(request, ids)], save_every_tokens=128)

* ``storage``: a pool and a config bound together, each layer's planes as typed tensors. ``step``: which
  rows a forward pass reads and writes. ``layers`` and ``cache``: the objects that the model calls.
* ``parts``: pages of a finished prefix, read at another place; ``rope``: rows turned to it.
* ``requests``: what a running request owns, and how it starts behind a prefix. ``forward``: requests of
  different lengths through the model, cut where states are saved.

What is kept where, and what a page boundary needs: ``docs/deepseek-v4.md``. Knows no engine.
"""

from .cache import PooledCache
from .forward import Work, run
from .parts import Part, StateMissing, read
from .requests import Request
from .storage import LayerStorage, pool_geometry

__all__ = [
    "LayerStorage",
    "Part",
    "PooledCache",
    "Request",
    "StateMissing",
    "Work",
    "pool_geometry",
    "read",
    "run",
]
