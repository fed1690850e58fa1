"""Tables of what is measured without servers, and of plain traffic.

`index` reads ``figures["a.match"]["throughput_ratio"]`` and so on; `attention` reads figures by their
names, as in ``"a. prefill 4096, GQA 32/8 heads, float32"``; `plain_traffic` reads
``figures["tokens_per_s"][workload][side]``, one value a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.saved import Saved

from .markdown import count, ratio, share, table

_OPERATIONS = (
    ("sequences of {long_tokens:,} tokens", "a.match", "a.insert"),
    ("prompts that share {prefix_tokens:,} tokens, on arrival", "b.match", "b.insert"),
    ("the same prompts in their next turn", "b.match_again", None),
    ("{trace} trace of agents", "e.match", "e.insert"),
)
_DTYPES = ("float32", "bfloat16")
_MODELS = ("GQA", "MLA")


def index(result: Saved) -> str:
    """Throughput of the index by that of each of SGLang's cores."""
    cores = [core for core, state in result.figures["stock_cores"].items() if state == "compared"]
    source = "synthetic" if result.figures["trace_source"] == "synthetic" else "recorded"
    sizes = {**result.settings["sizes"], "trace": f"a {source}"}
    rows = [
        (name.format(**sizes), _by_core(result, look_up, cores), _by_core(result, publish, cores))
        for name, look_up, publish in _OPERATIONS
    ]
    forks = result.figures["forks"]
    return (
        table(("ours by " + " / ".join(cores), "look-up", "publication"), rows)
        + "\n\nOf the trace's prompt tokens "
        + f"{share(forks['recomputed_share_without'])} are computed without copies of partly equal "
        + f"pages, {share(forks['recomputed_share_with'])} with them. "
        + _memory(result)
    )


def _by_core(result: Saved, operation: str | None, cores: list[str]) -> str:
    if operation is None:
        return ""
    ratios = result.figures[operation]["throughput_ratio"]
    return " / ".join(ratio(ratios[core]) for core in cores)


def _memory(result: Saved) -> str:
    by_state: Mapping[str, Mapping[str, float]] = result.figures["memory"]["bytes_per_token"]
    ours = [sides["tessera"] for sides in by_state.values()]
    theirs = [v for sides in by_state.values() for side, v in sides.items() if side != "tessera"]
    return (
        f"A cached token takes {min(ours):.0f} to {max(ours):.0f} bytes of host memory, in SGLang's "
        f"trees {min(theirs):.0f} to {max(theirs):.0f}."
    )


def checked(result: Saved) -> str:
    """The checks themselves: what was measured, and what it has to be."""
    rows = [
        (str(check["name"]), f"{check['value']:.3g}", str(check["target"]))
        for check in result.checks
    ]
    return table(("", "measured", "target"), rows)


def attention(result: Saved) -> str:
    """Ratios of the checks: a row for each measurement, a column for each dtype."""
    rows = []
    for case in _cases(result, "a. "):
        cells = (_models(result, "a. ", case, dtype, _of_sdpa) for dtype in _DTYPES)
        rows.append((f"{case}: speed by that of SDPA, GQA / MLA", "higher", *cells))
    for case in _cases(result, "b. "):
        cells = (_models(result, "b. ", case, dtype, _by_flat) for dtype in _DTYPES)
        rows.append((f"{case}: time by that without spans, GQA / MLA", "lower", *cells))
    for case in _cases(result, "c. "):
        cells = (_models(result, "c. ", case, dtype, _shared, ("MLA",)) for dtype in _DTYPES)
        rows.append((f"{case}: throughput by that of reading alone, MLA", "higher", *cells))
    return table(("one layer", "better", *_DTYPES), rows)


def _cases(result: Saved, letter: str) -> list[str]:
    names = (name for name in result.figures if name.startswith(letter))
    return list(dict.fromkeys(name[len(letter) :].rsplit(", ", 2)[0] for name in names))


def _models(
    result: Saved,
    letter: str,
    case: str,
    dtype: str,
    read: Any,
    models: tuple[str, ...] = _MODELS,
) -> str:
    """What was measured of each model, ``–`` where nothing was."""
    found = []
    for model in models:
        names = (
            name
            for name in result.figures
            if name.startswith(f"{letter}{case}, {model} ") and name.endswith(f", {dtype}")
        )
        name = next(names, None)
        found.append(ratio(None if name is None else read(result.figures[name])))
    return " / ".join(found)


def _of_sdpa(figures: Mapping[str, Any]) -> float:
    return float(figures["ours_by_way"][figures["checked_against"]])


def _by_flat(figures: Mapping[str, Any]) -> float:
    return float(figures["spans_by_flat"])


def _shared(figures: Mapping[str, Any]) -> float:
    return float(figures["shared_gain_over"][figures["checked_against"]])


def plain_traffic(result: Saved) -> str:
    """Tokens a second of both indexes."""
    rows = []
    for workload, sides in result.figures["tokens_per_s"].items():
        content, radix = (statistics.median(sides[side]) for side in ("content", "radix"))
        rows.append((workload, count(radix), count(content), ratio(content / radix)))
    return table(("tokens a second", "SGLang's tree", "content index", "ratio"), rows)
