"""What all plots have in common: colours for a light and a dark page, and bytes that repeat.

A plot brings its own background and follows the reader's colour scheme, as the drawings in
``docs/figures`` do: what matplotlib draws in `INK`, `SOFT` and `PAGE` becomes a class, and a style sheet
gives the class its colour. Series have colours that can be read on both.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

INK, SOFT, PAGE = "#1f2328", "#818b98", "#ffffff"
_DARK = {INK: "#e6edf3", SOFT: "#7d8590", PAGE: "#0d1117"}
_NAMES = {INK: "ink", SOFT: "soft", PAGE: "page"}
STOCK, TESSERA, BOUND = "#d1742f", "#2f81d1", "#8957b8"  # of the sides, and of what was expected
TIMES = "\N{MULTIPLICATION SIGN}"
SERIES = (TESSERA, STOCK, BOUND, "#2da44e", "#c2407a", "#9a7b1c")

_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "tessera",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib's own: it is there everywhere
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": PAGE,
    "figure.facecolor": PAGE,
    "savefig.facecolor": PAGE,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": SOFT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


@contextmanager
def plotting() -> Iterator[Any]:
    """matplotlib.pyplot in our style; figures are closed when the block is left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: Any = {**matplotlib.rcParamsDefault, **_SETTINGS, "backend": "Agg"}
    with matplotlib.rc_context(settings):
        try:
            yield pyplot
        finally:
            pyplot.close("all")


def written(figure: Any, path: Path, title: str) -> Path:
    """Write a figure; ``title`` is what a screen reader says."""
    buffer = io.StringIO()
    metadata = {
        "Date": None,
        "Creator": None,
    }  # those differ from day to day and machine to machine
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_themed(buffer.getvalue(), title), "utf-8")
    return path


def _themed(svg: str, title: str) -> str:
    svg = re.sub(r"<(\w+)((?: [^<>]*)? style=\"[^\"]*\"[^<>]*)>", _classes, svg)
    head = f"<title>{escape(title)}</title><style>{_style_sheet()}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda match: match[1] + head, svg, count=1)


def _classes(match: re.Match[str]) -> str:
    """One element: colours of the page become classes."""
    name, attributes = match[1], match[2]
    classes = []

    def named(colour: re.Match[str]) -> str:
        classes.append(f"{colour[1][0]}-{_NAMES[colour[2]]}")
        return ""

    attributes = re.sub(rf"(fill|stroke): ({'|'.join(_NAMES)});? ?", named, attributes)
    attribute = f' class="{" ".join(classes)}"' if classes else ""
    slash = "/" if attributes.endswith("/") else ""
    return f"<{name}{attributes.removesuffix('/').rstrip()}{attribute}{slash}>"


def _style_sheet() -> str:
    light = "".join(_rules(colour, colour) for colour in _NAMES)
    dark = "".join(_rules(colour, _DARK[colour]) for colour in _NAMES)
    return f"{light}@media (prefers-color-scheme: dark){{{dark}}}"


def _rules(colour: str, shown: str) -> str:
    name = _NAMES[colour]
    return f".f-{name}{{fill:{shown}}}.s-{name}{{stroke:{shown}}}"
