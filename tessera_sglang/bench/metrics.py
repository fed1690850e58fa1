"""What one run of the client measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run. Definitions are those of ``sglang.benchmark.serving``."""

    throughput_tokens_per_s: float  # prompt and output
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float  # between two tokens of an answer
    tpot_p50_s: float  # per token after the first, by answer
    cached_share: float | None  # of prompt tokens; None where the server does not tell
    requests: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    cached_tokens: int | None = None  # of the prompts; None where the server does not tell


def read(result: Mapping[str, Any]) -> Metrics:
    """From the line that the client writes with ``--cache-report``."""
    cache = result.get("cache_report") or {}
    counted = cache.get("total_prompt_tokens")
    return Metrics(
        throughput_tokens_per_s=result["total_throughput"],
        output_tokens_per_s=result["output_throughput"],
        ttft_p50_s=result["median_ttft_ms"] * _MS,
        ttft_p99_s=result["p99_ttft_ms"] * _MS,
        itl_p50_s=result["median_itl_ms"] * _MS,
        tpot_p50_s=result["median_tpot_ms"] * _MS,
        cached_share=cache["total_cached_tokens"] / counted if counted else None,
        requests=result["completed"],
        prompt_tokens=result["total_input_tokens"],
        output_tokens=result["total_output_tokens"],
        duration_s=result["duration"],
        cached_tokens=cache["total_cached_tokens"] if counted else None,
    )
