"""``TESSERA_CONFIG``: what a server is told, checked before it starts.

JSON text, or ``@path`` of a JSON file. Unknown keys, wrong types and keys whose feature this version
does not have refuse the start with a message that names the key and the remedy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

BACKEND = "tessera"  # --attention-backend
VARIABLE = "TESSERA_CONFIG"
PAGE_TOKENS = 64  # what FlashMLA reads; one geometry for every device
MAX_SPANS = 256  # spans of one request; each is a part of attention in every decode step
DEFAULT_HOST_BYTES = 1 << 30  # of a server with a disk tier: pages pass through host memory
AUTO_ROOT_TEXT = "The following text is given for reference. "

# Keys of the public surface whose feature is not in this version: refused, never ignored.
_LATER: dict[str, str] = {
    "swa_persistence": "no tier below the device keeps windows yet",
    "swa_checkpoint_tokens": "no tier below the device keeps windows yet",
    "require_salt": "set cache_salt in the requests that need it",
    "private_spans": "set cache_salt or extra_key in the requests that need it",
}
_MEANING: dict[str, str] = {
    "index": '"content" or "radix"',
    "kernel": '"auto", "flashmla", "flashinfer", "triton", "tilelang" or "torch"',
    "link_pages": "a whole number from 0 on",
    "span_root": '"auto", "none", a text, or a list of token ids',
    "verify": '"tokens" or "latents"',
    "span_policy": '"declared" or "messages"',
    "host_tier_bytes": "a whole number of bytes from 0 on",
    "disk_tier_path": "a directory",
    "disk_tier_bytes": "a whole number of bytes from 1 on",
    "remote_tier": 'the name of one of SGLang\'s HiCache storage backends, such as "file" or "mooncake"',
    "remote_tier_extra_config": "an object, or what --hicache-storage-backend-extra-config takes",
}


class ConfigError(ValueError):
    """``TESSERA_CONFIG`` can not be used; the message says which key and what to do."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of this version. See the README for what each one does."""

    index: Literal["content", "radix"] = "content"
    kernel: Literal["auto", "flashmla", "flashinfer", "triton", "tilelang", "torch"] = "auto"
    link_pages: int = 1
    span_root: str | list[int] = "auto"
    verify: Literal["tokens", "latents"] = "tokens"
    span_policy: Literal["declared", "messages"] = "declared"
    host_tier_bytes: int | None = None  # None: 0, and with a disk tier DEFAULT_HOST_BYTES
    disk_tier_path: str | None = None
    disk_tier_bytes: int | None = None
    remote_tier: str | None = None
    remote_tier_extra_config: dict[str, Any] | str | None = None

    @property
    def store(self) -> str | None:
        """The key that asks for a store below host memory; None where none does."""
        if self.disk_tier_path is not None:
            return "disk_tier_path"
        return "remote_tier" if self.remote_tier is not None else None

    @property
    def host_bytes(self) -> int:
        """Host memory for pages that left the device."""
        if self.host_tier_bytes is None:
            return DEFAULT_HOST_BYTES if self.store is not None else 0
        return self.host_tier_bytes


def load(value: str | None = None) -> Config:
    """The configuration in ``value``, or in the environment when it is None.

    Raises:
        ConfigError: what is there can not be used.
    """
    text = os.environ.get(VARIABLE, "") if value is None else value
    if text.startswith("@"):
        path = text[1:]
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{VARIABLE} names the file {path!r}, which can not be read: {error}"
            ) from error
    if not text.strip():
        return Config()
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{VARIABLE} is not JSON: {error}. Got: {text[:80]!r}") from error
    return _checked(raw)


def _checked(raw: Any) -> Config:
    if not isinstance(raw, dict):
        raise ConfigError(f'{VARIABLE} must be a JSON object such as {{"index": "content"}}')
    for key, value in raw.items():
        if key in _LATER:
            raise ConfigError(
                f"{VARIABLE}: {key!r} is not available in this version; remove the key: {_LATER[key]}"
            )
        if key not in _MEANING:
            known = ", ".join(sorted(_MEANING))
            raise ConfigError(f"{VARIABLE}: unknown key {key!r}; remove it. Known keys: {known}")
        try:
            config = msgspec.convert({key: value}, Config, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{VARIABLE}: {key} must be {_MEANING[key]}, got {value!r}"
            ) from error
        if config.link_pages < 0:
            raise ConfigError(
                f"{VARIABLE}: link_pages must be {_MEANING['link_pages']}, got {value!r}"
            )
        if not config.span_root:
            raise ConfigError(f'{VARIABLE}: span_root is empty; use "none" for no root')
        if isinstance(config.span_root, list) and any(t < 0 for t in config.span_root):
            raise ConfigError(f"{VARIABLE}: span_root must hold token ids from 0 on, got {value!r}")
    config = msgspec.convert(raw, Config, strict=True)
    _check_tiers(config)
    return config


def _check_tiers(config: Config) -> None:
    path, disk, host = config.disk_tier_path, config.disk_tier_bytes, config.host_tier_bytes
    for key, value, least in (("host_tier_bytes", host, 0), ("disk_tier_bytes", disk, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{VARIABLE}: {key} must be {_MEANING[key]}, got {value!r}")
    if path is not None and not path.strip():
        raise ConfigError(
            f"{VARIABLE}: disk_tier_path must be {_MEANING['disk_tier_path']}, got ''"
        )
    if (path is None) != (disk is None):
        there, lacking = ("disk_tier_path", "disk_tier_bytes")[:: 1 if disk is None else -1]
        raise ConfigError(f"{VARIABLE}: {there} needs {lacking} beside it; set both, or neither")
    if path is not None and config.remote_tier is not None:
        raise ConfigError(
            f"{VARIABLE}: disk_tier_path with remote_tier: one store lies below host memory; drop one "
            "of the two"
        )
    if config.remote_tier_extra_config is not None and config.remote_tier is None:
        raise ConfigError(
            f"{VARIABLE}: remote_tier_extra_config needs remote_tier beside it; set both, or neither"
        )
    if config.store is not None and host == 0:
        raise ConfigError(
            f"{VARIABLE}: {config.store} with host_tier_bytes 0: pages pass through host memory; drop "
            f"host_tier_bytes for {DEFAULT_HOST_BYTES} bytes, or set it"
        )
    if config.index == "radix" and config.host_bytes:
        raise ConfigError(
            f'{VARIABLE}: {config.store or "host_tier_bytes"} with index "radix": lower tiers belong to '
            "the content index; drop one of them"
        )
