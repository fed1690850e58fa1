"""What was measured, and the report that follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.report import Check, Report, Table
from benchmarks.serving.replay import hit_rate, hit_rates
from benchmarks.workloads.rag import Shape
from tessera_sglang.demo.client import Answer

PARTS = 5  # the last fifth of the draws is compared with the second
CURVE_POINTS = 20
NO_DECAY = 0.98


@dataclass(frozen=True, slots=True)
class Steady:
    """A corpus that fits, drawn again and again."""

    answers: tuple[Answer, ...]
    stored_pages: tuple[int, ...]  # shared ones of documents, in the pool, at every look
    corpus_pages: int
    corpus_tokens: int
    prefix_hit_tokens: tuple[int, ...] = ()  # of plain prefixes, between two looks


@dataclass(frozen=True, slots=True)
class Curve:
    """A corpus that does not fit, on both sides."""

    shape: Shape
    pool_tokens: int
    corpus_tokens: int
    tessera: tuple[Answer, ...]
    stock: tuple[Answer, ...]

    @property
    def width(self) -> int:
        """Draws a point."""
        return max(1, len(self.tessera) // CURVE_POINTS)


def report(steady: Steady, curve: Curve) -> Report:
    """Checks, tables and raw figures."""
    second, last = compared(steady.answers)
    early, late = compared(curve.tessera)
    part = len(steady.answers) // PARTS
    return Report(
        "rag",
        settings={
            "pool_tokens": curve.pool_tokens,
            "steady": {"draws": len(steady.answers), "corpus_tokens": steady.corpus_tokens},
            "large": {**asdict(curve.shape), "corpus_tokens": curve.corpus_tokens},
        },
        checks=[
            Check.at_least(
                f"steady: hit rate of the last {part} draws / of draws {part + 1} to {2 * part}",
                last / second if second else None,
                1.0,
            ),
            Check.at_most(
                "steady: most shared pages of documents in the pool / of the corpus",
                max(steady.stored_pages) / steady.corpus_pages,
                1.0,
            ),
            Check.at_least(
                "larger than the cache: hit rate of the last fifth of the draws / of the second",
                late / early if early else None,
                NO_DECAY,
            ),
        ],
        figures={
            "steady": {
                "hit_rate": [a.cached_tokens / a.prompt_tokens for a in steady.answers],
                "stored_document_pages": list(steady.stored_pages),
                "prefix_hit_tokens": list(steady.prefix_hit_tokens),
                "corpus_pages": steady.corpus_pages,
                "ttft_p50_s": statistics.median(a.ttft_s for a in steady.answers),
            },
            "curve": {
                "draws_a_point": curve.width,
                "tessera": hit_rates(curve.tessera, curve.width),
                "stock": hit_rates(curve.stock, curve.width),
                "ttft_p50_s": {
                    "tessera": statistics.median(a.ttft_s for a in curve.tessera),
                    "stock": statistics.median(a.ttft_s for a in curve.stock),
                },
            },
        },
        tables=[_steady_table(steady), _curve_table(curve), _sides_table(curve)],
        notes=[
            "A request counts a span that was computed for it as computed. Hit rate: cached by prompt "
            "tokens.",
            f"Stock's curve has {len(curve.stock)} draws, Tessera's {len(curve.tessera)}: without "
            "shared beginnings there is little that could change.",
        ],
    )


def compared(answers: Sequence[Answer]) -> tuple[float, float]:
    """Hit rates of the second and of the last part of the draws."""
    part = len(answers) // PARTS
    return hit_rate(answers[part : 2 * part]), hit_rate(answers[-part:])


def _steady_table(steady: Steady) -> Table:
    width, looks = len(steady.answers) // PARTS, len(steady.stored_pages) // PARTS
    rows = []
    for number in range(PARTS):
        answers = steady.answers[number * width : (number + 1) * width]
        seen = slice(number * looks, (number + 1) * looks)
        prefixes = sum(steady.prefix_hit_tokens[seen]) / sum(a.prompt_tokens for a in answers)
        rows.append(
            (
                f"{number * width + 1} to {(number + 1) * width}",
                f"{hit_rate(answers):.2%}",
                f"{prefixes:.2%}",
                max(steady.stored_pages[seen]),
                steady.corpus_pages,
            )
        )
    columns = (
        *("draws", "hit rate", "of plain prefixes"),
        *("shared pages stored, at most", "of the corpus"),
    )
    return Table("Steady: a corpus that fits", columns, rows)


def _curve_table(curve: Curve) -> Table:
    width = curve.width
    sides = (hit_rates(curve.tessera, width), hit_rates(curve.stock, width))
    rows = [
        (
            f"{number * width + 1} to {(number + 1) * width}",
            *(f"{side[number]:.1%}" if number < len(side) else "-" for side in reversed(sides)),
        )
        for number in range(len(sides[0]))
    ]
    title = (
        f"Larger than the cache: {curve.corpus_tokens:,} tokens in {curve.shape.documents} documents, "
        f"pool of {curve.pool_tokens:,}, hit rate"
    )
    return Table(title, ("draws", "stock", "tessera"), rows)


def _sides_table(curve: Curve) -> Table:
    """Over the draws that both sides got."""
    tessera, stock = curve.tessera[: len(curve.stock)], curve.stock
    rows = []
    for name, (before, after) in {
        "tokens computed": (_computed(stock), _computed(tessera)),
        "TTFT p50, ms": (_ttft_ms(stock), _ttft_ms(tessera)),
    }.items():
        rows.append((name, round(before), round(after), f"{after / before:.3f}"))
    title = f"The first {len(stock)} draws from the large corpus"
    return Table(title, ("", "stock", "tessera", "tessera / stock"), rows)


def _computed(answers: Sequence[Answer]) -> float:
    return sum(a.prompt_tokens - a.cached_tokens for a in answers)


def _ttft_ms(answers: Sequence[Answer]) -> float:
    return statistics.median(a.ttft_s for a in answers) * 1e3
