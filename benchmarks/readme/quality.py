"""Quality by setting. Reads ``figures["rows"]`` with ``by == "all"``, as the plot does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.saved import Saved

from .markdown import MISSING, count, table


def of_model(model: str) -> Callable[[Saved], str]:
    """The table of one model, and the paragraph that the command makes of its figures."""

    def made(result: Saved) -> str:
        rows = [
            row for row in result.figures["rows"] if row["model"] == model and row["by"] == "all"
        ]
        if not rows:
            return f"{model} was not measured."
        right = str(rows[0]["right"])
        heads = ("root / linked pages", right, "NLL", "KL to full attention", "agreement")
        cells = table((*heads, "computed cold", "warm"), [_cells(row) for row in rows])
        said = [note for note in result.notes if note.startswith(f"{model}:")]
        return "\n\n".join([cells, *said])

    return made


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{row['setting']} (simulated)" if row["simulated"] else str(row["setting"])
    return (
        name,
        f"{row['recall']:.3f} ± {row['recall_spread']:.3f}",
        f"{row['nll']:.3f}",
        f"{row['kl']:.4f} ± {row['kl_spread']:.4f}",
        f"{row['agreement']:.2f}",
        *(_tokens(row[name]) for name in ("computed_cold", "computed_warm")),
    )


def _tokens(value: float | None) -> str:
    return MISSING if value is None else count(value)
