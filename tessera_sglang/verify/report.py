"""What was measured, for people and as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tessera_sglang import tables
from tessera_sglang.config import VARIABLE

from . import verdict as judging
from .client import ServerState
from .figures import Summary
from .measure import TOP, Measured
from .settings import FULL, SERVER, Setting
from .verdict import Verdict


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is shown."""

    state: ServerState
    prompts: int
    new_tokens: int
    measured: Measured
    summaries: Mapping[Setting, Summary]
    verdict: Verdict

    @property
    def warnings(self) -> list[str]:
        """What makes the figures doubtful."""
        lengths = [len(one.tokens) for one in self.measured.references]
        found = [judging.unsure(self.measured.mean_entropy_nats, self.measured.text_nll_nats)]
        if self.new_tokens >= judging.SHORT_TOKENS:
            found.append(judging.short(sum(lengths) / len(lengths)))
        if all(one.saved <= self.full.saved for one in self.spans.values()):
            found.append(
                "no setting saves a token: the spans are no longer than a page of "
                f"{self.state.page_tokens} tokens and the linked pages"
            )
        return [text for text in found if text is not None]

    @property
    def full(self) -> Summary:
        """Full attention against itself."""
        return _full(self)[1]

    @property
    def spans(self) -> dict[Setting, Summary]:
        """All other settings."""
        return {setting: one for setting, one in self.summaries.items() if setting.root != FULL}


def show(report: Report) -> None:
    """Print for people."""
    state = report.state
    print(
        f"{state.model}: {report.prompts} prompts of {report.full.prompt_tokens:,} tokens, "
        f"{sum(len(one.tokens) for one in report.measured.references)} tokens of continuation"
    )
    tables.show(_table(report))
    print()
    for line in (*_legend(report), "", *_verdict(report)):
        print(line)


def _table(report: Report) -> tables.Table:
    rows = [
        (
            *_names(setting, report.state),
            f"{one.mean_kl_nats:.4f}",
            f"{one.worst.kl_nats:.3f}",
            f"{one.nll_nats:.3f}",
            f"{one.same_choice:.0%}",
            f"{one.agreement:.0%}",
            f"{one.cold_computed_tokens:,}",
            f"{one.warm_computed_tokens:,}",
            f"{one.saved:.1%}",
            _word(setting, report.verdict),
        )
        for setting, one in report.summaries.items()
    ]
    header = (
        "root",
        "link pages",
        "KL mean",
        "worst",
        "NLL",
        "choice",
        "agree",
        "cold",
        "warm",
        "saved",
        "",
    )
    return tables.Table(
        "Spans against full attention", header, tuple(rows), left=frozenset({0, 10})
    )


def _word(setting: Setting, verdict: Verdict) -> str:
    if not setting.declares_spans:
        return ""
    return "passes" if setting.name in verdict.passing else "fails"


def _names(setting: Setting, state: ServerState) -> tuple[str, str]:
    if not setting.declares_spans:
        return setting.name, ""
    if setting.root == SERVER:
        return f"the server's ({state.root_tokens} tokens)", str(state.link_pages)
    return setting.root, str(setting.link_pages)


def _legend(report: Report) -> Iterator[str]:
    worst = max((one.worst for one in report.spans.values()), key=lambda at: at.kl_nats)
    yield (
        f"KL: of full attention to spans, nats a token, over full attention's {TOP} most probable "
        "tokens and a bucket for the rest: a lower bound. Full attention is compared with a second "
        "run of itself: the floor."
    )
    yield (
        "NLL: of full attention's greedy continuation, nats a token. Choice: the share of its tokens "
        "that are the most probable ones. Agree: the share of it that a greedy answer begins with."
    )
    yield (
        "Cold, warm: prompt tokens computed by the first reader of the spans, and by one who meets "
        "them computed, behind another preamble."
    )
    yield f"Largest divergence: {worst.where}, token {worst.token + 1} of the continuation."


def _verdict(report: Report) -> Iterator[str]:
    found = report.verdict
    for text in report.warnings:
        yield f"Warning: {text}"
    yield (
        f"Passes: mean KL of at most {found.threshold_nats:g} nats, and choice of at least "
        f"{found.least_same_choice:.0%}, {judging.CHOICE_MARGIN:.0%} below full attention's second run."
    )
    yield (
        f"The server's own settings (link_pages {report.state.link_pages}, a root of "
        f"{report.state.root_tokens} tokens) {'pass' if found.server_passes else 'fail'}."
    )
    if found.recommended is None:
        advice = "do not declare spans for prompts like these on this model"
        yield "No setting passes." if report.warnings else f"No setting passes: {advice}."
        return
    one = report.summaries[found.recommended]
    yield (
        f"Recommended, the cheapest that passes: {one.warm_computed_tokens:,} of "
        f"{one.prompt_tokens:,} tokens computed, KL {one.mean_kl_nats:.4f}."
    )
    yield f"    {config_line(found.recommended)}"
    if found.recommended.root == "own" and found.recommended.own is None:
        yield "    with the server's span_root as it is"


def config_line(setting: Setting) -> str:
    """For a shell, in front of the server's command."""
    if setting.root == SERVER:
        return f"{VARIABLE} as the server has it"
    return f"{VARIABLE}={shlex.quote(json.dumps(setting.config))}"


def as_json(report: Report) -> dict[str, Any]:
    """All raw figures."""
    found = report.verdict
    chosen = found.recommended
    return {
        "server": dataclasses.asdict(report.state),
        "new_tokens": report.new_tokens,
        "top_tokens": TOP,
        "full_attention": {
            "mean_entropy_nats": report.measured.mean_entropy_nats,
            "text_nll_nats": report.measured.text_nll_nats,
            **_figures(report, *_full(report)),
            "continuations": [list(one.tokens) for one in report.measured.references],
        },
        "settings": [
            {
                "name": setting.name,
                "root": setting.root,
                "link_pages": setting.link_pages,
                "passes": setting.name in found.passing,
                **_figures(report, setting, summary),
            }
            for setting, summary in report.spans.items()
        ],
        "warnings": report.warnings,
        "verdict": {
            "threshold_nats": found.threshold_nats,
            "least_same_choice": found.least_same_choice,
            "passing": list(found.passing),
            "server_passes": found.server_passes,
            "recommended": None if chosen is None else chosen.config,
            "recommended_name": None if chosen is None else chosen.name,
        },
    }


def _full(report: Report) -> tuple[Setting, Summary]:
    return next(entry for entry in report.summaries.items() if entry[0].root == FULL)


def _figures(report: Report, setting: Setting, summary: Summary) -> dict[str, Any]:
    return {
        "summary": {**dataclasses.asdict(summary), "saved": summary.saved},
        "prompts": [
            {**dataclasses.asdict(one), "agreement": one.agreement}
            for one in report.measured.figures[setting]
        ],
    }
