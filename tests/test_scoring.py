"""The scoring oracle against the one that decodes: two constructions, the same probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import OracleRequest, greedy, load_model
from prompts import PAGE, ROOT, Writer, around
from scoring import score

STEPS = 6


@pytest.mark.parametrize("after", [0, 40], ids=["span-ends-the-prompt", "text-behind"])
@pytest.mark.parametrize(("link_pages", "root"), [(0, []), (1, ROOT)], ids=["bare", "link1-root"])
def test_teacher_forcing_a_greedy_answer_gives_its_own_probabilities(
    mla_model: Path, after: int, link_pages: int, root: list[int]
) -> None:
    model, writer = load_model(mla_model), Writer(41)
    prompt, ((start, end),) = around(writer.text(50), writer.text(3 * PAGE), writer.text(after))
    found = greedy(
        model,
        OracleRequest(prompt, [(start, end)]),
        page_size=PAGE,
        link_pages=link_pages,
        root=root,
        steps=STEPS,
    )
    # a span that ends a prompt keeps a tail of one token, which a longer prompt must be told
    spans = [(start, min(end, len(prompt) - 1))]
    rows = score(
        model,
        OracleRequest(prompt + found.tokens, spans),
        page_size=PAGE,
        link_pages=link_pages,
        root=root,
        start=len(prompt),
    )
    chosen = rows.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    assert chosen.tolist() == pytest.approx(found.chosen_logprobs, abs=1e-4)


def test_what_stands_in_a_span_has_no_score(mla_model: Path) -> None:
    prompt, spans = around([20] * 9, [30] * 80, [40] * 9)
    request = OracleRequest(prompt, [(spans[0][0], spans[0][1])])
    with pytest.raises(ValueError, match="start 89 must be past the end of the last span, 89"):
        score(load_model(mla_model), request, page_size=PAGE, link_pages=0, root=[], start=89)
