"""The oracle: what a request with spans must answer, from the Hugging Face model alone.

    model = load_model(path)
    tokens, first_logprobs, chosen = greedy(
        model, OracleRequest(prompt, spans), page_size=64, link_pages=1, root=root, steps=16
    )

The design's visibility is written as one boolean matrix over one longer sequence. In front of the
prompt's remaining tokens stands, for every span that shares pages, a whole copy of `[root | body]`
that sees only itself. Of that copy, readers see only the *shared run*, the body's pages after the
linked ones; the root and the linked pages are there to have been seen by it. A copy's tokens carry
the positions that put its shared run where the prompt has it, so the root's may be negative: rotary
attention knows differences of positions only.

No pages, rows, permutations, merges or query rotations here: nothing that the product has to get
right is used to say what is right. `test_oracle.py` checks the matrix against a second construction
that has no matrix.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class OracleRequest:
    prompt: list[int]
    spans: list[tuple[int, int]]
    """Half-open offsets into `prompt`, ascending and disjoint."""


@dataclass(frozen=True)
class SharedRun:
    """A span that shares pages, in prompt offsets: its body is [start, end), readers see
    [visible, end) as computed in isolation and [start, visible) as computed in place."""

    start: int
    visible: int
    end: int


@dataclass(frozen=True)
class Extended:
    """The sequence that the Hugging Face model runs: isolated copies, then remaining tokens."""

    tokens: list[int]  # [N]
    positions: list[int]  # [N], may be negative
    sees: torch.Tensor  # [N, N] bool: row attends to column
    generated_sees: torch.Tensor  # [N] bool: what every generated token attends to


class Greedy(NamedTuple):
    tokens: list[int]  # [steps]
    first_logprobs: torch.Tensor  # [vocab] float32, log-softmax of the first generated position
    chosen_logprobs: list[float]  # [steps]


def load_model(path: Path | str) -> PreTrainedModel:
    """The checkpoint in float32, with the attention that adds a mask to plain scores."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def shared_runs(request: OracleRequest, *, page_size: int, link_pages: int) -> list[SharedRun]:
    """The spans that share anything; the others are ordinary text."""
    runs = []
    for start, end in request.spans:
        own_tail = 1 if end == len(request.prompt) else 0
        body_pages = (end - start - own_tail) // page_size
        if body_pages > link_pages:
            visible = start + link_pages * page_size
            runs.append(SharedRun(start, visible, start + body_pages * page_size))
    return runs


def extend(
    request: OracleRequest, *, page_size: int, link_pages: int, root: Sequence[int]
) -> Extended:
    if len(root) % page_size:
        raise ValueError(f"a root is whole pages of {page_size} tokens, got {len(root)} tokens")
    runs = shared_runs(request, page_size=page_size, link_pages=link_pages)
    tokens: list[int] = []
    positions: list[int] = []
    copies: list[tuple[int, int]] = []  # where each run's [root | body] lies in `tokens`
    for run in runs:
        begin = len(tokens)
        tokens += [*root, *request.prompt[run.start : run.end]]
        positions += range(run.start - len(root), run.end)
        copies.append((begin, len(tokens)))
    hidden = len(tokens)
    shared = {offset for run in runs for offset in range(run.visible, run.end)}
    remaining = [offset for offset in range(len(request.prompt)) if offset not in shared]
    tokens += [request.prompt[offset] for offset in remaining]
    positions += remaining

    sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    generated_sees = torch.zeros(len(tokens), dtype=torch.bool)
    sees[hidden:, hidden:] = _causal(len(remaining))
    generated_sees[hidden:] = True
    at = torch.tensor(remaining)  # [remaining] prompt offsets
    for run, (begin, end) in zip(runs, copies, strict=True):
        sees[begin:end, begin:end] = _causal(end - begin)
        first = end - (run.end - run.visible)
        sees[hidden:, first:end] = (at >= run.end)[:, None]
        generated_sees[first:end] = True
    return Extended(tokens, positions, sees, generated_sees)


def _causal(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread. These models gain nothing from a second one, and lose a factor of 30
    to its spinning when something else, such as the server under test, keeps the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    request: OracleRequest,
    *,
    page_size: int,
    link_pages: int,
    root: Sequence[int],
    steps: int,
) -> Greedy:
    """Greedy decoding under the design's visibility: one prefill with a cache, then single steps.

    `root` may be empty. An end-of-sequence token does not stop it.
    """
    extended = extend(request, page_size=page_size, link_pages=link_pages, root=root)
    cache = DynamicCache(config=model.config)
    logits = _forward(model, extended.tokens, extended.positions, extended.sees, cache)
    generated: list[int] = []
    rows: list[torch.Tensor] = []
    for step in range(steps):
        rows.append(torch.log_softmax(logits, dim=-1))
        generated.append(int(rows[-1].argmax()))
        if step + 1 < steps:
            own = torch.ones(step + 1, dtype=torch.bool)
            sees = torch.cat([extended.generated_sees, own])[None]
            position = len(request.prompt) + step
            logits = _forward(model, generated[-1:], [position], sees, cache)
    chosen = [row[token].item() for row, token in zip(rows, generated, strict=True)]
    return Greedy(generated, rows[0], chosen)


def _forward(
    model: PreTrainedModel,
    tokens: list[int],
    positions: list[int],
    sees: torch.Tensor,  # [len(tokens), cached + len(tokens)] bool
    cache: DynamicCache,
) -> torch.Tensor:
    """Logits of the last token, [vocab] float32. Appends every token's keys to the cache."""
    mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[None, None]
    output = model(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[0, -1].float()


# --- requests ---------------------------------------------------------------------------------


FIRST_TOKEN = 10
"""Smaller ids are left to special tokens."""


def random_requests(
    seed: int, count: int, *, vocab: int, page_size: int, max_docs: int = 4
) -> list[OracleRequest]:
    """Requests over one corpus of seven documents, so that later ones meet what earlier ones left.

    Every position in the list has a fixed form (see `_FORMS`), so `len(_FORMS)` requests or more
    hit every corner: spans at either end, adjacent, repeated, alone, shorter than a page, whole
    pages, as long as one or two linked pages, and none at all. With pages of 64 tokens a document
    has 21 to 330 tokens and a prompt at most about 1,000. `max_docs` bounds the forms that draw
    their number of documents.
    """
    rng = random.Random(seed)
    draw = _Draw(rng, vocab, page_size, max_docs)
    return [_FORMS[i % len(_FORMS)](draw) for i in range(count)]


class _Draw:
    """The corpus of one seed, and the pieces that prompts are made of."""

    def __init__(self, rng: random.Random, vocab: int, page_size: int, max_docs: int) -> None:
        self.rng = rng
        self.vocab = vocab
        self.max_docs = max_docs
        self.page_size = page = page_size
        self.below_page = self.text(max(1, page // 3))
        self.one_page = self.text(page)
        self.two_pages = self.text(2 * page)
        self.three_pages = self.text(3 * page)
        self.long = self.text(5 * page + page // 6)
        self.corpus = [
            self.below_page,
            self.one_page,
            self.two_pages,
            self.text(2 * page + page // 2),
            self.text(3 * page + page // 4),
            self.three_pages,
            self.long,
        ]

    def text(self, tokens: int) -> list[int]:
        return [self.rng.randrange(FIRST_TOKEN, self.vocab) for _ in range(tokens)]

    def document(self) -> list[int]:
        return self.rng.choice(self.corpus)

    def preamble(self, least: int = 0) -> list[int]:
        return self.text(self.rng.randint(least, 150))

    def question(self, least: int = 0) -> list[int]:
        return self.text(self.rng.randint(least, 60))

    def documents(self) -> list[list[int]]:
        """One to `max_docs` documents, of ten pages at most."""
        documents: list[list[int]] = []
        room = 10 * self.page_size
        for _ in range(self.rng.randint(1, self.max_docs)):
            document = self.document()
            if len(document) <= room:
                documents.append(document)
                room -= len(document)
        return documents


class _Builder:
    """Appends text and spans to one prompt."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.spans: list[tuple[int, int]] = []

    def text(self, tokens: list[int]) -> _Builder:
        self.prompt += tokens
        return self

    def span(self, tokens: list[int]) -> _Builder:
        self.spans.append((len(self.prompt), len(self.prompt) + len(tokens)))
        return self.text(tokens)

    def done(self) -> OracleRequest:
        return OracleRequest(self.prompt, self.spans)


def _one_document(draw: _Draw) -> OracleRequest:
    return _Builder().text(draw.preamble(1)).span(draw.long).text(draw.question(1)).done()


def _at_the_start(draw: _Draw) -> OracleRequest:
    return _Builder().span(draw.document()).text(draw.question(1)).done()


def _at_the_end(draw: _Draw) -> OracleRequest:
    return _Builder().text(draw.preamble(1)).span(draw.document()).done()


def _adjacent(draw: _Draw) -> OracleRequest:
    builder = _Builder().text(draw.preamble())
    for document in draw.rng.sample(draw.corpus, max(1, min(draw.max_docs, 3))):
        builder.span(document)
    return builder.text(draw.question()).done()


def _repeated(draw: _Draw) -> OracleRequest:
    document = draw.rng.choice(draw.corpus[2:])
    gap = draw.text(draw.rng.randint(1, 70))
    builder = _Builder().text(draw.preamble()).span(document).text(gap).span(document)
    return builder.text(draw.question()).done()


def _below_a_page(draw: _Draw) -> OracleRequest:
    builder = _Builder().text(draw.preamble()).span(draw.below_page)
    return builder.text(draw.question(1)).done()


def _whole_pages_at_the_end(draw: _Draw) -> OracleRequest:
    return _Builder().text(draw.preamble(1)).span(draw.three_pages).done()


def _nothing_else(draw: _Draw) -> OracleRequest:
    return _Builder().span(draw.rng.choice(draw.corpus[2:])).done()


def _as_long_as_the_link(draw: _Draw) -> OracleRequest:
    builder = _Builder().text(draw.preamble()).span(draw.one_page).text(draw.question())
    return builder.span(draw.two_pages).text(draw.question(1)).done()


def _several(draw: _Draw) -> OracleRequest:
    builder = _Builder().text(draw.preamble())
    for document in draw.documents():
        builder.span(document).text(draw.question())
    return builder.done()


def _plain(draw: _Draw) -> OracleRequest:
    return _Builder().text(draw.preamble()).text(draw.document()).text(draw.question(1)).done()


_FORMS: list[Callable[[_Draw], OracleRequest]] = [
    _one_document,
    _at_the_start,
    _at_the_end,
    _adjacent,
    _repeated,
    _below_a_page,
    _whole_pages_at_the_end,
    _nothing_else,
    _as_long_as_the_link,
    _several,
    _plain,
]
