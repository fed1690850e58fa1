"""Tables of what two servers did side by side.

`comparison` reads what ``benchmarks.serving.table.figures`` writes: ``{"ratio": {figure: Tessera by
stock}, side: {"median": {figure: value}}}``. The functions below say where in a result that stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.saved import Saved

from .markdown import MISSING, TIMES, count, ratio, seconds, share, table

Compared = Mapping[str, Any]
_SIDES = ("stock", "tessera")
_FIGURES: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("tokens computed", "computed_tokens", count),
    ("pool tokens held", "held_tokens", count),
    ("wall time", "wall_s", seconds),
    ("TTFT p50", "ttft_p50_s", seconds),
    ("TTFT p99", "ttft_p99_s", seconds),
    ("inter-token latency p50", "itl_p50_s", seconds),
    ("prompt tokens served per second", "throughput_tokens_per_s", count),
)
_MORE_IS_BETTER = frozenset({"throughput_tokens_per_s"})
_HITS = (("prefix hits", "prefix_hit_share"), ("span hits", "span_hit_share"))


def multi_agent(result: Saved) -> str:
    """The claim, figure by figure."""
    return comparison(result.figures["claim"])


def comparison(found: Compared) -> str:
    """A row for each figure, and how many times better it is."""
    rows = [_row(found, *figure) for figure in _FIGURES]
    for heading, name in _HITS:
        rows.append((heading, *(share(found[side]["median"][name]) for side in _SIDES), ""))
    return table(("", *_SIDES, "better by"), rows)


def _row(found: Compared, heading: str, name: str, shown: Callable[[float], str]) -> Sequence[str]:
    by_stock = found["ratio"].get(name)
    cells = (shown(found[side]["median"][name]) for side in _SIDES)
    if not by_stock:
        return (heading, *cells, MISSING)
    better = by_stock if name in _MORE_IS_BETTER else 1 / by_stock
    return (heading, *cells, ratio(better) + TIMES)


def surface(result: Saved) -> str:
    """How many times less wall time, with the two counted bounds in brackets."""
    cells = {(one["agents"], one["document_tokens"]): one for one in result.figures["surface"]}
    agents = sorted({number for number, _ in cells})
    rows = []
    for tokens in sorted({tokens for _, tokens in cells}):
        row = (cells.get((number, tokens)) for number in agents)
        rows.append((f"document of {count(tokens)} tokens", *(_cell(one) for one in row)))
    heads = (f"{number} agent{'s' if number > 1 else ''}" for number in agents)
    return table(("wall time (by tokens / by tokens, pairs, requests)", *heads), rows)


def _cell(one: Mapping[str, float] | None) -> str:
    if one is None:
        return MISSING
    bounds = (one["bound_by_tokens"], one["bound_by_tokens_and_pairs"])
    counted = " / ".join(ratio(bound) for bound in bounds)
    return f"**{ratio(one['wall_stock_by_tessera'])}{TIMES}** ({counted})"


def latency(result: Saved) -> str:
    """The ratios that are checked, and those shown beside them."""
    ratios = result.figures["ratios"].items()
    rows = [(name.partition(": ")[2], ratio(value)) for name, value in ratios]
    return table(("time to first token", "ratio"), rows)


def rag(result: Saved) -> str:
    """Hit rates by fifths of the draws."""
    steady, curve = result.figures["steady"]["hit_rate"], result.figures["curve"]
    stored = max(result.figures["steady"]["stored_document_pages"])
    points = len(curve["tessera"])  # stock has the first few of them
    rows = [
        ("corpus that fits, Tessera", *_fifths(steady, len(steady))),
        ("corpus of four times the cache, Tessera", *_fifths(curve["tessera"], points)),
        ("likewise, stock", *_fifths(curve["stock"], points)),
    ]
    heads = ("first fifth of the draws", "second", "third", "fourth", "last")
    return (
        table(("prompt tokens served from the cache", *heads), rows)
        + f"\n\nAt most {count(stored)} pages of documents were stored of the "
        + f"{count(result.figures['steady']['corpus_pages'])} that the corpus which fits has."
    )


def _fifths(rates: Sequence[float], of: int) -> list[str]:
    part = max(1, of // 5)
    parts = [rates[first : first + part] for first in range(0, 5 * part, part)]
    return [share(sum(some) / len(some) if some else None) for some in parts]


def tools(result: Saved) -> str:
    """A row for each number of tools."""
    rows = [
        (
            name,
            *(
                ratio(found["ratio"][figure])
                for figure in ("computed_tokens", "held_tokens", "wall_s")
            ),
            share(found["tessera"]["median"]["span_hit_share"]),
        )
        for name, found in result.figures.items()
    ]
    heads = ("each agent has", "tokens computed", "pool tokens held", "wall time", "span hits")
    return "Tessera by stock, lower is better:\n\n" + table(heads, rows)


def traces(result: Saved) -> str:
    """Sessions in the order of how much shifts."""
    sessions = sorted(
        result.figures["sessions"], key=lambda one: one["shifted_tokens"] / one["prompt_tokens"]
    )
    everything = {"name": "all", **result.figures["all"]}
    heads = (
        *("session", "requests", "prompt tokens", "shifted", "cached, stock", "cached, Tessera"),
        *("computed, stock", "computed, Tessera", "wall, stock", "wall, Tessera"),
    )
    return table(heads, [*map(_session, (*sessions, everything))])


def _session(one: Mapping[str, Any]) -> Sequence[str]:
    tokens = one["prompt_tokens"]
    return (
        f"`{one['name']}`" if one["name"] != "all" else "**all**",
        count(one["requests"]),
        count(tokens),
        share(one["shifted_tokens"] / tokens),
        *(share(one[side]["cached_tokens"] / tokens) for side in _SIDES),
        *(count(one[side]["computed_tokens"]) for side in _SIDES),
        *(seconds(one[side]["wall_s"]) for side in _SIDES),
    )


def sglang_sets(result: Saved) -> str:
    """SGLang's own data sets."""
    rows = []
    for name, sides in result.figures["sglang_sets"].items():
        both = [sides[side] for side in _SIDES]
        walls = [one["wall_s"] for one in both]
        cells = (*(share(one["cached_share"]) for one in both), *map(seconds, walls))
        rows.append((f"`{name}`", *cells, ratio(walls[1] / walls[0])))
    heads = ("no spans", "cached, stock", "cached, Tessera", "wall, stock", "wall, Tessera")
    return table((*heads, "Tessera / stock"), rows)


def head_shapes(result: Saved) -> str:
    """A row for each model."""
    rows = []
    for name, found in result.figures["models"].items():
        shape = found["shape"]
        medians = [found[side]["median"] for side in _SIDES]
        by_stock = found["ratio"]["wall_s"]
        rows.append(
            (
                f"{name}: {shape['heads']} heads, hidden {count(shape['hidden'])}, "
                f"{shape['layers']} layer{'s' if shape['layers'] > 1 else ''}",
                count(len(found["stock"]["rounds"])),
                *(count(one["computed_tokens"]) for one in medians),
                *(seconds(one["wall_s"]) for one in medians),
                ratio(1 / by_stock) + TIMES if by_stock else MISSING,
            )
        )
    heads = ("", "rounds", "computed, stock", "computed, Tessera", "wall, stock", "wall, Tessera")
    return table((*heads, "stock / tessera"), rows)
