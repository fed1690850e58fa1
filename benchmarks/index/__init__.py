"""The content index against stock SGLang's prefix tree, through the interface SGLang calls.

``python -m benchmarks.index [--json] [--quick] [--traces DIR]``
"""
