"""Time to first token of documents that a server before left on disk, by that of new ones.

    python -m benchmarks.restart [--quick] [--json] [--model DIR]

A server with a disk tier computes documents, as spans behind preambles that nobody sent before, and is
killed when all of it is written. Another one over the same directory then gets the same documents behind
other preambles, and new documents in turns with them. What is compared is measured on that server: the
known documents come from the disk, the new ones are computed.

Its pool holds a few documents only, so that each known one comes from below.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tessera_sglang.bench.agents import Encode, document
from tessera_sglang.bench.sides import TESSERA, Launch, server_of
from tessera_sglang.config import VARIABLE
from tessera_sglang.demo.client import Answer, generate, tessera_state
from tessera_sglang.launch import Server, signals_raise

from .report import Check, Report, Table, argument_parser
from .serving import progress, servers
from .workloads import texts
from .workloads.jsonl import tokenizer

BAR = 1 / 3
DOCUMENT_TOKENS, QUICK_TOKENS = 8192, 4096
DOCUMENTS, QUICK_DOCUMENTS = 11, 5
AROUND_TOKENS = 128  # before a document, and behind it
DISK_BYTES = 8 << 30
WRITTEN_S = 120.0


def main() -> int:
    """Measure and report; 0 if all checks hold."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, default=servers.MODEL)
    options = parser.parse_args()
    tokens = QUICK_TOKENS if options.quick else DOCUMENT_TOKENS
    count = QUICK_DOCUMENTS if options.quick else DOCUMENTS
    encode, _ = tokenizer(options.model)
    chance = random.Random(1)
    known = [document(0, tokens, encode, chance) for _ in range(count + 1)]
    new = [document(0, tokens, encode, chance) for _ in range(count + 1)]
    with (
        signals_raise(),
        tempfile.TemporaryDirectory(prefix="tessera-restart-") as directory,
        progress.bar(len(known) * 3, "request") as bar,
    ):
        ask = Asker(encode, chance, bar)
        with _server(options.model, directory, tokens) as server:
            first = [ask(server.url, text) for text in known]
            _await_written(server.url)
        with _server(options.model, directory, tokens) as server:
            pairs = [
                (ask(server.url, one), ask(server.url, other))
                for one, other in zip(known, new, strict=True)
            ][1:]  # the first ones also warm up
            state = tessera_state(server.url)
    return _report(first, pairs, state, tokens).emit(as_json=options.json, save=options.save)


class Asker:
    """Sends documents as spans between texts that nobody sent before."""

    def __init__(self, encode: Encode, chance: random.Random, bar: Any) -> None:
        self._encode, self._chance, self._bar = encode, chance, bar

    def __call__(self, url: str, text: Sequence[int]) -> Answer:
        """One request for one token."""
        before, behind = (
            texts.preamble(AROUND_TOKENS, self._encode, self._chance) for _ in range(2)
        )
        span = (len(before), len(before) + len(text))
        answer = generate(url, [*before, *text, *behind], [span], 1)
        self._bar.update()
        return answer


def _server(model: Path, directory: str, tokens: int) -> Server:
    config = {"disk_tier_path": f"{directory}/kv", "disk_tier_bytes": DISK_BYTES}
    os.environ[VARIABLE] = msgspec.json.encode(config).decode()
    pool_tokens = servers.whole_pages(4 * (tokens + 4 * AROUND_TOKENS))
    environment = (("OMP_NUM_THREADS", str(servers.THREADS)),)
    return server_of(Launch(str(model), pool_tokens, environment=environment), TESSERA)


def _await_written(url: str) -> None:
    deadline = time.monotonic() + WRITTEN_S
    while time.monotonic() < deadline:
        tiers = tessera_state(url)["lower_tiers"]
        sizes = tiers["sizes"]
        left = sizes["dirty_pages"] + sizes["filling_pages"] + sizes["writing_pages"]
        if not left + tiers["unwritten"]:
            return
        time.sleep(0.2)
    raise TimeoutError(f"pages are not on disk after {WRITTEN_S:g} s: {tiers}")


def _report(
    first: Sequence[Answer], pairs: Sequence[tuple[Answer, Answer]], state: object, tokens: int
) -> Report:
    kinds = {
        "new, first server": first[1:],
        "new, second server": [new for _, new in pairs],
        "from disk, second server": [known for known, _ in pairs],
    }
    ttft_s = {
        name: statistics.median(one.ttft_s for one in answers) for name, answers in kinds.items()
    }
    ratio = ttft_s["from disk, second server"] / ttft_s["new, second server"]
    least = min(known.cached_tokens for known, _ in pairs)
    rows = [
        (
            name,
            round(statistics.median(one.cached_tokens for one in answers)),
            f"{ttft_s[name] * 1e3:.1f}",
        )
        for name, answers in kinds.items()
    ]
    return Report(
        "restart",
        settings={"document_tokens": tokens, "documents": len(pairs)},
        checks=[
            Check.at_most(f"TTFT, document of {tokens:,} from disk / new", ratio, BAR),
            Check.at_least("least share of a document that came from disk", least / tokens, 0.98),
        ],
        figures={
            "ttft_s": {name: [one.ttft_s for one in answers] for name, answers in kinds.items()},
            "ratio": ratio,
            "state": state,
        },
        tables=[
            Table(
                f"Medians of {len(pairs)} documents", ("document", "cached", "TTFT p50, ms"), rows
            )
        ],
        notes=["A linked page of each document is computed in place, as always."],
    )


if __name__ == "__main__":
    sys.exit(main())
