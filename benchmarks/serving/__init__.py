"""Measuring infrastructure of the serving benchmarks: the same requests on both sides, in turns.

    with servers.both(model, pool_tokens) as urls, progress.bar(compare.runs(3)) as bar:
        found = compare.compare(urls, model, lambda seed: requests, rounds=3, bar=bar)
    found.ratio("computed_tokens")    # medians, Tessera by stock
    table.compared("title", found)    # a benchmarks.report.Table: a row each for stock, Tessera, ratio
    table.figures(found)              # the same for Report.figures

Stock is SGLang's prefix tree under Tessera's attention backend (``{"index": "radix"}``), so that only
the cache differs. Requests are `tessera_sglang.bench.agents.Request`; only Tessera is told their spans.

- `servers`: the two servers. Both run; only the one that is asked works.
- `state`: what a server counts, before and after: tokens computed (SGLang's own counter, so span
  prefills, roots and linked pages are in it), hits by kind, pool tokens held.
- `compare`: rounds in turns on empty caches under SGLang's benchmark client, which defines TTFT, ITL and
  throughput; `Run` is one of them.
- `replay`: one request after the other on a cache that stays warm, with the cached tokens of each.
- `bound`: what counting tokens, and counting the pairs that attention scores, lets one expect.
- `table`: a comparison for readers and for programs.
"""
