"""The command: both models, every way, checks and a paragraph that says what came out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.report import ROOT, Report, argument_parser
from tessera_sglang.config import PAGE_TOKENS
from tessera_sglang.launch import signals_raise
from tessera_sglang.verify.prompts import Encoder, PromptError, read

from . import quote_cases, recall_cases, telling
from .measure import Subject, measure
from .rows import Row
from .served import DTYPE

EXAMPLE = ROOT / "examples/tiny-mla"
TINY, SMOLLM2 = "tiny-mla", "SmolLM2-135M-Instruct"

RECALL = recall_cases.Amount(
    seeds=3,
    document_bytes=(200, 400),  # three pages of 64 and a bit, six and a bit
    exams=recall_cases.EXAMS,
    questions=3,
    exam_worlds=40,
    exam_questions=5,
)
QUICK_RECALL = recall_cases.Amount(
    seeds=3,
    document_bytes=(200,),
    exams=recall_cases.EXAMS[:1],
    questions=2,
    exam_worlds=20,
    exam_questions=2,
)
QUOTE_SEEDS, QUOTE_CONTEXTS = 3, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit status."""
    parser = argument_parser("what spans cost in quality, and what linked pages and roots buy back")
    parser.add_argument("--model", choices=("tiny", "smollm2", "both"), default="both")
    parser.add_argument("--tiny", type=Path, default=EXAMPLE, help="the trained example model")
    parser.add_argument("--prompts", type=Path, help="JSON lines for SmolLM2, as verify reads them")
    options = parser.parse_args(arguments)
    amount = QUICK_RECALL if options.quick else RECALL
    result = Report("quality", {"dtype": DTYPE, "quick": options.quick})
    try:
        subjects = _subjects(options, amount, result)
    except PromptError as error:
        parser.error(str(error))
    found: list[Row] = []
    for subject in subjects:
        with signals_raise():
            measured = measure(subject)
        found += measured.rows
        result.checks += measured.checks
        result.tables += telling.tables(subject.name, measured.rows)
        result.notes.append(telling.paragraph(subject.name, measured.rows))
    result.figures["rows"] = [asdict(row) for row in found]
    return result.emit(as_json=options.json, save=options.save)


def _subjects(options: Any, amount: recall_cases.Amount, result: Report) -> list[Subject]:
    """Quick runs leave the language model out unless it is asked for."""
    wanted = options.model if not (options.quick and options.model == "both") else "tiny"
    found = []
    if wanted in ("tiny", "both"):
        path = options.tiny
        groups = recall_cases.groups(amount)
        subject = Subject(TINY, path, tuple(groups), _tokenizer(path), 262_144, amount.exams)
        found.append(subject)
    if wanted in ("smollm2", "both"):
        path_or_none = _smollm2(result)
        if path_or_none is not None:
            found.append(_quotes(path_or_none, options.prompts))
    return found


def _quotes(path: Path, prompts: Path | None) -> Subject:
    tokenizer = _tokenizer(path)
    if prompts is None:
        groups = quote_cases.groups(tokenizer, QUOTE_SEEDS, QUOTE_CONTEXTS)
    else:
        lines = read(prompts, Encoder(lambda: tokenizer, PAGE_TOKENS))
        groups = quote_cases.own(lines, tokenizer)
    return Subject(SMOLLM2, path, tuple(groups), tokenizer, 32_768, threads=_cores())


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _smollm2(result: Report) -> Path | None:
    """The converted model; None, and a note, where it can not be had."""
    try:
        return models.smollm2()
    except models.ModelError as error:
        result.notes.append(f"{SMOLLM2} was left out: {error}")
        return None
