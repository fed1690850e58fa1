"""The oracle against itself, against the plain model, and against a construction without a mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.models import VOCAB, write_llama, write_mla
from tests.oracle import (
    FIRST_TOKEN,
    Greedy,
    OracleRequest,
    SharedRun,
    extend,
    greedy,
    load_model,
    one_thread,
    random_requests,
    shared_runs,
)

PAGE = 64
STEPS = 6
TOLERANCE = 1e-4


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, VOCAB, (count,), generator=generator).tolist()


ROOT = tokens(999, PAGE)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=["mla", "llama"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedModel:
    directory: Path = tmp_path_factory.mktemp(request.param)
    write = write_mla if request.param == "mla" else write_llama
    return load_model(write(directory))


def ask(
    model: PreTrainedModel, request: OracleRequest, link_pages: int, root: Sequence[int] = ()
) -> Greedy:
    return greedy(model, request, page_size=PAGE, link_pages=link_pages, root=root, steps=STEPS)


def assert_same(left: Greedy, right: Greedy) -> None:
    assert left.tokens == right.tokens
    torch.testing.assert_close(left.first_logprobs, right.first_logprobs, atol=TOLERANCE, rtol=0)
    assert left.chosen_logprobs == pytest.approx(right.chosen_logprobs, abs=TOLERANCE)


def distance(left: Greedy, right: Greedy) -> float:
    return (left.first_logprobs - right.first_logprobs).abs().max().item()


@torch.inference_mode()
def plain(model: PreTrainedModel, prompt: list[int]) -> Greedy:
    """The model without cache, mask or positions of ours: the whole text once per token."""
    text = list(prompt)
    rows = []
    for _ in range(STEPS):
        row = torch.log_softmax(model(torch.tensor([text])).logits[0, -1], dim=-1)
        rows.append(row)
        text.append(int(row.argmax()))
    generated = text[len(prompt) :]
    return Greedy(generated, rows[0], [r[t].item() for r, t in zip(rows, generated, strict=True)])


class Walk:
    """The second construction. It walks the prompt from left to right with one cache and no mask.

    A remaining stretch runs as a plain causal forward over what the cache holds. Where a shared run
    ends, its keys are copied in from a plain forward of `[root | body]` at positions 0, 1, …, and
    the rotated part is rotated on to the prompt's offset by hand.
    """

    def __init__(self, model: PreTrainedModel, root: Sequence[int]) -> None:
        self.model = model
        self.root = list(root)
        self.cache = DynamicCache(config=model.config)
        self.inv_freq = model.model.rotary_emb.inv_freq.double()
        self.latent = model.config.model_type == "deepseek_v3"

    @torch.inference_mode()
    def run(self, request: OracleRequest, link_pages: int) -> Greedy:
        position = 0
        logits = None
        for run in shared_runs(request, page_size=PAGE, link_pages=link_pages):
            self._forward(request.prompt, position, run.visible)
            self._append(request.prompt, run)
            position = run.end
        logits = self._forward(request.prompt, position, len(request.prompt))
        text = list(request.prompt)
        rows = []
        for _ in range(STEPS):
            assert logits is not None
            rows.append(torch.log_softmax(logits, dim=-1))
            text.append(int(rows[-1].argmax()))
            logits = self._forward(text, len(text) - 1, len(text))
        generated = text[len(request.prompt) :]
        chosen = [row[token].item() for row, token in zip(rows, generated, strict=True)]
        return Greedy(generated, rows[0], chosen)

    def _forward(self, text: list[int], begin: int, end: int) -> torch.Tensor | None:
        if begin == end:
            return None
        output = self.model(
            input_ids=torch.tensor([text[begin:end]]),
            position_ids=torch.arange(begin, end)[None],
            past_key_values=self.cache,
        )
        return output.logits[0, -1]

    def _append(self, prompt: list[int], run: SharedRun) -> None:
        isolated = self.model(torch.tensor([self.root + prompt[run.start : run.end]]))
        readable = slice(len(self.root) + run.visible - run.start, None)
        for index, layer in enumerate(isolated.past_key_values.layers):
            first, second = layer.keys[:, :, readable], layer.values[:, :, readable]
            # transformers caches (latent, rotated channels) for MLA, else (rotated keys, values).
            if self.latent:
                second = self._rotate(second, run.start - len(self.root))
            else:
                first = self._rotate(first, run.start - len(self.root))
            self.cache.update(first, second, index)

    def _rotate(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """Half-split pairs, in which transformers keeps DeepSeek's interleaved ones as well."""
        cos, sin = (by * self.inv_freq).cos().float(), (by * self.inv_freq).sin().float()
        a, b = keys.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def test_without_spans_it_is_the_plain_model(model: PreTrainedModel) -> None:
    prompt = tokens(1, 300)
    assert_same(ask(model, OracleRequest(prompt, []), 1, ROOT), plain(model, prompt))


def test_a_span_that_opens_the_prompt_without_root_or_link_changes_nothing(
    model: PreTrainedModel,
) -> None:
    """Its body sees nothing before it anyway. The same holds behind any run that is not shared."""
    prompt = tokens(2, 330)
    assert_same(ask(model, OracleRequest(prompt, [(0, 290)]), 0), plain(model, prompt))
    assert_same(ask(model, OracleRequest(prompt, [(0, 330)]), 0), plain(model, prompt))


def test_a_span_behind_exactly_its_root_changes_nothing_it_does_not_show(
    model: PreTrainedModel,
) -> None:
    """Where the prompt itself opens with the root, isolation behind the root is no isolation."""
    prompt = ROOT + tokens(3, 250)
    request = OracleRequest(prompt, [(PAGE, PAGE + 200)])
    assert_same(ask(model, request, 0, ROOT), plain(model, prompt))
    assert_same(ask(model, request, 1, ROOT), plain(model, prompt))


def test_spans_no_longer_than_the_link_are_ordinary_text(model: PreTrainedModel) -> None:
    prompt = tokens(4, 400)
    spans = [(10, 40), (50, 50 + 2 * PAGE + PAGE // 2), (270, 400)]
    assert_same(ask(model, OracleRequest(prompt, spans), 2, ROOT), plain(model, prompt))


@pytest.mark.parametrize(("link_pages", "root"), [(0, []), (1, ROOT), (2, ROOT)])
def test_the_mask_agrees_with_a_walk_that_has_none(
    model: PreTrainedModel, link_pages: int, root: list[int]
) -> None:
    for request in random_requests(link_pages, 11, vocab=VOCAB, page_size=PAGE):
        expected = Walk(model, root).run(request, link_pages)
        assert_same(ask(model, request, link_pages, root), expected)


def test_answers_tell_isolation_root_and_link_apart(model: PreTrainedModel) -> None:
    """Else the oracle would accept an engine that ignores one of them."""
    prompt = tokens(5, 420)
    request = OracleRequest(prompt, [(90, 390)])
    answers = [
        plain(model, prompt),
        ask(model, request, 0),
        ask(model, request, 0, ROOT),
        ask(model, request, 1, ROOT),
        ask(model, request, 2, ROOT),
    ]
    for i, left in enumerate(answers):
        for right in answers[:i]:
            assert distance(left, right) > 100 * TOLERANCE


@pytest.mark.parametrize("changed", [3, 120, 250, 299])
def test_every_token_matters(model: PreTrainedModel, changed: int) -> None:
    prompt = tokens(6, 300)
    other = list(prompt)
    other[changed] = FIRST_TOKEN if prompt[changed] != FIRST_TOKEN else FIRST_TOKEN + 1
    before, after = plain(model, prompt), plain(model, other)
    assert distance(before, after) > 1000 * TOLERANCE
    best, second = before.first_logprobs.topk(2).values.tolist()
    assert best - second > 10 * TOLERANCE


def test_bodies_end_where_the_design_says() -> None:
    prompt = tokens(7, 4 * PAGE)
    whole = OracleRequest(prompt, [(0, 4 * PAGE)])
    assert shared_runs(whole, page_size=PAGE, link_pages=1) == [SharedRun(0, PAGE, 3 * PAGE)]
    inner = OracleRequest(prompt, [(0, PAGE), (PAGE, 4 * PAGE - 1)])
    assert shared_runs(inner, page_size=PAGE, link_pages=1) == [SharedRun(PAGE, 2 * PAGE, 3 * PAGE)]
    assert shared_runs(inner, page_size=PAGE, link_pages=2) == []


def test_visibility_token_by_token() -> None:
    """The matrix of a small case, against the rule spelled out for each pair of tokens."""
    page, root = 2, [1, 2]
    prompt = list(range(20, 33))
    request = OracleRequest(prompt, [(1, 8), (8, 13)])
    extended = extend(request, page_size=page, link_pages=1, root=root)
    # bodies [1, 7) and [8, 12), of which [3, 7) and [10, 12) are shared
    copies = [(-1, 7), (6, 12)]
    labels = [(copy, at) for copy, (begin, end) in enumerate(copies) for at in range(begin, end)]
    labels += [(None, at) for at in range(13) if at not in {3, 4, 5, 6, 10, 11}]
    assert [at for _, at in labels] == extended.positions
    shown = {0: range(3, 7), 1: range(10, 12)}
    for row, (reader, at) in enumerate(labels):
        for column, (source, other) in enumerate(labels):
            if reader is not None or source is None:
                expected = reader == source and other <= at
            else:
                expected = other in shown[source] and at >= shown[source].stop
            assert extended.sees[row, column] == expected, (row, column)
    for column, (source, other) in enumerate(labels):
        assert extended.generated_sees[column] == (source is None or other in shown[source])


def test_a_root_is_whole_pages() -> None:
    with pytest.raises(ValueError, match="whole pages of 64 tokens, got 63"):
        extend(OracleRequest([1], []), page_size=PAGE, link_pages=0, root=ROOT[:-1])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_random_requests_hit_the_corners(page_size: int) -> None:
    requests = random_requests(3, 44, vocab=VOCAB, page_size=page_size)
    assert requests == random_requests(3, 44, vocab=VOCAB, page_size=page_size)
    assert requests != random_requests(4, 44, vocab=VOCAB, page_size=page_size)
    hit: set[str] = set()
    readers: dict[tuple[int, ...], set[int]] = {}
    for number, request in enumerate(requests):
        assert request.prompt
        assert FIRST_TOKEN <= min(request.prompt) <= max(request.prompt) < VOCAB
        edges = [edge for span in request.spans for edge in span]
        assert edges == sorted(edges)
        assert all(0 <= start < end <= len(request.prompt) for start, end in request.spans)
        documents = [tuple(request.prompt[start:end]) for start, end in request.spans]
        for document in documents:
            readers.setdefault(document, set()).add(number)
        lengths = [len(document) for document in documents]
        corners = {
            "none": not edges,
            "start": 0 in edges,
            "end": len(request.prompt) in edges,
            "alone": request.spans == [(0, len(request.prompt))],
            "adjacent": len(set(edges)) < len(edges),
            "repeated": len(set(documents)) < len(documents),
            "below a page": any(length < page_size for length in lengths),
            "one page": page_size in lengths,
            "two pages": 2 * page_size in lengths,
            "whole pages at the end": len(request.prompt) in edges
            and lengths[-1] % page_size == 0
            and lengths[-1] > 2 * page_size,
        }
        hit |= {name for name, holds in corners.items() if holds}
    expected = {*corners} - ({"below a page"} if page_size == 1 else set())
    assert hit == expected
    assert len([document for document, by in readers.items() if len(by) > 2]) >= 4
