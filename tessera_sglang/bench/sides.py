"""The servers: Tessera, and what it is compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from tessera_sglang.config import BACKEND, VARIABLE, ConfigError, load
from tessera_sglang.launch import Server

from .client import ClientError

STOCK, TESSERA = "stock", "tessera"
_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
_WHITELIST = "SGLANG_PLUGINS"
_OFFLINE = "HF_HUB_OFFLINE"
_NO_TIERS = dict.fromkeys(
    (
        "host_tier_bytes",
        "disk_tier_path",
        "disk_tier_bytes",
        "remote_tier",
        "remote_tier_extra_config",
    )
)


@dataclass(frozen=True, slots=True)
class Launch:
    """How both sides are started. ``arguments`` are of SGLang's launcher and win over ours."""

    model: str  # a directory, or a name on the hub
    pool_tokens: int
    arguments: tuple[str, ...] = ()
    stock_backend: str | None = None  # SGLang's attention backend for the stock side
    environment: tuple[tuple[str, str], ...] = ()  # of both servers, besides this process's


@dataclass(frozen=True, slots=True)
class Running:
    """A server that somebody else started."""

    url: str


@contextmanager
def running(url: str) -> Iterator[Running]:
    """The server at ``url``, which stays when the block is left."""
    yield Running(url.rstrip("/"))


@contextmanager
def started(launch: Launch, side: str) -> Iterator[Server]:
    """A server of ours, gone when the block is left; where it can not be measured, its log says why.

    Raises:
        LaunchError: it does not start.
    """
    with server_of(launch, side) as server:
        try:
            yield server
        except ClientError as error:
            if error.url != server.url:
                raise
            log = f"{error}\nThe {side} server's log ends:\n{server.end_of_log()}"
            raise ClientError(log, error.url) from error


def server_of(launch: Launch, side: str) -> Server:
    """The server of one side, not started yet.

    Stock keeps SGLang's prefix tree under Tessera's attention backend, so that the cache alone differs;
    with ``stock_backend`` it is SGLang without Tessera. Tessera goes by ``TESSERA_CONFIG``.

    Raises:
        ConfigError: the configuration makes both sides the same.
    """
    config = load()
    if side == STOCK:
        config = msgspec.structs.replace(config, index="radix", **_NO_TIERS)
    elif config.index == "radix":
        raise ConfigError(f'{VARIABLE}: {{"index": "radix"}} is the stock side; remove the key')
    arguments = [
        *("--attention-backend", BACKEND, "--mem-fraction-static", "0.3"),
        *("--max-total-tokens", str(launch.pool_tokens)),
    ]
    environment = {**dict(launch.environment), VARIABLE: msgspec.json.encode(config).decode()}
    if Path(launch.model).exists():
        environment[_OFFLINE] = "1"
    if side == STOCK and launch.stock_backend is not None:
        environment[_WHITELIST] = ",".join(_other_plugins()) or "none"
        arguments += ("--attention-backend", launch.stock_backend)
    return Server(launch.model, (*arguments, *launch.arguments), environment)


def _other_plugins() -> list[str]:
    """All plugins that SGLang would load here but ours; our platform stays: it serves without a GPU."""
    wanted = os.environ.get(_WHITELIST)
    names = {entry.name for group in _GROUPS for entry in entry_points(group=group)}
    if wanted:
        names &= {name.strip() for name in wanted.split(",")}
    return sorted(names - {BACKEND})
