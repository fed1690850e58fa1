"""Publication as a transaction: rows are provisional until the pass that wrote them is committed.

    row = Residency(lent_tokens=64)         # a request got its row; a match lent it the first 64 tokens
    with Pass() as forward:                 # commits at the end of the block, rolls back on an exception
        forward.write(row, 64, 200)
        ...                                 # whatever writes the rows
    row.committed_tokens                    # 200; 64 if the block raised

A pass that verifies drafts commits what was accepted: ``forward.commit([3, 1])``, a count for each
request in the order of :meth:`Pass.write`. Only committed rows may be published, and a publication
says in a :class:`CommitRecord` what the rows are, so that nobody reads them by another schema.

A row's valid length is one integer and moves in one assignment, after all checks: a reader sees the
length before a pass or the one after it. It only grows while the request keeps its row. A row that
is given up takes its length with it, also under a pass that is still open.

Misuse is a bug of ours and asserts. Rejected: a flag per page (a page is filled by several passes, and
decode would touch it 64 times), and lengths derived from what the scheduler has planned (it plans a
step ahead of what ran).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from .runs import PageIds

SCHEMA_VERSION = 1  # of what a row's bytes mean; goes up when the same fields would mean others


@dataclass(frozen=True, slots=True)
class RowSchema:
    """How to read the rows of one server; the same for all of them as long as it runs."""

    layers: tuple[int, int]  # half-open
    row_stride_bytes: tuple[int, ...]  # a token in one layer: latent rows, or keys and values
    dtype: str
    scales: str  # of quantised rows; "none" where bytes are values
    rope_hash: str  # of everything that decides how keys are rotated
    page_tokens: int
    version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What a publication adds. The schema says layer range, version, stride, dtype, scales and rope."""

    schema: RowSchema
    tokens: tuple[int, int]  # half-open row positions, whole pages
    pages: PageIds  # physical, in row order; int32 [pages]
    committed_tokens: int  # of the row at that moment

    def __post_init__(self) -> None:
        (start, end), size = self.tokens, self.schema.page_tokens
        assert start % size == 0 and end - start == len(self.pages) * size, "not these pages"
        assert 0 <= start < end <= self.committed_tokens, "provisional rows in a publication"


class Residency:
    """One request's row from its allocation until it is given up."""

    __slots__ = ("_committed", "_ended", "_pass", "_record")

    def __init__(self, lent_tokens: int = 0) -> None:
        """``lent_tokens`` at its start are valid already: shared pages, and rows copied by a fork."""
        assert lent_tokens >= 0
        self._committed = lent_tokens
        self._pass: Pass | None = None
        self._record: CommitRecord | None = None
        self._ended = False

    @property
    def committed_tokens(self) -> int:
        """Row positions before this one are valid."""
        return self._committed

    @property
    def provisional(self) -> bool:
        """Whether a pass writes the row right now."""
        return self._pass is not None

    @property
    def record(self) -> CommitRecord | None:
        """The last publication of this row."""
        return self._record

    def publish(self, record: CommitRecord) -> None:
        """Note a publication. It may only reach as far as the row is committed."""
        assert not self._ended, "a row that was given up is published"
        assert record.committed_tokens == self._committed, "a record of another moment"
        assert self._record is None or record.tokens[0] >= self._record.tokens[1], "published twice"
        self._record = record

    def end(self) -> None:
        """The row is given up; an open pass commits nothing of it any more."""
        assert not self._ended, "a row was given up twice"
        self._ended = True
        self._committed = 0
        self._pass = None


class _State(Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


class Pass:
    """Rows that one forward pass writes. Ends once: committed or rolled back."""

    __slots__ = ("_state", "_writes")

    def __init__(self) -> None:
        self._state = _State.OPEN
        self._writes: list[tuple[Residency, int, int]] = []

    def write(self, row: Residency, start: int, end: int) -> None:
        """Row positions ``start .. end`` (half-open) will be written by this pass.

        They begin where the row is committed: nothing valid is overwritten, no gap becomes valid.
        """
        self._must_be_open()
        assert not row._ended, "a row that was given up is written"
        assert row._pass is None, "two passes write one row"
        assert start == row._committed, f"a pass starts at {start} of {row._committed} valid rows"
        assert start < end, "a pass writes nothing"
        row._pass = self
        self._writes.append((row, start, end))

    def commit(self, accepted: Sequence[int] | None = None) -> None:
        """What was written is valid now: all of it, or of each row the first ``accepted`` tokens."""
        self._must_be_open()
        if accepted is None:
            lengths = [end for _, _, end in self._writes]
        else:
            lengths = [
                start + count for (_, start, _), count in zip(self._writes, accepted, strict=True)
            ]
            for (_, start, end), length in zip(self._writes, lengths, strict=True):
                assert start <= length <= end, (
                    f"{length - start} tokens accepted of {end - start} that were written"
                )
        self._state = _State.COMMITTED
        for (row, _, _), length in zip(self._writes, lengths, strict=True):
            if row._pass is self:  # else it was given up meanwhile
                row._pass = None
                row._committed = length

    def roll_back(self) -> None:
        """Nothing of what was written is valid."""
        self._must_be_open()
        self._state = _State.ROLLED_BACK
        for row, _, _ in self._writes:
            if row._pass is self:
                row._pass = None

    @property
    def open(self) -> bool:
        """Whether it has neither been committed nor rolled back."""
        return self._state is _State.OPEN

    def _must_be_open(self) -> None:
        assert self.open, f"the pass was {self._state.value} already"

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.open:
            return
        if kind is None:
            self.commit()
        else:
            self.roll_back()
