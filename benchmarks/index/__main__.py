"""``python -m benchmarks.index``"""

from __future__ import annotations

import os
import sys
import warnings

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one scheduler thread, as measured
    warnings.filterwarnings("ignore", module=r"sglang\..*")
    from .suite import main

    sys.exit(main())
