"""Recorded sessions of chat agents: every prompt that a session sent, in order, its messages as spans.

    python -m benchmarks.workloads.traces --traces DIR --out sessions.jsonl --tokenizer MODEL
    python -m sglang.benchmark.serving --backend sglang-oai-chat --dataset-name openai \\
        --dataset-path sessions.jsonl --max-concurrency 1 --model MODEL --base-url URL

A session is a file ``*.jsonl``; a line has ``timestamp``, ``input`` (the whole prompt) and ``output``.
An input is messages, each ``role: content``, with an empty line between them. A message's content is a
piece of its own for the tokenizer, and so are the role before it and the break behind it: agents pass
each other's messages on under another role, and the same content must be the same tokens.

Which pieces are spans is decided as a client can decide it: from the prompt at hand and from what it has
sent and received before in the session.

- `messages`: contents of at least ``least_tokens`` tokens, from the first time on: a client that waited
  until a message came again would have it computed twice. Nothing has to be known of the session.
- `known`: also a text inside a message that was a message or an answer before, word for word: agents
  fill earlier texts into templates, and the program that does so knows where they begin and end.

A session's answers are recorded and not computed here: what a model generates is no part of a prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera_sglang.bench.agents import Encode, Request
from tessera_sglang.config import PAGE_TOKENS
from tessera_sglang.verify.figures import agreed_tokens

from .jsonl import tokenizer, write

VARIABLE = "TESSERA_TRACES"
POLICIES = ("messages", "known")
_ROLE = re.compile(r"(?:\A|(?<=\n\n))(?:user|assistant|system|tool): ")
_BREAK = "\n\n"
_SHORTEST_KNOWN_CHARACTERS = 128  # a page of text has more: nothing shorter is looked for


@dataclass(frozen=True, slots=True)
class Call:
    """One prompt of a session and what was answered."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Session:
    """Calls in the order in which they were made."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Which pieces are spans, and how much is generated."""

    policy: str = POLICIES[0]
    least_tokens: int = PAGE_TOKENS
    output_tokens: int = 4


@dataclass(frozen=True, slots=True)
class Replayed:
    """A request. ``shifted_tokens`` are of pieces of a page or more that were sent before, elsewhere."""

    request: Request
    shifted_tokens: int


def folder_of(option: Path | None) -> Path | None:
    """Where sessions lie: what the option says, else ``TESSERA_TRACES``; None where there are none."""
    named = option or os.environ.get(VARIABLE)
    folder = Path(named) if named else None
    return folder if folder is not None and any(folder.glob("*.jsonl")) else None


def sessions(folder: Path) -> list[Session]:
    """All sessions of a folder, by name."""
    return [_session(path) for path in sorted(folder.glob("*.jsonl"))]


def _session(path: Path) -> Session:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    lines.sort(key=lambda line: line["timestamp"])
    calls = (Call(line["input"], line["output"]) for line in lines)
    return Session(path.stem[:8], tuple(call for call in calls if call.prompt))


def replayed(session: Session, encode: Encode, options: Options) -> list[Replayed]:
    """A session's prompts in tokens. ``encode`` adds no special tokens."""
    found: list[Replayed] = []
    sent: set[tuple[int, ...]] = set()
    texts = Texts(options.policy)
    for call in session.calls:
        tokens: list[int] = []
        pieces: list[tuple[int, int]] = []  # that a later prompt may repeat
        for text, repeatable in _pieces(call.prompt, texts):
            start = len(tokens)
            tokens += encode(text)
            if repeatable and len(tokens) - start >= PAGE_TOKENS:
                pieces.append((start, len(tokens)))
        texts.seen(call.answer)
        common = max((agreed_tokens(tokens, one.request.input_ids) for one in found), default=0)
        ids = {piece: tuple(tokens[slice(*piece)]) for piece in pieces}
        shifted = sum(
            end - start for start, end in pieces if end > common and ids[start, end] in sent
        )
        spans = tuple(p for p in pieces if p[1] - p[0] >= options.least_tokens)
        request = Request(tuple(tokens), spans, options.output_tokens)
        found.append(Replayed(request, shifted))
        sent.update(ids.values())
    return found


class Texts:
    """What a client has sent and received so far, and where it cuts contents because of it."""

    def __init__(self, policy: str) -> None:
        self._known: dict[str, None] | None = {} if policy == "known" else None
        self._cut: dict[str, list[str]] = {}

    def seen(self, text: str) -> None:
        """``text`` may be part of a later prompt."""
        if self._known is not None and len(text) >= _SHORTEST_KNOWN_CHARACTERS:
            self._known[text] = None

    def cut(self, content: str) -> list[str]:
        """The content in parts. A content is cut once: other cuts would be other tokens and spans."""
        if content not in self._cut:
            self._cut[content] = self._parts(content)
        return self._cut[content]

    def _parts(self, content: str) -> list[str]:
        for text in sorted(self._known or (), key=len, reverse=True):
            before, found, after = content.partition(text)
            if found:
                return [*self._parts(before), found, *self._parts(after)]
        return [content]


def _pieces(prompt: str, texts: Texts) -> Iterator[tuple[str, bool]]:
    """Pieces that make up the prompt, and whether a client would know them again."""
    contents = []
    for text, is_content in messages(prompt):
        if not is_content:
            yield text, False
            continue
        contents.append(text)
        for part in texts.cut(text):
            yield part, True
    for text in contents:
        texts.seen(text)


def messages(prompt: str) -> Iterator[tuple[str, bool]]:
    """Roles, contents and breaks, which make up the prompt; True for contents."""
    roles = [match.span() for match in _ROLE.finditer(prompt)]
    if not roles or roles[0][0]:
        yield prompt[: roles[0][0] if roles else len(prompt)], True
        if not roles:
            return
    ends = [start for start, _ in roles[1:]] + [len(prompt)]
    for (start, content), end in zip(roles, ends, strict=True):
        last = end - len(_BREAK) if prompt.endswith(_BREAK, content, end) else end
        yield prompt[start:content], False
        yield prompt[content:last], True
        yield prompt[last:end], False


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all sessions, one after the other, as JSON lines; 1 where there are none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--traces", type=Path, help=f"folder of sessions; else {VARIABLE}")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="of the model")
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="what is a span")
    options = parser.parse_args(arguments)
    folder = folder_of(options.traces)
    if folder is None:
        print(f"no sessions: give --traces or {VARIABLE}, a folder of *.jsonl", file=sys.stderr)
        return 1
    encode, decode = tokenizer(options.tokenizer)
    wanted = Options(policy=options.policy)
    found = [one.request for each in sessions(folder) for one in replayed(each, encode, wanted)]
    write(options.out, found, decode)
    tokens = sum(len(request.input_ids) for request in found)
    print(f"{options.out}: {len(found)} requests, {tokens:,} tokens", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
