"""Workloads that people have, as data: a shape, and the requests that follow from it and a seed.

`multi_agent`, `rag` and `tools` each have a frozen ``Shape`` and ``requests(shape, encode, seed)``,
which the serving benchmarks send. As commands they write JSON lines for SGLang's own client:

    python -m benchmarks.workloads.multi_agent --out agents.jsonl --agents 16
"""
