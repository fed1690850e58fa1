"""A workload as JSON lines that ``sglang.benchmark.serving`` reads as its data set ``openai``.

A request is one user message. Its content is a list of text parts, and those that are spans carry
``cache_control``; the client hands messages on as they are, so Tessera sees the spans and every other
server sees the same text. The chat template adds its own tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from benchmarks.report import ROOT
from tessera_sglang.bench.agents import Encode, Request

Decode = Callable[[Sequence[int]], str]
Maker = Callable[[Any, Encode, int], list[Request]]  # shape, encode, seed


def line(request: Request, decode: Decode) -> dict[str, Any]:
    """A request in the OpenAI format."""
    parts = list(_parts(request, decode))
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": request.output_tokens}


def _parts(request: Request, decode: Decode) -> Iterator[dict[str, Any]]:
    done = 0
    for start, end in request.spans:
        if start > done:
            yield {"type": "text", "text": decode(request.input_ids[done:start])}
        marked = {"cache_control": {"type": "ephemeral"}}
        yield {"type": "text", "text": decode(request.input_ids[start:end]), **marked}
        done = end
    if done < len(request.input_ids):
        yield {"type": "text", "text": decode(request.input_ids[done:])}


def write(path: Path, requests: Sequence[Request], decode: Decode) -> None:
    """One request a line."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(line(request, decode)) + "\n")


def command(
    description: str, shape: type[Any], make: Maker, arguments: Sequence[str] | None = None
) -> int:
    """The command of a workload: an option for each field of its shape."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--tokenizer", default=str(ROOT / "examples/tiny-mla"), metavar="DIR", help="of the model"
    )
    parser.add_argument("--seed", type=int, default=1)
    fields = dataclasses.fields(shape)
    for field in fields:
        _add(parser, field.name, field.default, get_type_hints(shape)[field.name])
    options = parser.parse_args(arguments)
    given = {field.name: getattr(options, field.name) for field in fields}
    try:
        wanted = shape(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    except ValueError as error:
        parser.error(str(error))
    encode, decode = tokenizer(options.tokenizer)
    requests = make(wanted, encode, options.seed)
    write(options.out, requests, decode)
    tokens = sum(len(request.input_ids) for request in requests)
    print(f"{options.out}: {len(requests)} requests, {tokens:,} tokens", file=sys.stderr)
    return 0


def _add(parser: argparse.ArgumentParser, name: str, default: Any, kind: Any) -> None:
    option = "--" + name.replace("_", "-")
    if isinstance(default, tuple):
        shown = f"default {default[0]} to {default[1]}"
        least_most = ("LEAST", "MOST")
        parser.add_argument(
            option, type=int, nargs=2, default=default, metavar=least_most, help=shown
        )
    else:
        parser.add_argument(option, type=kind, default=default, help=f"default {default}")


def tokenizer(directory: str | Path) -> tuple[Encode, Decode]:
    """Both ways, without special tokens."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(directory)
    return partial(_encode, found), partial(_decode, found)


def _encode(found: Any, text: str) -> list[int]:
    ids: list[int] = found(text, add_special_tokens=False)["input_ids"]
    return ids


def _decode(found: Any, ids: Sequence[int]) -> str:
    text: str = found.decode(list(ids))
    return text
