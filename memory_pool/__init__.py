"""Where KV lives, what it costs, and how it is found. Engine-free: numpy, torch, xxhash.

* What a page is called: ``keys``. What the index holds and hands out: ``runs``. The content index:
  ``index``, with ``eviction`` (who goes first) and ``invariants`` (what must hold). What of a row may
  be published at all, and what a publication says of it: ``commit``.
* What a model keeps: ``planes`` (rows and regions), ``geometry`` (layers, pages, bytes), ``rows`` (the
  layouts that kernels read), ``models`` and ``model_geometry`` (from a configuration), ``known_models``;
  ``formats`` and ``ledger`` (what that costs, for people).
* Where it is kept: ``pool`` over ``paged`` (what grows with the context) and ``arena`` with ``ring`` and
  ``saved`` (what a request carries along); ``storage`` (tensors), ``units`` (who owns a page or slot),
  ``handles`` (addresses).
* Below the device: ``names`` (what a page is called there), ``lower`` (what tiers exchange), ``worth``
  (what stays), ``host`` (memory), ``disk`` (a directory), and ``tiers``, which moves pages between them.
"""
