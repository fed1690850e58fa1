"""What attention costs with spans and without, on this CPU, against PyTorch's own attention.

``python -m benchmarks.attention [--json] [--quick]``
"""
