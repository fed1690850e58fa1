"""Rows are provisional until their pass is committed: states, misuse, and random histories."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tessera_sglang.memory_pool.commit import (
    SCHEMA_VERSION,
    CommitRecord,
    Pass,
    Residency,
    RowSchema,
)

SCHEMA = RowSchema(
    layers=(0, 3),
    row_stride_bytes=(384,),
    dtype="float32",
    scales="none",
    rope_hash="c0ffee",
    page_tokens=4,
)


def passed(row: Residency, tokens: int) -> Residency:
    """A row after one more committed pass."""
    with Pass() as forward:
        forward.write(row, row.committed_tokens, row.committed_tokens + tokens)
    return row


def record(start: int, end: int, committed: int) -> CommitRecord:
    pages = np.arange((end - start) // SCHEMA.page_tokens, dtype=np.int32)
    return CommitRecord(SCHEMA, (start, end), pages, committed)


# --- passes --------------------------------------------------------------------------------------


def test_rows_become_valid_when_their_pass_commits() -> None:
    row, forward = Residency(lent_tokens=8), Pass()
    forward.write(row, 8, 21)
    assert (row.committed_tokens, row.provisional) == (8, True)
    forward.commit()
    assert (row.committed_tokens, row.provisional) == (21, False)


def failing(*writes: tuple[Residency, int, int]) -> None:
    with Pass() as forward:
        for row, start, end in writes:
            forward.write(row, start, end)
        raise RuntimeError("the last layer")


def test_a_pass_that_raises_makes_nothing_valid_and_can_be_run_again() -> None:
    rows = [Residency(), Residency(lent_tokens=8)]
    with pytest.raises(RuntimeError, match="the last layer"):
        failing((rows[0], 0, 10), (rows[1], 8, 9))
    assert [row.committed_tokens for row in rows] == [0, 8]
    assert not any(row.provisional for row in rows)
    assert passed(rows[0], 10).committed_tokens == 10


def test_a_verified_pass_commits_the_accepted_prefix_of_each_request() -> None:
    rows = [passed(Residency(), 10) for _ in range(3)]
    with Pass() as verify:
        for row in rows:
            verify.write(row, 10, 14)
        verify.commit([4, 1, 0])
    assert [row.committed_tokens for row in rows] == [14, 11, 10]
    with Pass() as verify:  # the rejected drafts are written over
        verify.write(rows[1], 11, 15)
        verify.commit([2])
    assert rows[1].committed_tokens == 13


def test_a_row_that_is_given_up_under_an_open_pass_stays_gone() -> None:
    gone, other, forward = Residency(), Residency(), Pass()
    forward.write(gone, 0, 8)
    forward.write(other, 0, 8)
    gone.end()
    forward.commit([8, 3])
    assert (gone.committed_tokens, other.committed_tokens) == (0, 3)


def commit_twice() -> None:
    with Pass() as forward:
        forward.commit()
        forward.commit()


def commit_after_rolling_back() -> None:
    forward = Pass()
    forward.roll_back()
    forward.commit()


def roll_back_after_committing() -> None:
    forward = Pass()
    forward.commit()
    forward.roll_back()


def write_after_committing() -> None:
    forward = Pass()
    forward.commit()
    forward.write(Residency(), 0, 1)


def accept(*counts: int) -> None:
    forward, row = Pass(), Residency()
    forward.write(row, 0, 4)
    try:
        forward.commit(counts)
    finally:
        assert (row.committed_tokens, forward.open) == (0, True), "it moved before it was checked"


def write(start: int, end: int) -> None:
    Pass().write(passed(Residency(), 8), start, end)


def write_what_another_pass_writes() -> None:
    row = Residency()
    Pass().write(row, 0, 4)
    Pass().write(row, 0, 4)


def write_what_was_given_up() -> None:
    row = Residency()
    row.end()
    Pass().write(row, 0, 4)


def give_up_twice() -> None:
    row = Residency()
    row.end()
    row.end()


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (commit_twice, "was committed already"),
        (commit_after_rolling_back, "was rolled back already"),
        (roll_back_after_committing, "was committed already"),
        (write_after_committing, "was committed already"),
        (lambda: accept(5), "5 tokens accepted of 4"),
        (lambda: accept(-1), "-1 tokens accepted"),
        (lambda: write(9, 12), "starts at 9 of 8 valid rows"),
        (lambda: write(7, 12), "starts at 7 of 8 valid rows"),
        (lambda: write(8, 8), "writes nothing"),
        (write_what_another_pass_writes, "two passes"),
        (write_what_was_given_up, "given up"),
        (give_up_twice, "twice"),
    ],
)
def test_misuse_asserts(misuse: Callable[[], None], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        misuse()


@pytest.mark.parametrize("counts", [(), (1, 1)])
def test_one_count_for_each_request(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="argument 2 is"):
        accept(*counts)


# --- publications --------------------------------------------------------------------------------


def test_a_record_says_what_the_rows_are() -> None:
    row = passed(Residency(), 10)
    row.publish(record(0, 8, committed=10))
    said = row.record
    assert said is not None
    assert (said.tokens, said.pages.tolist(), said.committed_tokens) == ((0, 8), [0, 1], 10)
    assert dataclasses.asdict(said.schema) == {
        "layers": (0, 3),
        "row_stride_bytes": (384,),
        "dtype": "float32",
        "scales": "none",
        "rope_hash": "c0ffee",
        "page_tokens": 4,
        "version": SCHEMA_VERSION,
    }


@pytest.mark.parametrize(
    ("tokens", "pages", "committed"),
    [((0, 8), 2, 7), ((0, 8), 1, 8), ((0, 6), 1, 8), ((2, 6), 1, 8), ((4, 4), 0, 8)],
)
def test_a_record_holds_whole_committed_pages(
    tokens: tuple[int, int], pages: int, committed: int
) -> None:
    with pytest.raises(AssertionError):
        CommitRecord(SCHEMA, tokens, np.arange(pages, dtype=np.int32), committed)


def test_a_row_is_published_once_and_in_order() -> None:
    row = passed(Residency(), 16)
    row.publish(record(0, 8, committed=16))
    with pytest.raises(AssertionError, match="published twice"):
        row.publish(record(4, 12, committed=16))
    with pytest.raises(AssertionError, match="another moment"):
        row.publish(record(8, 12, committed=12))
    row.publish(record(8, 16, committed=16))
    row.end()
    with pytest.raises(AssertionError, match="given up"):
        row.publish(record(0, 4, committed=4))


# --- random histories ----------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """A row as plain numbers."""

    valid: int
    writing: int | None = None  # tokens of the open pass
    published: int = 0


class Histories(RuleBasedStateMachine):
    """Two passes at a time over a few rows, against plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Residency, Model]] = []
        self.passes: list[tuple[Pass, list[tuple[Residency, Model]]]] = []

    @rule(lent=st.integers(0, 3))
    def begin(self, lent: int) -> None:
        lent *= SCHEMA.page_tokens
        self.rows.append((Residency(lent), Model(lent, published=lent)))

    @precondition(lambda self: len(self.passes) < 2)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        idle = [pair for pair in self.rows if pair[1].writing is None]
        chosen = [pair for pair in idle if data.draw(st.booleans())]
        opened = Pass()
        for row, model in chosen:
            model.writing = data.draw(st.integers(1, 9))
            opened.write(row, model.valid, model.valid + model.writing)
        self.passes.append((opened, chosen))

    @precondition(lambda self: self.passes)
    @rule(data=st.data(), verified=st.booleans())
    def commit(self, data: st.DataObject, verified: bool) -> None:
        opened, chosen = self.passes.pop(data.draw(st.integers(0, len(self.passes) - 1)))
        counts = [data.draw(st.integers(0, model.writing or 0)) for _, model in chosen]
        opened.commit(counts if verified else None)
        for (_, model), count in zip(chosen, counts, strict=True):
            if model.writing is not None:
                model.valid += count if verified else model.writing
                model.writing = None

    @precondition(lambda self: self.passes)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        opened, chosen = self.passes.pop(data.draw(st.integers(0, len(self.passes) - 1)))
        opened.roll_back()
        for _, model in chosen:
            model.writing = None

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row, model = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        model.writing = None
        model.valid = 0
        row.end()
        assert row.committed_tokens == 0

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        row, model = data.draw(st.sampled_from(self.rows))
        end = model.valid // SCHEMA.page_tokens * SCHEMA.page_tokens
        if model.published < end:
            row.publish(record(model.published, end, committed=model.valid))
            model.published = end

    @invariant()
    def agrees(self) -> None:
        for row, model in self.rows:
            assert row.committed_tokens == model.valid
            assert row.provisional == (model.writing is not None)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
