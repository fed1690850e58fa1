"""The few requests that the demo sends: streamed generation, flush, and the cache's own account."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 1800
FLUSH_TRIES = 100  # a request just answered may take a moment to let go of its pages

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy


class RequestError(RuntimeError):
    """The server answered with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float  # from sending to the first generated token
    text: str


@dataclass(frozen=True, slots=True)
class CacheState:
    """What the server says of its cache."""

    page_tokens: int
    held_tokens: int  # of the pool, by anybody
    cached_pages: tuple[tuple[str, int], ...]  # (digest of the tokens, physical page)


def generate(
    url: str,
    prompt: Sequence[int],
    spans: Sequence[tuple[int, int]],
    new_tokens: int,
    *,
    link_pages: int | None = None,
) -> Answer:
    """Greedy answer, streamed so that its first token can be timed.

    ``link_pages`` overrides the server's.

    Raises:
        RequestError: an HTTP error, or an abort in the middle of the stream.
    """
    parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens}
    declared: dict[str, Any] = {"spans": [list(span) for span in spans]}
    if link_pages is not None:
        declared["link_pages"] = link_pages
    parameters["custom_params"] = {"tessera": declared}
    body = {"input_ids": list(prompt), "sampling_params": parameters, "stream": True}
    first_s: float | None = None
    last: dict[str, Any] = {}
    started = time.perf_counter()
    with _opened(f"{url}/generate", body) as stream:
        for line in stream:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            if first_s is None:
                first_s = time.perf_counter() - started
            last = json.loads(line[len(b"data: ") :])
    meta = last.get("meta_info")
    if first_s is None or meta is None or meta["finish_reason"]["type"] == "abort":
        raise RequestError(f"the server gave no answer: {str(last)[:500]}")
    return Answer(meta["prompt_tokens"], meta["cached_tokens"], first_s, last["text"])


def flush(url: str) -> None:
    """Empty the cache."""
    for _ in range(FLUSH_TRIES):
        try:
            with _opened(f"{url}/flush_cache", {}):
                return
        except RequestError as error:
            reason = error
        time.sleep(0.1)
    raise reason


def cache_state(url: str) -> CacheState:
    """The cache of the first rank, with the pages that it holds."""
    state = tessera_state(url)
    pages = state["cached_pages"]
    if pages is None:
        raise RequestError("the pages of this server's prefix tree can not be listed")
    return CacheState(
        state["page_tokens"],
        state["held_tokens"],
        tuple((digest, page) for digest, page in pages),
    )


def tessera_state(url: str) -> dict[str, Any]:
    """What the first rank says of Tessera in ``/server_info``."""
    with _opened(f"{url}/server_info") as response:
        state: dict[str, Any] = json.load(response)["internal_states"][0]["tessera"]
    return state


def counters(url: str, name: str, label: str) -> dict[str, float]:
    """A Prometheus counter of ``/metrics`` by the values of one label, summed over the others."""
    with _opened(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        series, _, value = line.rpartition(" ")
        if series.startswith(f"{name}{{") and f'{label}="' in series:
            key = series.partition(f'{label}="')[2].partition('"')[0]
            found[key] = found.get(key, 0.0) + float(value)
    return found


@contextlib.contextmanager
def _opened(url: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
    """The response to a GET, or to a POST of ``body``; every failure is a RequestError."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as response:
            yield response
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise RequestError(f"HTTP {error.code}: {said[:500]}") from error
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"the connection to the server broke: {error}") from error
