"""What a span costs the request that has it: time to first token, on a hit and on a cold cache.

    python -m benchmarks.latency [--quick] [--json] [--model DIR]

**Hit.** The document is known; the prompt has a preamble that nobody sent before, the document, and a
question, so the document is a span hit at an offset of its own. Stock's tree gets a prompt of the same
length that begins with known tokens: a plain prefix hit. Both compute the rest: what is new, and by
default (``link_pages`` 1) the document's first page too, which is recomputed where it stands. So the
default is compared with a prefix hit of its own length, a page less than the document, after which both
have the same number of tokens left to compute. Beside it stand ``link_pages`` 0 against a hit of the
whole document (again the same tokens), and the default against that hit: what a linked page costs.

**Cold.** A document that nobody sent before, as a span and as ordinary text, both on Tessera: a span is
prefilled by itself before its reader.

Requests come one by one, streamed, in turns; a round has each kind once, in another order each time.
Throughput without spans is in ``benchmarks.plain_traffic``.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tessera_sglang.bench.agents import Encode, document
from tessera_sglang.bench.sides import STOCK, TESSERA
from tessera_sglang.config import PAGE_TOKENS
from tessera_sglang.demo.client import Answer, generate

from .report import Check, Report, Table, argument_parser
from .serving import progress, servers
from .serving.servers import Urls
from .workloads import texts
from .workloads.jsonl import tokenizer

HIT_BAR, COLD_BAR = 1.15, 1.05
DOCUMENTS, QUICK_DOCUMENTS = (1024, 4096, 8192), (4096,)
ROUNDS, QUICK_ROUNDS = 11, 5
WARM_UP_ROUNDS = 2
PREAMBLE_TOKENS, QUESTION_TOKENS = 192, 64
NEW_TOKENS = PREAMBLE_TOKENS + QUESTION_TOKENS

Span = tuple[int, int]
Prompt = tuple[list[int], list[Span]]


@dataclass(slots=True)
class Kind:
    """One way to send a prompt, and the answers that were counted."""

    name: str
    side: str
    prompt: Callable[[], Prompt]  # a new one each time
    link_pages: int | None = None  # None: the server's
    answers: list[Answer] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Median."""
        return statistics.median(answer.ttft_s for answer in self.answers)

    @property
    def cached_tokens(self) -> float:
        """Median; the same each time unless pages were lost."""
        return statistics.median(answer.cached_tokens for answer in self.answers)

    @property
    def computed_tokens(self) -> float:
        """Median of what answers do not call cached."""
        return statistics.median(a.prompt_tokens - a.cached_tokens for a in self.answers)

    @property
    def spread(self) -> float:
        """Between the quartiles, by the median."""
        lower, _, upper = statistics.quantiles((a.ttft_s for a in self.answers), n=4)
        return (upper - lower) / self.ttft_s


@dataclass(frozen=True, slots=True)
class Writer:
    """Texts of this run."""

    encode: Encode
    chance: random.Random

    def document(self, tokens: int) -> list[int]:
        """One that nobody knows."""
        return document(0, tokens, self.encode, self.chance)

    def new(self, tokens: int) -> list[int]:
        """A text that begins like no other."""
        return texts.preamble(tokens, self.encode, self.chance)

    def behind(self, known: Sequence[int], tokens: int) -> Prompt:
        """Known tokens, then new ones up to ``tokens``."""
        return [*known, *self.new(tokens - len(known))], []

    def around(self, text: Sequence[int], *, span: bool) -> Prompt:
        """A new preamble, the text, and a new question."""
        tokens = [*self.new(PREAMBLE_TOKENS), *text, *self.new(QUESTION_TOKENS)]
        place = (PREAMBLE_TOKENS, PREAMBLE_TOKENS + len(text))
        return tokens, [place] if span else []


@dataclass(frozen=True, slots=True)
class Pair:
    """A check: ``of`` by ``by``, both measured in the same rounds. ``bar`` None: shown only."""

    what: str
    of: Kind
    by: Kind
    bar: float | None

    @property
    def ratio(self) -> float:
        """Of median times to the first token."""
        return self.of.ttft_s / self.by.ttft_s


def main() -> int:
    """Measure and report; 0 if all checks hold."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, default=servers.MODEL)
    parser.add_argument("--rounds", type=int, help="of each kind of request")
    options = parser.parse_args()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    documents = QUICK_DOCUMENTS if options.quick else DOCUMENTS
    encode, _ = tokenizer(options.model)
    pairs: list[Pair] = []
    with servers.both(options.model, _pool_tokens(documents, rounds)) as urls:
        for tokens in documents:
            pairs += _hits(urls, tokens, rounds, encode)
            pairs += _cold(urls, tokens, rounds, encode)
    return _report(pairs, rounds).emit(as_json=options.json, save=options.save)


def _pool_tokens(documents: Sequence[int], rounds: int) -> int:
    """Nothing is evicted: every cold document is new, and every prompt has new tokens."""
    each = sum(2 * tokens + 8 * NEW_TOKENS for tokens in documents)
    return (rounds + WARM_UP_ROUNDS) * each + 2 * sum(documents)


def _hits(urls: Urls, tokens: int, rounds: int, encode: Encode) -> list[Pair]:
    writer = Writer(encode, random.Random(f"hits {tokens}"))
    known = writer.document(tokens)
    length = tokens + NEW_TOKENS
    shorter = known[: tokens - PAGE_TOKENS]
    whole = Kind("prefix hit, whole document", STOCK, partial(writer.behind, known, length))
    less = Kind("prefix hit, a page less", STOCK, partial(writer.behind, shorter, length))
    span = partial(writer.around, known, span=True)
    unlinked = Kind("span hit, link_pages 0", TESSERA, span, link_pages=0)
    linked = Kind("span hit, by default", TESSERA, span)
    _measure(urls, (whole, less, unlinked, linked), rounds, f"hits, {tokens:,} tokens")
    at = f"document of {tokens:,}"
    return [
        Pair(f"{at}, shifted span hit / prefix hit as long", linked, less, HIT_BAR),
        Pair(f"{at}, link_pages 0 / prefix hit as long", unlinked, whole, None),
        Pair(f"{at}, shifted span hit / hit of the whole document", linked, whole, None),
    ]


def _cold(urls: Urls, tokens: int, rounds: int, encode: Encode) -> list[Pair]:
    writer = Writer(encode, random.Random(f"cold {tokens}"))

    def new(*, span: bool) -> Prompt:
        return writer.around(writer.document(tokens), span=span)

    span = Kind("cold, one span", TESSERA, partial(new, span=True))
    plain = Kind("cold, no span", TESSERA, partial(new, span=False))
    _measure(urls, (span, plain), rounds, f"cold, {tokens:,} tokens")
    return [Pair(f"document of {tokens:,}, cold with a span / without", span, plain, COLD_BAR)]


def _measure(urls: Urls, kinds: Sequence[Kind], rounds: int, label: str) -> None:
    """The warm-up rounds also make known what is to be known."""
    with progress.bar(len(kinds) * (WARM_UP_ROUNDS + rounds), "request") as bar:
        bar.set_description(label)
        for number in range(-WARM_UP_ROUNDS, rounds):
            first = number % len(kinds)
            for kind in (*kinds[first:], *kinds[:first]):
                prompt, spans = kind.prompt()
                url = urls[kind.side]
                answer = generate(url, prompt, spans, 1, link_pages=kind.link_pages)
                if number >= 0:
                    kind.answers.append(answer)
                bar.update()


# --- the report ----------------------------------------------------------------------------------


def _report(pairs: Sequence[Pair], rounds: int) -> Report:
    kinds = list({id(kind): kind for pair in pairs for kind in (pair.by, pair.of)}.values())
    rows = [
        (
            f"{kind.name}, {kind.side}",
            round(kind.cached_tokens),
            round(kind.computed_tokens),
            f"{kind.ttft_s * 1e3:.1f}",
            f"{kind.spread:.0%}",
        )
        for kind in kinds
    ]
    columns = ("request", "cached", "computed", "TTFT p50, ms", "quartiles apart")
    ratios = [
        (pair.what, f"{pair.ratio:.3f}", "shown" if pair.bar is None else f"<= {pair.bar}")
        for pair in pairs
    ]
    return Report(
        "latency",
        settings={
            "rounds": rounds,
            "preamble_tokens": PREAMBLE_TOKENS,
            "question_tokens": QUESTION_TOKENS,
        },
        checks=[
            Check.at_most(f"TTFT, {pair.what}", pair.ratio, pair.bar)
            for pair in pairs
            if pair.bar is not None
        ],
        figures={
            "ratios": {
                f"{pair.of.name} / {pair.by.name}: {pair.what}": pair.ratio for pair in pairs
            },
            "ttft_s": [
                {
                    "kind": kind.name,
                    "side": kind.side,
                    "cached_tokens": kind.cached_tokens,
                    "computed_tokens": kind.computed_tokens,
                    "rounds": [answer.ttft_s for answer in kind.answers],
                }
                for kind in kinds
            ],
        },
        tables=[
            Table(f"Medians of {rounds} rounds in turns", columns, rows),
            Table("Ratios", ("", "ratio", "target"), ratios),
        ],
        notes=[
            "Cached and computed as answers say; a cold span counts as computed by its reader. "
            "Its prefill also computes the root once a cache, and the page that the reader "
            "computes again.",
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
