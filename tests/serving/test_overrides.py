"""What a request may ask for beside its spans: link pages, a root, input log-probabilities.

One server for all, whose own settings are those of no request, so that a request which met pages of
another setting would answer like neither. Float32; the oracle is the Hugging Face model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCAB
from oracle import OracleRequest, greedy, load_model, random_requests
from prompts import PAGE, ROOT, Writer, around, compose
from scoring import score
from server import Answer, RequestError, Server
from transformers import PreTrainedModel

LINK = 1
OTHER_ROOT = [(11 * i) % 350 + 40 for i in range(2 * PAGE)]
STEPS = 8
TOLERANCE = 2e-3
REQUESTS = 11  # one of each form


@dataclass(frozen=True)
class Setting:
    """What a request overrides, and what it is then served with."""

    overrides: dict[str, Any]
    root: Sequence[int]
    link_pages: int


SETTINGS = (
    Setting({}, ROOT, LINK),
    Setting({"link_pages": 0}, ROOT, 0),
    Setting({"root": "none"}, [], LINK),
    Setting({"root": OTHER_ROOT, "link_pages": 2}, OTHER_ROOT, 2),
    Setting({"root": "none", "link_pages": 0}, [], 0),
)


@pytest.fixture(scope="module")
def server(mla_model: Path) -> Iterator[Server]:
    config = {"link_pages": LINK, "span_root": ROOT}
    with Server(mla_model, "--chunked-prefill-size", "256", config=config) as running:
        yield running


@pytest.fixture(scope="module")
def model(mla_model: Path) -> PreTrainedModel:
    return load_model(mla_model)


@pytest.fixture(autouse=True)
def _cold(server: Server) -> None:
    server.flush()


def ask(
    server: Server, prompt: list[int], spans: Any, overrides: dict[str, Any], **fields: Any
) -> Answer:
    sampling = {"custom_params": {"tessera": {"spans": spans, **overrides}}}
    return server.generate(prompt, sampling=sampling, **fields)


# --- link pages and roots ------------------------------------------------------------------------


def test_every_setting_answers_like_the_oracle_in_one_cache(
    server: Server, model: PreTrainedModel
) -> None:
    requests = random_requests(3, REQUESTS, vocab=VOCAB, page_size=PAGE, max_docs=2)
    cases = [(request, setting) for request in requests for setting in SETTINGS]
    want = [
        greedy(
            model,
            request,
            page_size=PAGE,
            link_pages=setting.link_pages,
            root=setting.root,
            steps=STEPS,
        )
        for request, setting in cases
    ]
    assert len({tuple(found.tokens) for found in want}) > 2 * REQUESTS, "settings show in answers"
    hits = []
    for _ in range(2):  # cold, beside what the other settings left; then warm
        hit = 0
        for (request, setting), found in zip(cases, want, strict=True):
            spans = [list(span) for span in request.spans]
            answer = ask(server, request.prompt, spans, setting.overrides, steps=STEPS)
            assert answer.tokens == found.tokens, (setting.overrides, request.spans)
            assert answer.logprobs == pytest.approx(found.chosen_logprobs, abs=TOLERANCE)
            hit += answer.cached
        hits.append(hit)
    assert hits[1] > hits[0] > 0


def test_settings_share_the_bodies_that_are_equal_and_no_others(server: Server) -> None:
    writer = Writer(31)
    document = writer.text(6 * PAGE + 5)

    def cached(overrides: dict[str, Any]) -> int:
        prompt, spans = around(writer.text(40), document, writer.text(9))
        return ask(server, prompt, spans, overrides, steps=1).cached

    assert cached({}) == 0
    assert cached({}) == (6 - LINK) * PAGE
    assert cached({"link_pages": 0}) == 6 * PAGE, "the same body, all of it visible"
    assert cached({"link_pages": 2, "root": ROOT}) == 4 * PAGE, "the server's root by its ids"
    assert cached({"root": "none"}) == 0
    assert cached({"root": "none", "link_pages": 3}) == 3 * PAGE
    assert cached({"root": OTHER_ROOT}) == 0
    assert cached({"root": OTHER_ROOT}) == (6 - LINK) * PAGE


def test_as_many_link_pages_as_the_body_has_make_it_ordinary_text(server: Server) -> None:
    writer = Writer(32)
    prompt, spans = around(writer.text(70), writer.text(3 * PAGE + 5), writer.text(20))
    plain = server.generate(prompt, steps=STEPS)
    for link_pages in (3, 10**9):
        answer = ask(server, prompt, spans, {"link_pages": link_pages}, steps=STEPS)
        assert answer.tokens == plain.tokens
        assert answer.cached == len(prompt) - 1 or answer.cached >= len(prompt) // PAGE * PAGE


def test_a_root_that_continues_into_a_span_is_not_mistaken_for_it(
    server: Server, model: PreTrainedModel
) -> None:
    writer = Writer(33)
    head, tail = writer.text(PAGE), writer.text(4 * PAGE)
    whole = compose((writer.text(30), False), (head + tail, True), (writer.text(9), False))
    behind = compose((writer.text(31), False), (tail, True), (writer.text(9), False))
    for (prompt, spans), overrides, root in (
        (whole, {"root": "none", "link_pages": 1}, []),
        (behind, {"root": head, "link_pages": 0}, head),  # the same pages behind the same tokens
        (whole, {"root": "none", "link_pages": 0}, []),
    ):
        request = OracleRequest(prompt, [(start, end) for start, end in spans])
        link_pages = overrides["link_pages"]
        found = greedy(
            model, request, page_size=PAGE, link_pages=link_pages, root=root, steps=STEPS
        )
        answer = ask(server, prompt, spans, overrides, steps=STEPS)
        assert answer.tokens == found.tokens
    assert answer.cached >= 5 * PAGE


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"link_pages": -1}, "link_pages"),
    ({"link_pages": "1"}, "link_pages"),
    ({"root": "server"}, "root"),
    ({"root": ROOT[:-1]}, "whole pages of 64"),
    ({"root": [*ROOT[:-1], VOCAB]}, "root[63]"),
    ({"root": ROOT * 1000}, "maximum input length"),
    ({"root": "auto"}, "needs a tokenizer"),
    ({"roots": "none"}, "'roots'"),
]


@pytest.mark.parametrize(("overrides", "said"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_overrides_are_a_400_that_names_them(
    server: Server, overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as raised:
        ask(server, Writer(34).text(200), [[0, 150]], overrides)
    assert raised.value.status == 400
    assert said in raised.value.body
    assert server.alive()


# --- input log-probabilities ---------------------------------------------------------------------

IDS = [17, 230, 401]


def scored(server: Server, request: OracleRequest, setting: Setting, start: int) -> Answer:
    spans = [list(span) for span in request.spans]
    wishes = {"logprob_start_len": start, "top_logprobs_num": 3, "token_ids_logprob": IDS}
    return ask(server, request.prompt, spans, setting.overrides, steps=1, **wishes)


def check_scores(answer: Answer, request: OracleRequest, want: torch.Tensor, start: int) -> None:
    """``want`` stands for the tokens behind ``start``; SGLang has no score for that one."""
    first, *entries = answer.meta["input_token_logprobs"]
    assert first[:2] == [None, request.prompt[start]]
    assert [token for _, token, _ in entries] == request.prompt[start + 1 :]
    tokens = torch.tensor(request.prompt[start + 1 :])
    chosen = want.gather(1, tokens[:, None])[:, 0].tolist()
    assert [logprob for logprob, _, _ in entries] == pytest.approx(chosen, abs=TOLERANCE)
    best = want.topk(3).values.tolist()
    for known, row in zip(answer.meta["input_top_logprobs"][1:], best, strict=True):
        assert [logprob for logprob, _, _ in known] == pytest.approx(row, abs=TOLERANCE)
    for known, row in zip(answer.meta["input_token_ids_logprobs"][1:], want[:, IDS], strict=True):
        assert [logprob for logprob, _, _ in known] == pytest.approx(row.tolist(), abs=TOLERANCE)


def _long_questions() -> list[OracleRequest]:
    """Prompts whose tokens behind the last span fill several chunks, a page, and less."""
    writer = Writer(35)
    made = []
    for before, pages, after in ((30, 5, 600), (0, 3, 130), (200, 4, 12), (70, 2, 300)):
        document, other = writer.text(pages * PAGE + before % 7), writer.text(3 * PAGE)
        prompt, spans = compose(
            *((writer.text(before), False), (document, True), (writer.text(33), False)),
            *((other, True), (writer.text(after), False)),
        )
        made.append(OracleRequest(prompt, [(start, end) for start, end in spans]))
    return made


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4]], ids=["server", "overridden"])
def test_input_logprobs_equal_the_oracles(
    server: Server, model: PreTrainedModel, setting: Setting
) -> None:
    cases = []
    for request in _long_questions():
        end = request.spans[-1][1]
        for start in {end, end + 5, len(request.prompt) - 2}:
            want = score(
                model,
                request,
                page_size=PAGE,
                link_pages=setting.link_pages,
                root=setting.root,
                start=start + 1,
            )
            cases.append((request, want, start))
    for request, want, start in cases:
        server.flush()
        cold = scored(server, request, setting, start)
        assert cold.cached == 0
        check_scores(cold, request, want, start)
        warm = scored(server, request, setting, start)
        check_scores(warm, request, want, start)
        assert warm.cached > 0
        assert warm.cached <= start
        assert warm.tokens == cold.tokens


def test_input_logprobs_in_one_batch_with_plain_readers(
    server: Server, model: PreTrainedModel
) -> None:
    setting = SETTINGS[0]
    requests = _long_questions()
    items = [
        (request, request.spans[-1][1] + 1, spans)
        for request in requests
        for spans in (request.spans, [])
    ]
    bodies = [
        {
            "input_ids": request.prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 0,
                "custom_params": {"tessera": {"spans": [list(span) for span in spans]}},
            },
            "return_logprob": True,
            "logprob_start_len": start,
        }
        for request, start, spans in items
    ]
    batch = {
        "input_ids": [body["input_ids"] for body in bodies],
        "sampling_params": [body["sampling_params"] for body in bodies],
        "return_logprob": [True] * len(bodies),
        "logprob_start_len": [body["logprob_start_len"] for body in bodies],
    }
    response = server.post("/generate", batch)
    assert response.status_code == 200, response.text
    for (request, start, spans), answer in zip(items, response.json(), strict=True):
        want = score(
            model,
            OracleRequest(request.prompt, spans),
            page_size=PAGE,
            link_pages=setting.link_pages,
            root=setting.root,
            start=start + 1,
        )
        chosen = want.gather(1, torch.tensor(request.prompt[start + 1 :])[:, None])[:, 0]
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        assert [entry[0] for entry in entries] == pytest.approx(chosen.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("start", [-2, 0, 250])
def test_input_logprobs_inside_or_before_a_span_are_a_400(server: Server, start: int) -> None:
    with pytest.raises(RequestError) as raised:
        server.generate(Writer(36).text(300), [[20, 260]], logprob_start_len=start)
    assert raised.value.status == 400
    assert "logprob_start_len" in raised.value.body
    assert "260" in raised.value.body, "from where on they can be had"
    assert server.alive()
