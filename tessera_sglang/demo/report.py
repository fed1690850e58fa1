"""What was measured: one table, the checks on it, and the answers where they mean something."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera_sglang import tables
from tessera_sglang.attention.layout import Span, lay_out
from tessera_sglang.claims import Check as Check
from tessera_sglang.claims import at_least, at_most, within
from tessera_sglang.config import Config
from tessera_sglang.tables import Table

from .agents import Prompt, Workload
from .measure import PHASES, Measurement

SIDES = {"radix": "stock", "content": "tessera"}
_HEADER = (
    *("agents arrive", "cache", "prompt", "computed", "cached", "in pool", "copies"),
    *("TTFT p50", "wall time"),
)


def of(measured: Sequence[Measurement], phase: str, index: str) -> Measurement:
    """The measurement of one phase on one side."""
    return next(m for m in measured if (m.phase, m.index) == (phase, index))


def checks(
    measured: Sequence[Measurement], prompts: Sequence[Prompt], workload: Workload
) -> list[Check]:
    """What the demo claims, phase by phase."""
    found = []
    agents = len(prompts)
    share = workload.computed_share / agents
    slack = workload.copies_tolerance
    for phase in PHASES:
        stock, tessera = of(measured, phase, "radix"), of(measured, phase, "content")
        warm = sum(
            answer.cached_tokens >= shared_tokens(prompt, tessera.page_tokens)
            for answer, prompt in zip(tessera.answers, prompts, strict=True)
        )
        found += [
            at_least(f"{phase}: agents that found every shared page cached", warm, agents - 1),
            at_most(
                f"{phase}: tokens computed, tessera / stock",
                tessera.computed_tokens / stock.computed_tokens,
                share,
            ),
            within(f"{phase}: copies of the document, tessera", tessera.copies, 1, slack),
            within(f"{phase}: copies of the document, stock", stock.copies, agents, slack),
        ]
    return found


def shared_tokens(prompt: Prompt, page_tokens: int) -> int:
    """Tokens of a prompt that lie in shared pages; the size of the root does not matter for it."""
    layout = lay_out(
        [Span(*prompt.document)],
        prompt_tokens=len(prompt.tokens),
        page_size=page_tokens,
        root_tokens=0,
        linked_pages=Config().link_pages,
    )
    return layout.shared_tokens if layout is not None else 0


def show(
    measured: Sequence[Measurement],
    found: Sequence[Check],
    prompts: Sequence[Prompt],
    workload: Workload,
) -> None:
    """Print everything to standard output."""
    first = measured[0]
    linked = Config().link_pages * first.page_tokens
    tables.show(_table(measured))
    print(
        f"\n{len(prompts)} agents, one document of {first.document_tokens:,} tokens, pages of "
        f"{first.page_tokens}. Counts are tokens: prompt,\n"
        "computed (prompt less cached) and cached summed over the agents, in pool as held after "
        "the last answer.\n"
        f"Each agent also computes the first {linked} tokens of the document in place "
        f"(link_pages {Config().link_pages}).\n"
        f"The one prefill of the shared pages runs over a root page and those {linked} tokens as "
        "well: no request counts that."
    )
    if workload.answers_mean_something:
        _show_answers(measured, prompts)
    else:
        print("The example model only knows how to look up codes: its answers here mean nothing.")
    for check in found:
        print(check.line())


def _table(measured: Sequence[Measurement]) -> Table:
    rows = [row for phase in PHASES for row in _rows(measured, phase)]
    sections = frozenset(range(2, len(rows) - 1, 3))
    return Table("", _HEADER, tuple(rows), left=frozenset({0, 1}), sections=sections)


def _rows(measured: Sequence[Measurement], phase: str) -> Iterator[tuple[str, ...]]:
    """Both sides, and how many times stock's are Tessera's."""
    stock, tessera = of(measured, phase, "radix"), of(measured, phase, "content")
    for one in (stock, tessera):
        counts = (one.prompt_tokens, one.computed_tokens, one.cached_tokens, one.held_tokens)
        yield (
            phase if one is stock else "",
            SIDES[one.index],
            *(f"{count:,}" for count in counts),
            f"{one.copies:.2f}",
            f"{one.ttft_p50_s:.2f} s",
            f"{one.wall_s:.2f} s",
        )
    yield (
        "",
        "stock / tessera",
        "",
        _ratio(stock.computed_tokens, tessera.computed_tokens),
        "",
        _ratio(stock.held_tokens, tessera.held_tokens),
        _ratio(stock.copies, tessera.copies),
        _ratio(stock.ttft_p50_s, tessera.ttft_p50_s),
        _ratio(stock.wall_s, tessera.wall_s),
    )


def _show_answers(measured: Sequence[Measurement], prompts: Sequence[Prompt]) -> None:
    print(
        "\nGreedy answers of both sides, cut off after a fixed number of tokens. They differ where\n"
        "they do because shared pages are computed without the preamble before them."
    )
    stock, tessera = (of(measured, "together", index).answers for index in ("radix", "content"))
    for prompt, before, after in zip(prompts, stock, tessera, strict=True):
        print(f"\n{prompt.role.partition(':')[0]}: {prompt.question}")
        print(f"  stock    {_one_line(before.text)}")
        print(f"  tessera  {_one_line(after.text)}")
    print()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _ratio(stock: float, tessera: float) -> str:
    return f"{stock / tessera:.1f}x" if tessera else "-"
