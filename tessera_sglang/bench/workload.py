"""What is sent: a data set of SGLang's client by name, or requests of our own."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import agents
from .agents import Request, Shape
from .client import ClientError, load_plugins

_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PER_REQUEST_TOKENS = 64  # a page that is not full
_ROOM = 1.25


@dataclass(frozen=True, slots=True)
class Workload:
    """``title`` for readers, ``arguments`` for the client; ``requests`` by seed where they are ours."""

    title: str
    arguments: tuple[str, ...]
    requests: Callable[[int], list[Request]] | None = None

    def pool_tokens(self, seed: int, least: int) -> int:
        """A pool that holds every prompt and answer at once, in whole 4,096s; ``least`` otherwise."""
        if self.requests is None:
            return least
        needed = sum(
            len(request.input_ids) + request.output_tokens + _PER_REQUEST_TOKENS
            for request in self.requests(seed)
        )
        return max(least, -(-int(needed * _ROOM) // 4096) * 4096)


def of_sglang(dataset_name: str, arguments: Sequence[str]) -> Workload:
    """A data set that the client has."""
    return Workload(dataset_name, ("--dataset-name", dataset_name, *arguments))


def of_agents(shape: Shape, tokenizer: str, arguments: Sequence[str]) -> Workload:
    """Agents over shared documents, in the tokens of the tokenizer at ``tokenizer``."""
    load_plugins()
    from sglang.benchmark.utils import get_tokenizer

    encode = partial(_encode, get_tokenizer(tokenizer))
    return Workload(
        f"{agents.WORKLOAD}: {shape}",
        tuple(arguments),
        lambda seed: agents.requests(shape, encode, seed),
    )


def _encode(tokenizer: Callable[..., Any], text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def tokenizer_of(url: str) -> str:
    """Where the server at ``url`` says that its tokenizer is.

    Raises:
        ClientError: it does not answer, or has none.
    """
    try:
        with _NO_PROXY.open(f"{url.rstrip('/')}/model_info", timeout=30) as response:
            info = json.load(response)
    except (OSError, ValueError) as error:
        raise ClientError(f"no server answers at {url}: {error}", url) from error
    found = info.get("tokenizer_path") or info.get("model_path")
    if not found:
        raise ClientError(f"the server at {url} names no tokenizer; give --model-path", url)
    return str(found)
