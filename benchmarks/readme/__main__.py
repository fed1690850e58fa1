"""``python -m benchmarks.readme [--check]``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report import ROOT, progress
from benchmarks.saved import RESULTS

from .rewrite import rewritten


def main() -> int:
    """Rewrite README.md, or say whether it is what it would be rewritten to."""
    parser = argparse.ArgumentParser(description="Make the tables of README.md from saved results.")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if it differs")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="another file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another folder of results")
    options = parser.parse_args()
    before = options.readme.read_text("utf-8")
    after = rewritten(before, options.results, progress)
    if after == before:
        return 0
    if options.check:
        progress(f"{options.readme} differs from the results; run python -m benchmarks.readme")
        return 1
    options.readme.write_text(after, "utf-8")
    progress(f"rewritten: {options.readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
