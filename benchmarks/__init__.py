"""What the project claims, measured: each module is run as ``python -m benchmarks.NAME [--json]``."""
