"""The disk store against plain preadv over the same files.

``python -m benchmarks.store [--json] [--quick] [--directory DIR]``
"""
