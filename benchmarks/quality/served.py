"""The product: a server with ``--attention-backend tessera`` answers, under every way.

Ways of one root share a ``cache_salt``, so that a document is computed once for all of them: what a
span's pages hold depends on neither its readers nor on how many pages they link, so that changes times
only. Groups that are counted have a salt for each way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tessera_sglang.config import BACKEND, VARIABLE
from tessera_sglang.launch import Server
from tessera_sglang.verify.client import Client, Declared, Scored

from .cases import Context, Group, Question
from .outcomes import Cost, Outcome, Reference, outcome
from .ways import AGAIN, FULL, Way

DTYPE = "float32"  # of both sides: bfloat16's own noise would hide small differences
TOP = 20  # most probable tokens of full attention that are compared one by one
WORKERS = 6  # groups at a time
Key = tuple[tuple[int, ...], tuple[int, ...]]  # of a question: its context and its tokens


@contextmanager
def serving(model: Path, pool_tokens: int, threads: int) -> Iterator[Client]:
    """A server for as long as the block lasts. Requests say all settings that matter."""
    os.environ.pop(VARIABLE, None)
    arguments = (
        *("--attention-backend", BACKEND, "--dtype", DTYPE),
        *("--max-total-tokens", str(pool_tokens), "--mem-fraction-static", "0.3"),
    )
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    with Server(model, arguments, environment) as server:
        yield Client(server.url)


@dataclass(slots=True)
class Found:
    """Everything that was measured; ``scored`` keeps what the simulation is held against."""

    references: dict[Key, Reference] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    full_only: list[Outcome] = field(default_factory=list)  # of questions asked of nobody else
    costs: list[Cost] = field(default_factory=list)
    scored: dict[tuple[str, Key], Scored] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one server; ``answer_tokens`` is the length of answers that nobody knows."""

    client: Client
    answer_tokens: int
    progress: Callable[[], object]

    def everything(self, groups: Sequence[Group], ways: Sequence[Way]) -> Found:
        """Full attention first, for the references; then all other ways, a few groups at a time."""
        found = Found()
        self._side_by_side(found, groups, [Way(FULL)])
        self._side_by_side(found, groups, [Way(AGAIN), *ways])
        return found

    def _side_by_side(self, found: Found, groups: Sequence[Group], ways: Sequence[Way]) -> None:
        pool = ThreadPoolExecutor(WORKERS)
        try:
            asked: list[Future[None]] = [
                pool.submit(self._group, found, group, way) for way in ways for group in groups
            ]
            done, _ = wait(asked, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _group(self, found: Found, group: Group, way: Way) -> None:
        salt = way.name if group.counted or way.root is None else way.root
        for context, warm in zip(group.contexts, group.temperatures(), strict=True):
            asked = [q for q in context.questions if way.name == FULL or not q.full_only]
            if asked and group.counted:
                found.costs.append(self._cost(context, asked[0], way, salt, warm))
            for question in asked:
                key = (context.tokens, question.tokens)
                if way.name == FULL:
                    found.references[key] = self._reference(context, question, salt)
                reference = found.references[key]
                on_reference, on_answer = self._scored(context, question, reference, way, salt)
                found.scored[way.name, key] = on_reference
                kept = found.full_only if question.full_only else found.outcomes
                kept.append(
                    outcome(way.name, context, question, reference, on_reference, on_answer)
                )
                self.progress()

    def decoded(self, context: Context, question: Question, way: Way, new_tokens: int) -> list[int]:
        """A greedy answer, token by token."""
        prompt = (*context.tokens, *question.tokens)
        salt = way.root or way.name
        reply = self.client.greedy(
            prompt, _declared(context, way), salt=salt, new_tokens=new_tokens
        )
        return list(reply.tokens)

    def _cost(
        self, context: Context, question: Question, way: Way, salt: str, warm: bool | None
    ) -> Cost:
        """Of a reader that comes to this context first."""
        prompt = (*context.tokens, *question.tokens)
        reply = self.client.greedy(prompt, _declared(context, way), salt=salt, new_tokens=1)
        return Cost(
            way=way.name,
            documents=len(context.documents),
            document_bytes=context.document_bytes,
            prompt_tokens=reply.prompt_tokens,
            computed_tokens=reply.computed_tokens,
            warm=warm,
        )

    def _reference(self, context: Context, question: Question, salt: str) -> Reference:
        prompt = (*context.tokens, *question.tokens)
        new_tokens = question.answer_tokens or self.answer_tokens
        reply = self.client.greedy(prompt, None, salt=salt, new_tokens=new_tokens)
        scored = self.client.score(
            (*prompt, *reply.tokens), None, salt=salt, start=len(prompt), top=TOP
        )
        return Reference(reply.tokens, scored)

    def _scored(
        self, context: Context, question: Question, reference: Reference, way: Way, salt: str
    ) -> tuple[Scored, Scored]:
        """On full attention's answer and on the right one, which are the same as a rule."""
        prompt = (*context.tokens, *question.tokens)

        def score(answer: tuple[int, ...]) -> Scored:
            return self.client.score(
                (*prompt, *answer),
                _declared(context, way),
                salt=salt,
                start=len(prompt),
                top=1,
                of=reference.probable,
            )

        known = reference.scored
        if way.name == FULL:  # the reference is what was asked for
            on_reference = Scored(known.chosen, known.top, of=known.top)
        else:
            on_reference = score(reference.tokens)
        if question.answer in ((), reference.tokens):
            return on_reference, on_reference
        return on_reference, score(question.answer)


def _declared(context: Context, way: Way) -> Declared | None:
    return None if way.root is None else Declared(context.documents, way.overrides)
