"""A text with its tables made anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.plots.catalogue import PLOTS
from benchmarks.saved import Saved, read

from .markdown import under
from .tables import TABLES, Source

_BLOCK = re.compile(r"<!-- results: (?P<name>.+?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def rewritten(
    text: str,
    results: Path,
    say: Callable[[str], object],
    tables: Mapping[str, Source] = TABLES,
) -> str:
    """``text`` with every block made from its result in the folder ``results``.

    Raises:
        ValueError: a block names no table, or is never closed.
    """
    if text.count("<!-- results: ") != len(_BLOCK.findall(text)):
        raise ValueError("a block of results is not closed with <!-- end -->")

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(tables)}")
        source = tables[name]
        result = read(source.benchmark, results)
        if result is None:
            say(f"{name}: no results/{source.benchmark}.json, left as it is")
            return match[0]
        return f"<!-- results: {name} -->\n{_body(source, result)}\n<!-- end -->"

    return _BLOCK.sub(block, text)


def _body(source: Source, result: Saved) -> str:
    parts = [source.table(result), under(result)]
    if source.plot is not None:
        title = PLOTS[source.plot].title
        parts.insert(0, f"![{title}](benchmarks/results/{source.plot}.svg)")
    return "\n\n".join(parts)
