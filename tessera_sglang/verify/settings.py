"""The settings that are compared: a root and a number of pages computed in place."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = "server"  # the name of the row that overrides nothing
FULL = "full attention"  # and of the one without spans: how far two runs of the same are apart
ROOTS = ("none", "auto", "own")


@dataclass(frozen=True, slots=True)
class OwnRoot:
    """A root of the user's: its text, for TESSERA_CONFIG, and its token ids, whole pages."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the result. None leaves a setting as the server has it."""

    root: str  # "none", "auto", "own", SERVER or FULL
    link_pages: int | None
    own: OwnRoot | None = None

    @property
    def name(self) -> str:
        """Short, for progress and JSON."""
        return self.root if self.link_pages is None else f"{self.root}/{self.link_pages}"

    @property
    def declares_spans(self) -> bool:
        """Whether requests are sent with their spans."""
        return self.root != FULL

    @property
    def overrides(self) -> dict[str, Any]:
        """What the request says beside its spans."""
        asked: dict[str, Any] = {}
        if self.link_pages is not None:
            asked["link_pages"] = self.link_pages
        if self.root in ("none", "auto"):
            asked["root"] = self.root
        elif self.own is not None:
            asked["root"] = list(self.own.tokens)
        return asked

    @property
    def config(self) -> dict[str, Any]:
        """The keys of TESSERA_CONFIG that make it a server's setting."""
        keys: dict[str, Any] = {}
        if self.link_pages is not None:
            keys["link_pages"] = self.link_pages
        if self.root in ("none", "auto"):
            keys["span_root"] = self.root
        elif self.own is not None:
            keys["span_root"] = self.own.text
        return keys


def grid(roots: Sequence[str], link_pages: Sequence[int], own: OwnRoot | None) -> list[Setting]:
    """Full attention, what the server has, and every root with every number of linked pages."""
    return [
        Setting(FULL, None),
        Setting(SERVER, None),
        *(
            Setting(root, pages, own if root == "own" else None)
            for root in roots
            for pages in link_pages
        ),
    ]


def parse_link_pages(text: str) -> tuple[int, ...]:
    """``0,1,2``, for argparse."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 0,1,2")
    return tuple(dict.fromkeys(map(int, parts)))


def parse_roots(text: str) -> tuple[str, ...]:
    """``none,auto,own``, for argparse."""
    parts = [part.strip() for part in text.split(",")]
    unknown = [part for part in parts if part not in ROOTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(ROOTS)}")
    return tuple(dict.fromkeys(parts))


def parse_root_text(text: str) -> str:
    """The text itself, or that of ``@file``, for argparse."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{text[1:]} can not be read: {error}") from error
    if text in ("auto", "none"):
        raise argparse.ArgumentTypeError(f"the root {text} is not a text; use --roots {text}")
    if not text.strip():
        raise argparse.ArgumentTypeError("the root's text is empty; use --roots none for no root")
    return text
