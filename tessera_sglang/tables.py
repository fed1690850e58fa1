"""Output for people: ruled tables on a terminal that is wide enough, aligned text everywhere else.

The only place that prints with rich, which keeps to ``NO_COLOR`` and ``TERM=dumb`` by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. Columns in ``left`` start left, numbers in all others end right.

    ``sections`` are numbers of rows that end a section, counted from 0.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})
    sections: frozenset[int] = frozenset()

    def lines(self) -> Iterator[str]:
        """Header, rule and rows, aligned, without trailing blanks; sections end with an empty line."""
        columns = list(zip(self.header, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        for number, row in enumerate((self.header, *self.rows), start=-1):
            cells = [
                cell.ljust(width) if column in self.left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield "  ".join(cells).rstrip()
            if number == -1:
                yield "─" * (sum(widths) + 2 * (len(widths) - 1))
            elif number in self.sections:
                yield ""


def show(table: Table) -> None:
    """Print to stdout, with an empty line before."""
    if sys.stdout.isatty() and _show_rich(table):
        return
    if table.title:
        print(f"\n{table.title}")
    print("\n".join(table.lines()))


def show_aligned(rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns as wide as their widest cell; the last one as it is, for it may be long."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, last in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join((*padded, last)))


def _show_rich(table: Table) -> bool:
    """Print with rich; False where it is not installed, or would have to cut or wrap cells."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    title = f"\n{table.title}" if table.title else None
    ruled = RichTable(title=title, title_justify="left", title_style="bold")
    for column, name in enumerate(table.header):
        ruled.add_column(name, justify="left" if column in table.left else "right")
    for number, row in enumerate(table.rows):
        ruled.add_row(*map(Text, row), end_section=number in table.sections)
    console = Console()
    boundless = console.options.update_width(1 << 16)
    if console.measure(ruled, options=boundless).maximum > console.width:
        return False
    console.print(ruled)
    return True
