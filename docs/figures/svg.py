"""A small SVG writer: boxes, ribbons, text, in colours for a light and a dark page.

Everything is a class of one style sheet, so a figure follows the reader's colour scheme, also as an
`<img>`. It brings its own background: a page may be dark where the reader's system is light. Fonts
are the reader's own. The same calls write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

# class: fill on a light and on a dark page
FILLS = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "panel": ("#f6f8fa", "#161b22"),
    "root": ("#d1d9e0", "#3d444d"),
    "own": ("#e6eaef", "#2a313c"),
    "linked": ("#f5d9a8", "#6b4a12"),
    "tail": ("#f5d9a8", "#6b4a12"),
    "a": ("#9ecbff", "#1f4f8f"),
    "b": ("#a6e3b8", "#1d6b3a"),
    "new": ("#e3c8f5", "#5a3580"),
}
LINES = {"rule": ("#8c959f", "#7d8590"), "edge": ("#59636e", "#9198a1")}

_FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
_SIZES = {"small": 11, "label": 12, "head": 14}


class Canvas:
    """A figure of ``width`` times ``height`` pixels. ``title`` is what a screen reader says."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width} {height}",
                "width": str(width),
                "height": str(height),
                "role": "img",
            },
        )
        ElementTree.SubElement(self._root, "title").text = title
        ElementTree.SubElement(self._root, "style").text = _style_sheet()
        self.box(0, 0, width, height, "page")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        outlined: bool = False,
        data: dict[str, int] | None = None,
    ) -> None:
        """A rectangle. ``data`` says what it stands for, as ``data-…`` attributes."""
        attributes = {
            "class": fill + (" outlined" if outlined else ""),
            "x": _number(x),
            "y": _number(y),
            "width": _number(width),
            "height": _number(height),
        }
        attributes |= {f"data-{name}": str(value) for name, value in (data or {}).items()}
        ElementTree.SubElement(self._root, "rect", attributes)

    def shape(
        self, corners: Sequence[tuple[float, float]], fill: str, *, pale: bool = False
    ) -> None:
        """A polygon; ``pale`` ones let others show through."""
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        ElementTree.SubElement(
            self._root, "polygon", {"class": fill + (" pale" if pale else ""), "points": points}
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False) -> None:
        """A thin line; ``arrow`` gives it a head at its end."""
        ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        ElementTree.SubElement(
            self._root, "line", {"class": "rule"} | {n: _number(v) for n, v in ends.items()}
        )
        if arrow:
            length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
            dx, dy = (x2 - x1) / length, (y2 - y1) / length
            back_x, back_y = x2 - 7 * dx, y2 - 7 * dy
            self.shape(
                [(x2, y2), (back_x - 3 * dy, back_y + 3 * dx), (back_x + 3 * dy, back_y - 3 * dx)],
                "soft",
            )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: str = "label",
        at: str = "start",
        soft: bool = False,
    ) -> None:
        """One line of text on the base line ``y``; ``at`` is start, middle or end."""
        classes = f"{size} {'soft' if soft else 'ink'}"
        place = {"class": classes, "x": _number(x), "y": _number(y), "text-anchor": at}
        ElementTree.SubElement(self._root, "text", place).text = text

    def __str__(self) -> str:
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"


def _style_sheet() -> str:
    rules = [f"text {{ font-family: {_FONT}; }}"]
    rules += [f".{name} {{ font-size: {size}px; }}" for name, size in _SIZES.items()]
    rules += [".head { font-weight: 600; }", ".pale { opacity: 0.35; }"]
    rules += _colours(0)
    rules += ["@media (prefers-color-scheme: dark) {", *_colours(1), "}"]
    return "\n" + "\n".join(rules) + "\n"


def _colours(scheme: int) -> list[str]:
    fills = [f".{name} {{ fill: {pair[scheme]}; }}" for name, pair in FILLS.items()]
    return [
        *fills,
        f".rule {{ stroke: {LINES['rule'][scheme]}; }}",
        f".outlined {{ stroke: {LINES['edge'][scheme]}; }}",
    ]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def signed(value: int) -> str:
    """A number with its sign, as one writes it."""
    return f"\u2212{-value}" if value < 0 else f"+{value}" if value else "0"
