"""One bar for everything that a command does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def bar(total: int, unit: str = "run") -> tqdm[Any]:
    """On stderr, so that ``--json`` stays clean."""
    from tqdm import tqdm  # here, so that --help needs nothing

    return tqdm(total=total, unit=unit, desc="starting", file=sys.stderr)
