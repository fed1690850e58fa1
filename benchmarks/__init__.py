"""What the project claims, measured: each module is run as ``python -m benchmarks.NAME [--json]``.

``python -m benchmarks`` runs them all, and makes plots and the tables of README.md from what they saved.
"""
