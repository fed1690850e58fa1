"""Every kernel on a GPU: its answers against the oracle, and its speed with spans and without.

``python -m benchmarks.gpu [--json] [--quick]``; ``make gpu`` is the same.

Needs torch and numpy; kernel libraries that are there are measured, the others are listed with the
reason why not. Under 8 minutes on an H200, by a budget that is kept: sections that it does not reach
are named. Without a GPU the parity tests that can run do, on the CPU, and the report says that the GPU
was not measured.
"""
