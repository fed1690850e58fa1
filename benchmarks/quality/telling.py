"""What was measured, for readers: tables, and a paragraph made from the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.report import Table

from .rows import LABELS, Row
from .ways import AGAIN, BARE, DEFAULT, FULL, PATCHED, REUSED

BROKEN_DOWN = (FULL, BARE, "none/1", "auto/0", DEFAULT, REUSED, PATCHED)
LEGEND = """± is the deviation between seeds; cold and warm: prompt tokens computed for the first reader
of the documents and for a later one behind another preamble, as the server reports them (for a first
one it counts linked pages once, though they are computed in place and in isolation)"""


def tables(model: str, rows: Sequence[Row]) -> list[Table]:
    """All settings, and the main ones by size and kind."""
    parts = [row for row in rows if row.by in LABELS and row.setting in BROKEN_DOWN]
    found = [_settings(model, [row for row in rows if row.by == "all"])]
    return [*found, *([_breakdown(model, parts)] if parts else [])]


def _settings(model: str, rows: Sequence[Row]) -> Table:
    first = rows[0]
    return Table(
        f"{model}: {first.questions} questions, {first.seeds} seeds, prompts of "
        f"{first.prompt_tokens or 0:,.0f} tokens\n{LEGEND}",
        (
            *("root/link pages", first.right, "±", "NLL", "±", "KL", "±", "worst KL"),
            *("agreement", "cold", "warm"),
        ),
        [
            (
                f"{row.setting} (simulated)" if row.simulated else row.setting,
                *(f"{value:.3f}" for value in (row.recall, row.recall_spread)),
                *(f"{value:.3f}" for value in (row.nll, row.nll_spread)),
                *(f"{value:.4f}" for value in (row.kl, row.kl_spread)),
                f"{row.worst_kl:.2f}",
                f"{row.agreement:.3f}",
                *(None if n is None else round(n) for n in (row.computed_cold, row.computed_warm)),
            )
            for row in rows
        ],
    )


def _breakdown(model: str, rows: Sequence[Row]) -> Table:
    """A column for each size and kind, recall / KL in its cells."""
    columns = list(dict.fromkeys(_part(row) for row in rows))
    cells = {(row.setting, _part(row)): f"{row.recall:.3f} / {row.kl:.3f}" for row in rows}
    settings = dict.fromkeys(row.setting for row in rows)
    return Table(
        f"{model}: {rows[0].right} / KL by size and kind",
        ("root/link pages", *columns),
        [(name, *(cells.get((name, column)) for column in columns)) for name in settings],
    )


def _part(row: Row) -> str:
    if row.by == "documents":
        return f"{row.documents} documents"
    return f"{row.document_bytes} bytes" if row.by == "document_bytes" else str(row.kind)


def paragraph(model: str, rows: Sequence[Row]) -> str:
    """What spans cost on this model, and what linked pages and a root buy."""
    of = {row.setting: row for row in rows if row.by == "all"}
    return " ".join(_sentences(model, of))


def _sentences(model: str, of: dict[str, Row]) -> Iterator[str]:
    full, bare, default = of[FULL], of[BARE], of[DEFAULT]
    yield f"{model}: full attention has {_share(full)} and, asked again, a KL of {of[AGAIN].kl:.2g}."
    yield f"Isolated documents without a root ({BARE}) have {_quality(bare)}: that is the cost of spans."
    yield (
        f"A root alone (auto/0) makes it {_quality(of['auto/0'])}, one linked page alone (none/1) "
        f"{_quality(of['none/1'])}, both (auto/1, the default) {_quality(default)}, and two linked "
        f"pages (auto/2) {_quality(of['auto/2'])}."
    )
    if bare.computed_warm and default.computed_warm and default.prompt_tokens:
        yield (
            f"Of {default.prompt_tokens:,.0f} prompt tokens a later reader computes "
            f"{bare.computed_warm:,.0f} without linked pages, {default.computed_warm:,.0f} with one."
        )
    yield (
        f"KV reused from behind another preamble has {_quality(of[REUSED])}, with the first 15 % of "
        f"each document recomputed {_quality(of[PATCHED])} (both simulated)."
    )


def _quality(row: Row) -> str:
    return f"{_share(row)} at a KL of {row.kl:.2g} ± {row.kl_spread:.1g}"


def _share(row: Row) -> str:
    return f"{row.right} {row.recall:.3f}"
