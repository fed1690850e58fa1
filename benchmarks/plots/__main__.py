"""``python -m benchmarks.plots``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report import progress
from benchmarks.saved import RESULTS, read

from .catalogue import PLOTS
from .style import plotting, written


def main() -> int:
    """Draw every plot whose result is there."""
    parser = argparse.ArgumentParser(description="Draw the saved results.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another folder of results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="another folder for plots")
    options = parser.parse_args()
    for name, plot in PLOTS.items():
        result = read(plot.benchmark, options.results)
        if result is None:
            progress(f"{name}: no {plot.benchmark}.json, not drawn")
            continue
        with plotting() as pyplot:
            figure = plot.draw(pyplot, result)
            progress(f"drawn: {written(figure, options.out / f'{name}.svg', plot.title)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
