"""Agents over one shared document: what Tessera saves, and how near that is to what counting promises.

    python -m benchmarks.multi_agent [--quick] [--json] [--model DIR]

Sixteen agents arrive together with one document of 8,192 tokens behind preambles of 100 to 300 tokens,
on stock SGLang's prefix tree and on Tessera, in turns. Then the surface over 1 to 64 agents and
documents of 1k to 16k tokens. Beside each measured ratio stand two that are only counted: of tokens, and
of tokens and the pairs that attention scores, where what a token, a pair and a request cost is fitted to
stock's runs (`benchmarks.serving.bound`). What then is left of Tessera's time is its own.
"""
