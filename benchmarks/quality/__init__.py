"""What spans cost in answers, and what linked pages and a root buy back.

``python -m benchmarks.quality [--quick] [--json] [--model tiny|smollm2|both] [--prompts FILE.jsonl]``
"""
