"""A small DeepSeek-V4 served by SGLang on a CPU: transformers' modules over the two-tier pool.

It runs SGLang's scheduler, allocator, chunked prefill, retraction and aborts, and the content index, on
real V4 state in float32 or bfloat16. It is a reference, not a fast path: each request takes a forward
pass of its own. On a GPU, nothing here is used.

* ``config``: which models are served here, and what a start refuses.
* ``pool``: SGLang's KV pool, whose bytes are the two-tier pool's. SGLang's allocator owns all pages.
* ``rows``: the arena slot of each row of SGLang's request table, restored where one begins behind a
  prefix.
* ``model``: the model class for SGLang. ``backend``: an attention backend with nothing to attend to.
* ``cache``: the content index, with matches cut to pages whose state was saved.

Tags of the arena's rows live on the host and move within a forward pass, so passes do not overlap with
scheduling: SGLang's overlap schedule is switched off for this model.
"""
