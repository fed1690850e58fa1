"""Full attention and spans on the same prompts, and how far apart they are.

Full attention is the same token ids without spans. Its greedy continuation is the *reference*. Spans
are measured in two ways: teacher-forced, with the reference behind the prompt, so that every position
compares two distributions over the same past; and greedy, so that differences may add up. Full attention
is measured in the same way against itself. Sums in low precision depend on what else is in the
batch, so even that is not nought: it is the floor.

Every prompt under every setting has a `cache_salt` of its own. So nothing of a running server's cache
is used or flushed, and what was computed does not depend on which request came first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from .client import Client, Declared, Scored, ServerError
from .figures import (
    Logprobs,
    PromptFigures,
    agreed_tokens,
    entropy_nats,
    kl_nats,
    mean_nll_nats,
    same_choices,
)
from .prompts import Prompt, Spans
from .settings import Setting

TOP = 20  # most probable tokens of full attention that are compared one by one
TEXT_TOKENS = 64  # at the end of a prompt: does the model know what it reads?
WORKERS = 4  # requests at a time

_T = TypeVar("_T")
Progress = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Reference:
    """What full attention says to one prompt."""

    tokens: tuple[int, ...]  # its greedy continuation
    scored: Scored  # of the continuation
    text_logprobs: tuple[float, ...]  # of the prompt's last tokens, nats

    @property
    def entropies(self) -> tuple[float, ...]:
        """Of each position, nats, lower bounds."""
        return tuple(map(entropy_nats, self.scored.top))


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was asked. ``figures`` have one entry a prompt for each setting."""

    references: tuple[Reference, ...]
    figures: dict[Setting, tuple[PromptFigures, ...]]

    @property
    def mean_entropy_nats(self) -> float:
        """Of full attention's next token, over all positions of all references."""
        found = [nats for reference in self.references for nats in reference.entropies]
        return sum(found) / len(found)

    @property
    def text_nll_nats(self) -> float:
        """Of the ends of the prompts, mean over their tokens."""
        found = [nats for reference in self.references for nats in reference.text_logprobs]
        return mean_nll_nats(found) if found else 0.0


@dataclass(frozen=True, slots=True)
class Meter:
    """Asks one server. ``run`` names this run, so that its cache entries are its own."""

    client: Client
    run: str
    new_tokens: int

    def everything(
        self, prompts: Sequence[Prompt], settings: Sequence[Setting], progress: Progress
    ) -> Measured:
        """The references, then all prompts under all settings, a few requests at a time.

        Raises:
            ServerError: naming the prompt.
        """
        pool = ThreadPoolExecutor(WORKERS)
        try:
            references = _all([pool.submit(self._reference, p, progress) for p in prompts])
            found = {
                setting: [
                    pool.submit(self._figures, setting, prompt, reference, progress)
                    for prompt, reference in zip(prompts, references, strict=True)
                ]
                for setting in settings
            }
            _all([future for futures in found.values() for future in futures])
            return Measured(references, {s: _all(futures) for s, futures in found.items()})
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C, what has not begun

    def _reference(self, prompt: Prompt, progress: Progress) -> Reference:
        salt = f"{self.run}/reference/{prompt.where}"
        start = max(len(prompt.tokens) - TEXT_TOKENS, 1)
        text = len(prompt.tokens) - start
        try:
            reply = self.client.greedy(prompt.tokens, None, salt=salt, new_tokens=self.new_tokens)
            scored = self.client.score(
                (*prompt.tokens, *reply.tokens),
                None,
                salt=salt,
                start=start,
                top=TOP,
            )
        except ServerError as error:
            raise ServerError(f"{prompt.where}, full attention: {error}") from error
        progress()
        return Reference(
            reply.tokens,
            Scored(scored.chosen[text:], scored.top[text:], ()),
            scored.chosen[:text],
        )

    def _figures(
        self, setting: Setting, prompt: Prompt, reference: Reference, progress: Progress
    ) -> PromptFigures:
        salt = f"{self.run}/{setting.name}/{prompt.where}"
        other, moved = _behind_another_preamble(prompt)
        try:
            cold = self.client.greedy(other, _declared(moved, setting), salt=salt, new_tokens=1)
            warm = self.client.greedy(
                prompt.tokens,
                _declared(prompt.spans, setting),
                salt=salt,
                new_tokens=self.new_tokens,
            )
            scored = self.client.score(
                (*prompt.tokens, *reference.tokens),
                _declared(_with_a_tail(prompt), setting),
                salt=salt,
                start=len(prompt.tokens),
                of=_to_compare(reference),
            )
        except ServerError as error:
            raise ServerError(f"{prompt.where}, {setting.name}: {error}") from error
        progress()
        return PromptFigures(
            where=prompt.where,
            kl_nats=_divergences(reference.scored.top, scored.of),
            nll_nats=mean_nll_nats(scored.chosen),
            full_nll_nats=mean_nll_nats(reference.scored.chosen),
            same_choices=same_choices(reference.tokens, scored.of),
            agreed_tokens=agreed_tokens(reference.tokens, warm.tokens),
            reference_tokens=len(reference.tokens),
            prompt_tokens=len(prompt.tokens),
            # the other prompt is a token longer
            cold_computed_tokens=cold.computed_tokens - (len(other) - len(prompt.tokens)),
            warm_computed_tokens=warm.computed_tokens,
        )


def _to_compare(reference: Reference) -> list[int]:
    """The tokens that full attention finds probable anywhere in its answer, and the answer's own."""
    probable = {token for known in reference.scored.top for token in known}
    return sorted(probable.union(reference.tokens))


def _declared(spans: Spans, setting: Setting) -> Declared | None:
    return Declared(spans, setting.overrides) if setting.declares_spans else None


def _divergences(full: Sequence[Logprobs], spans: Sequence[Logprobs]) -> tuple[float, ...]:
    return tuple(kl_nats(known, other) for known, other in zip(full, spans, strict=True))


def _behind_another_preamble(prompt: Prompt) -> tuple[tuple[int, ...], Spans]:
    """The prompt one token further on: it shares spans with the prompt, and no prefix."""
    first = next((token for token in prompt.tokens if token != prompt.tokens[0]), 0)
    return (
        (first, *prompt.tokens),
        tuple((start + 1, end + 1) for start, end in prompt.spans),
    )


def _with_a_tail(prompt: Prompt) -> Spans:
    """The spans as they share pages in the prompt itself, for a longer one.

    A span that ends a prompt shares one token less than its length allows, since the last token of a
    prompt sees all of it. The reference behind it would change that.
    """
    length = len(prompt.tokens)
    shortened = ((start, min(end, length - 1)) for start, end in prompt.spans)
    return tuple((start, end) for start, end in shortened if end > start)


def _all(asked: Sequence[Future[_T]]) -> tuple[_T, ...]:
    """Results in order, or the first failure as soon as it is there."""
    done, _ = wait(asked, return_when=FIRST_EXCEPTION)
    for one in done:
        one.result()
    return tuple(one.result() for one in asked)
