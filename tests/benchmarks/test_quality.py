"""The quality benchmark without a server: what is asked, how it is counted, and what can fail."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.quality import quote_cases, recall_cases, telling
from benchmarks.quality.cases import Context, Donor, Group, Question
from benchmarks.quality.measure import exam_checks, quality_checks
from benchmarks.quality.outcomes import Cost, Outcome, Reference, outcome
from benchmarks.quality.recall_cases import EXAMS, ONE, TWO, Amount
from benchmarks.quality.rows import Row, rows
from benchmarks.quality.served import Found
from benchmarks.quality.ways import AGAIN, BARE, DEFAULT, FULL, PATCHED, REUSED
from benchmarks.report import ROOT
from tessera_sglang.verify.client import Scored
from tessera_sglang.verify.prompts import Prompt

AMOUNT = Amount(2, (200, 400), EXAMS, questions=3, exam_worlds=5, exam_questions=4)
CONTEXT = Context(1, (1, 2, 3, 4), ((1, 3),), 200, (), Donor((9, 2, 3), ((1, 3),)))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of the example model: its tokens are bytes."""
    return AutoTokenizer.from_pretrained(ROOT / "examples/tiny-mla")


def _check_documents(group: Group) -> None:
    """All contexts have the same documents, the donor too, and nothing before them is the same."""
    known = {
        frozenset(context.document(n) for n in range(len(context.documents)))
        for context in group.contexts
    }
    assert len(known) == 1
    assert group.temperatures() == [False] + [True] * (len(group.contexts) - 1)
    for context in group.contexts:
        for number, (start, end) in enumerate(context.donor.documents):
            assert context.donor.tokens[start:end] == context.document(number)
            before = context.tokens[: context.documents[number][0]]
            assert context.donor.tokens[:start] != before


def test_worlds_are_read_behind_two_preambles_and_nothing_is_asked_twice() -> None:
    made = recall_cases.groups(AMOUNT)
    groups, exam = made[: 2 * 2 * 2], made[2 * 2 * 2 :]
    assert len(exam) == 2 * 5
    for (paper,) in (group.contexts for group in exam):
        assert len(paper.questions) == 4
        assert all(question.full_only for question in paper.questions)
    assert [group.counted for group in groups] == [True] * 4 + [False] * 4
    for group in groups:
        _check_documents(group)
        asked = [question for context in group.contexts for question in context.questions]
        assert len({question.tokens for question in asked}) == len(asked) == 12
        for context in group.contexts:
            shared = [q.kind for q in context.questions if not q.full_only]
            assert sorted(shared) == [ONE] * 3 + [TWO] * 3
        for question in asked:
            assert len(question.answer) == (5 if question.kind == ONE else 8)


def test_quotes_go_on_where_the_question_ends(tokenizer: Any) -> None:
    """Passages are dealt out: no two groups have one in common."""
    groups = quote_cases.groups(tokenizer, seeds=3, contexts=2)
    titles = set()
    for group in groups:
        _check_documents(group)
        for context in group.contexts:
            documents = [context.document(n) for n in range(len(context.documents))]
            titles |= set(documents)
            for question in context.questions:
                given = question.tokens[-quote_cases.GIVEN_TOKENS :] + question.answer
                assert len(question.answer) == quote_cases.ANSWER_TOKENS
                (found,) = [document for document in documents if _inside(given, document)]
                if question.kind == quote_cases.OPENING:
                    heading = tokenizer.decode(found).split("\n\n")[0]
                    assert tokenizer.decode(question.tokens).endswith(f"{heading}\n\n")
    assert len(titles) == 9


def _inside(some: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    return any(tokens[at : at + len(some)] == some for at in range(len(tokens) - len(some) + 1))


def test_a_prompt_of_the_users_that_ends_with_a_span_keeps_a_question(tokenizer: Any) -> None:
    prompt = Prompt("own:1", tuple(range(200)), ((5, 90), (100, 200)))
    (group,) = quote_cases.own([prompt], tokenizer)
    (context,) = group.contexts
    (question,) = context.questions
    assert context.tokens + question.tokens == prompt.tokens
    assert question.tokens
    assert context.documents == ((5, 90), (100, 199))
    _check_documents(group)


def _scored(of: list[dict[int, float]], tokens: tuple[int, ...]) -> Scored:
    known = [{token: math.log(p) for token, p in some.items()} for some in of]
    best = [max(some.items(), key=lambda entry: entry[1]) for some in known]
    return Scored(
        chosen=tuple(some[token] for some, token in zip(known, tokens, strict=True)),
        top=tuple({token: logprob} for token, logprob in best),
        of=tuple(known),
    )


def test_an_answer_is_exact_only_if_all_its_tokens_are_first_choices() -> None:
    full = _scored([{5: 0.75, 6: 0.25}, {5: 0.25, 6: 0.75}], (5, 6))
    reference = Reference((5, 6), replace(full, top=full.of))
    question = Question(ONE, (8,), (5, 6))
    same = outcome("same", CONTEXT, question, reference, full, full)
    assert (same.exact, same.right, same.agreement, same.kl_nats) == (True, 1.0, 1.0, 0.0)
    assert same.nll_nats == pytest.approx(-math.log(0.75))
    other = _scored([{5: 0.75, 6: 0.25}, {5: 0.75, 6: 0.25}], (5, 6))
    found = outcome("other", CONTEXT, question, reference, other, other)
    assert (found.exact, found.right, found.agreed_tokens) == (False, 0.5, 1)
    assert found.worst_kl_nats == pytest.approx(0.5 * math.log(3))
    assert found.kl_nats == pytest.approx(found.worst_kl_nats / 2)


def _outcome(way: str, seed: int, documents: int, kind: str, *, exact: bool, kl: float) -> Outcome:
    return Outcome(way, seed, documents, 200, kind, exact, 0.5, 0.1, kl, kl, 2, 0.4)


def test_rows_have_means_of_all_and_of_every_part_and_spreads_of_seeds() -> None:
    outcomes = [
        _outcome(way, seed, documents, kind, exact=seed == 0 or kind == ONE, kl=seed / 10)
        for way in (FULL, DEFAULT)
        for seed in (0, 1)
        for documents in (4, 8)
        for kind in (ONE, TWO)
    ]
    costs = [
        Cost(way, documents, 200, 100, computed, warm)
        for way in (FULL, DEFAULT)
        for documents, computed, warm in ((4, 110, False), (4, 30, True), (8, 60, True))
    ]
    made = rows("m", outcomes, costs, whole_answers=True)
    assert [row.by for row in made if row.setting == DEFAULT] == [
        *("all", "documents", "documents", "kind", "kind"),
        *["cell"] * 4,
    ]
    everything = next(row for row in made if (row.setting, row.by) == (DEFAULT, "all"))
    assert (everything.root, everything.link_pages, everything.documents) == ("auto", 1, None)
    assert (everything.questions, everything.seeds, everything.document_bytes) == (8, 2, 200)
    assert (everything.recall, everything.kl) == (0.75, pytest.approx(0.05))
    assert everything.recall_spread == pytest.approx(math.sqrt(0.125))
    assert (everything.computed_cold, everything.computed_warm) == (110, 45)
    full = next(row for row in made if (row.setting, row.by) == (FULL, "all"))
    assert full.computed_cold == full.computed_warm == pytest.approx(200 / 3)
    eight = next(r for r in made if (r.setting, r.by, r.documents) == (DEFAULT, "documents", 8))
    assert (eight.computed_cold, eight.computed_warm, eight.questions) == (None, 60, 4)


def _all_rows(kl: dict[str, float]) -> list[Row]:
    outcomes = [
        _outcome(way, seed, 4, ONE, exact=True, kl=kl.get(way, 0.01))
        for way in (FULL, AGAIN, BARE, "none/1", "auto/0", DEFAULT, "auto/2", REUSED, PATCHED)
        for seed in (0, 1)
    ]
    return rows("m", outcomes, [], whole_answers=True)


def test_checks_can_fail() -> None:
    better, worse = _all_rows({BARE: 0.5}), _all_rows({DEFAULT: 0.5})
    assert [check.holds for check in quality_checks("m", better)] == [True]
    assert [check.holds for check in quality_checks("m", worse)] == [False]
    found = Found()
    for wrong, holds in ((2, False), (1, True)):
        found.full_only = [_outcome(FULL, 0, 4, ONE, exact=n >= wrong, kl=0) for n in range(20)]
        found.full_only += [_outcome(FULL, 0, 8, ONE, exact=True, kl=0)] * 80
        (check,) = exam_checks("m", EXAMS[:1], found)
        assert (check.value, check.holds) == (1 - wrong / 20, holds)


def test_the_paragraph_and_the_tables_say_what_the_rows_say() -> None:
    made = _all_rows({BARE: 0.5, DEFAULT: 0.125})
    said = telling.paragraph("m", made)
    assert "(none/0) have recall 1.000 at a KL of 0.5" in said
    assert "(auto/1, the default) recall 1.000 at a KL of 0.12" in said
    (table,) = telling.tables("m", made)
    assert f"{REUSED} (simulated)" in table.render()
