"""The command's options."""

from __future__ import annotations

import argparse
import urllib.parse

from .settings import parse_link_pages, parse_root_text, parse_roots
from .verdict import CHOICE_MARGIN, THRESHOLD_NATS

DESCRIPTION = """\
Asks a server the same prompts with and without spans and compares what the model makes of them:
divergence of its next-token distributions, agreement of greedy answers, tokens computed. Its requests
have a cache_salt of their own; nothing is flushed. The check that decides about the exit code is that
the server's own settings pass."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--url", type=_url, help="a running Tessera server, such as http://localhost:30000"
    )
    which.add_argument(
        "--model-path",
        metavar="M",
        help="start a server of this model",
    )
    parser.add_argument(
        "--server-args",
        default="",
        metavar="ARGS",
        help='options of its launcher, in one word: --server-args="--tp-size 2"; or after --',
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='lines of {"text", "text_spans"}, {"input_ids", "spans"} or {"messages", "tools"} with '
        "cache_control (default: eight questions about five passages)",
    )
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=24,
        metavar="N",
        help="tokens of each continuation (default %(default)s)",
    )
    parser.add_argument(
        "--link-pages", type=parse_link_pages, default="0,1,2", help="default %(default)s"
    )
    parser.add_argument(
        "--roots",
        type=parse_roots,
        default="none,auto",
        help="of none, auto and own: the text of --root, or the server's (default %(default)s)",
    )
    parser.add_argument(
        "--root", type=parse_root_text, metavar="TEXT_OR_@FILE", help="a root to compare as well"
    )
    parser.add_argument(
        "--threshold",
        type=_nats,
        default=THRESHOLD_NATS,
        metavar="NATS",
        help="largest mean KL that passes (default %(default)s); the most probable token must also be "
        f"full attention's at no more than {round(100 * CHOICE_MARGIN)} percent fewer positions than in "
        "a second run of full attention",
    )
    parser.add_argument(
        "--tokenizer", help="path or name (default: the server's); for prompts of text"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="if the tokenizer comes with code"
    )
    parser.add_argument("--api-key", help="of the server, if it asks for one")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def _url(text: str) -> str:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://localhost:30000")
    return text.rstrip("/")


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _nats(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return value
