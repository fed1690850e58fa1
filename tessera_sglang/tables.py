"""Tables for people: ruled where rich is installed and the terminal wide enough, else aligned text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. Columns in ``left`` start left, numbers in all others end right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset({0})

    def lines(self) -> Iterator[str]:
        """Header, rule and rows, aligned, without trailing blanks."""
        columns = list(zip(self.header, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        for number, row in enumerate((self.header, *self.rows)):
            cells = [
                cell.ljust(width) if column in self.left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield "  ".join(cells).rstrip()
            if number == 0:
                yield "─" * (sum(widths) + 2 * (len(widths) - 1))


def show(table: Table) -> None:
    """Print to stdout, with an empty line before."""
    if sys.stdout.isatty() and _show_rich(table):
        return
    print(f"\n{table.title}")
    print("\n".join(table.lines()))


def _show_rich(table: Table) -> bool:
    """Print with rich; False where it is not installed, or would have to cut or wrap cells."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        return False
    ruled = RichTable(title=f"\n{table.title}", title_justify="left", title_style="bold")
    for column, name in enumerate(table.header):
        ruled.add_column(name, justify="left" if column in table.left else "right")
    for row in table.rows:
        ruled.add_row(*map(Text, row))
    console = Console()
    boundless = console.options.update_width(1 << 16)
    if console.measure(ruled, options=boundless).maximum > console.width:
        return False
    console.print(ruled)
    return True
