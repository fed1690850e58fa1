"""What was measured: one table, the checks on it, and the answers where they mean something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from tessera_sglang.attention.layout import Span, lay_out
from tessera_sglang.config import Config

from .agents import Prompt, Workload
from .measure import PHASES, Measurement

SIDES = {"radix": "stock", "content": "tessera"}
_WIDTH = 112  # where the table is not cut short, whatever the terminal


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, the value measured for it, and whether it holds."""

    name: str
    value: float
    target: str
    holds: bool


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
            _at_least(f"{phase}: agents that found every shared page cached", warm, agents - 1),
            _at_most(
                f"{phase}: tokens computed, tessera / stock",
                tessera.computed_tokens / stock.computed_tokens,
                share,
            ),
            _within(f"{phase}: copies of the document, tessera", tessera.copies, 1, slack),
            _within(f"{phase}: copies of the document, stock", stock.copies, agents, slack),
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
    console = Console(highlight=False)
    if console.width < _WIDTH:
        console = Console(highlight=False, width=_WIDTH)
    first = measured[0]
    linked = Config().link_pages * first.page_tokens
    console.print(_table(measured))
    console.print(
        f"{len(prompts)} agents, one document of {first.document_tokens:,} tokens, pages of "
        f"{first.page_tokens}. Counts are tokens: prompt,\n"
        "computed (prompt less cached) and cached summed over the agents, in pool as held after "
        "the last answer.\n"
        f"Each agent also computes the first {linked} tokens of the document in place "
        f"(link_pages {Config().link_pages}).\n"
        f"The one prefill of the shared pages runs over a root page and those {linked} tokens as "
        "well: no request counts that."
    )
    if workload.answers_mean_something:
        _show_answers(console, measured, prompts)
    else:
        console.print("The example model has random weights: its answers mean nothing.")
    for check in found:
        verdict = "holds " if check.holds else "FAILED"
        console.print(f"{verdict}  {check.name}: {check.value:.4g} (claimed: {check.target})")


def _table(measured: Sequence[Measurement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("agents arrive")
    table.add_column("cache")
    for heading in ("prompt", "computed", "cached", "in pool", "copies", "TTFT p50", "wall time"):
        table.add_column(heading, justify="right")
    for phase in PHASES:
        stock, tessera = of(measured, phase, "radix"), of(measured, phase, "content")
        for one in (stock, tessera):
            table.add_row(
                phase if one is stock else "",
                SIDES[one.index],
                *(
                    f"{count:,}"
                    for count in (
                        one.prompt_tokens,
                        one.computed_tokens,
                        one.cached_tokens,
                        one.held_tokens,
                    )
                ),
                f"{one.copies:.2f}",
                f"{one.ttft_p50_s:.2f} s",
                f"{one.wall_s:.2f} s",
            )
        table.add_row(
            "",
            "stock / tessera",
            "",
            _ratio(stock.computed_tokens, tessera.computed_tokens),
            "",
            _ratio(stock.held_tokens, tessera.held_tokens),
            _ratio(stock.copies, tessera.copies),
            _ratio(stock.ttft_p50_s, tessera.ttft_p50_s),
            _ratio(stock.wall_s, tessera.wall_s),
            end_section=True,
        )
    return table


def _show_answers(
    console: Console, measured: Sequence[Measurement], prompts: Sequence[Prompt]
) -> None:
    console.print(
        "\nGreedy answers of both sides, cut off after a fixed number of tokens. They differ where "
        "they do because shared pages are computed without the preamble before them."
    )
    stock, tessera = (of(measured, "together", index).answers for index in ("radix", "content"))
    for prompt, before, after in zip(prompts, stock, tessera, strict=True):
        console.print(f"\n{prompt.role.partition(':')[0]}: {prompt.question}", markup=False)
        console.print(f"  stock    {_one_line(before.text)}", markup=False, soft_wrap=True)
        console.print(f"  tessera  {_one_line(after.text)}", markup=False, soft_wrap=True)
    console.print()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _ratio(stock: float, tessera: float) -> str:
    return f"{stock / tessera:.1f}x" if tessera else "-"


def _at_least(name: str, value: float, target: float) -> Check:
    return Check(name, value, f">= {target:g}", value >= target)


def _at_most(name: str, value: float, target: float) -> Check:
    return Check(name, value, f"<= {target:g}", value <= target)


def _within(name: str, value: float, target: float, slack: float) -> Check:
    return Check(name, value, f"{target:g} ± {slack:.0%}", abs(value / target - 1) <= slack)
