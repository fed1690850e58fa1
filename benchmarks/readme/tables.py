"""Which table is made from which result, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.saved import Saved

from . import quality, serving, single_machine


@dataclass(frozen=True, slots=True)
class Source:
    """``table`` makes Markdown from the saved result of ``benchmark``; ``plot`` stands above it."""

    benchmark: str
    table: Callable[[Saved], str]
    plot: str | None = None


TABLES = {
    "multi_agent": Source("multi_agent", serving.multi_agent),
    "surface": Source("multi_agent", serving.surface, plot="multi_agent"),
    "latency": Source("latency", serving.latency),
    "rag": Source("rag", serving.rag, plot="rag"),
    "tools": Source("tools", serving.tools),
    "traces": Source("traces", serving.traces, plot="traces"),
    "sglang_sets": Source("traces", serving.sglang_sets),
    "head_shapes": Source("head_shapes", serving.head_shapes),
    "quality, example model": Source("quality", quality.of_model("tiny-mla"), plot="quality"),
    "quality, SmolLM2": Source("quality", quality.of_model("SmolLM2-135M-Instruct")),
    "index": Source("index", single_machine.index),
    "attention": Source("attention", single_machine.attention),
    "restart": Source("restart", single_machine.checked),
    "store": Source("store", single_machine.checked),
    "plain_traffic": Source("plain_traffic", single_machine.plain_traffic),
}
