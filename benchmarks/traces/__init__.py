"""What real traffic of agents gets from the cache, on SGLang's prefix tree and with Tessera.

    python -m benchmarks.traces [--traces DIR] [--quick] [--json] [--save]

`sessions` replays recorded sessions (`benchmarks.workloads.traces`; ``--traces`` or ``TESSERA_TRACES``
says where they are), every prompt of a session in order on a cache that was empty when it began.
`sglang_sets` drives two of SGLang's own data sets, in which nobody declares spans:
``generated-shared-prefix``, and ``agentic-trace``, of which SGLang ships the reader and no data, so that
it is made of the same sessions.

The model has random weights and the tokenizer of SmolLM2: what is cached depends on tokens alone. Times
are those of a model so small that everything but attention is most of them.
"""
