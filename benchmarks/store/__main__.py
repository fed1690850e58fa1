"""``python -m benchmarks.store``"""

from __future__ import annotations

import sys

from .suite import main

if __name__ == "__main__":
    sys.exit(main())
