"""Pages below the device: host memory, and a store below it.

``stack`` is what a scheduler talks to; ``ticket`` and ``lease`` are what it is given; ``jobs`` run on
the threads of ``lanes``; ``records`` are counts.
"""

from __future__ import annotations

from .lease import Lease
from .records import Sizes, TierCounters
from .stack import TierStack
from .ticket import Ticket

__all__ = ["Lease", "Sizes", "Ticket", "TierCounters", "TierStack"]
