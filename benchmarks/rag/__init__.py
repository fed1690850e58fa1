"""Retrieval: documents drawn in shuffled order, and a cache that must not wear out.

    python -m benchmarks.rag [--quick] [--json] [--model DIR]

**Steady.** A corpus of 20 documents of 256 to 2,048 tokens, a pool with room for 25 of their mean
size and for what a request has to itself, and 100 draws of 14. A cache that lost spans, or stored them
again and again, would hit less with every draw: the last 20 draws must hit at least as often as draws
21 to 40, and the pool must never hold more shared pages of documents than the corpus has.

**Larger than the cache.** A corpus of four times the pool, 1,000 draws of 5 by Zipf's law: a curve of
the hit rate, which must not decay. Beside it the curve of stock's tree with the same pool.

Requests come one by one, so that the rates follow from the seed alone and not from who came first. The
draws behind the first three fifths are the first two fifths once more, behind another instruction: the
fifths that are compared ask for the same documents after the same, so their rates do not differ by what
happened to be drawn, and nothing but documents can be found again.
"""
