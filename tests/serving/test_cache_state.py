"""What lies in the pool after every forward pass, against the Hugging Face model (float32, both).

A probe in the scheduler's process (`row_probe`) writes down each request's row after prefill, after
every chunk and after every decode step, as the block table resolves it.
"""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kv_oracle import Layer, expected_rows
from oracle import OracleRequest, load_model
from prompts import PAGE, ROOT, Writer, around
from server import Server

LINK = 1
CHUNK = 128
STEPS = 6
DOCUMENT = 5 * PAGE + 10
SHARED = 4 * PAGE  # without the linked page
TOLERANCE = 2e-4
PROBE = Path(__file__).parents[1] / "row_probe"


@dataclass
class Observed:
    """A request, its passes in their order, and what its row must hold."""

    prompt: list[int]
    spans: list[list[int]] | None
    generated: list[int] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    expected: list[Layer] = field(default_factory=list)

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Of the whole row, at its end."""
        slots: npt.NDArray[np.int64] = self.passes[-1]["slots"]
        return slots


def _requests() -> dict[str, Observed]:
    writer = Writer(40)
    plain = writer.text(5 * PAGE - 3)  # decode crosses into the next page
    document = writer.text(DOCUMENT)
    one = around(writer.text(70), document, writer.text(20))
    other = around(writer.text(33), document, writer.text(15))
    # both that follow the plain one leave it in the middle of a page, whose rows they copy
    return {
        "plain": Observed(plain, None),
        "again": Observed([*plain, *writer.text(20)], None),
        "forked": Observed([*plain[: 3 * PAGE + 40], *writer.text(30)], None),
        "reader": Observed(*one),
        "other reader": Observed(*other),
        "left": Observed(*around(writer.text(47), document, writer.text(30))),
        "right": Observed(*around(writer.text(90), document, writer.text(11))),
        "tessera-span-1": Observed([*ROOT, *document[: 5 * PAGE]], None),
    }


def _passes(folder: Path) -> list[dict[str, Any]]:
    return [
        row for path in sorted(folder.glob("*.pickle")) for row in pickle.loads(path.read_bytes())
    ]


LLAMA = pytest.param("llama", marks=pytest.mark.slow)  # a second server


@pytest.fixture(scope="module", params=["mla", LLAMA])
def observed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Observed]:
    model: Path = request.getfixturevalue(f"{request.param}_model")
    folder = tmp_path_factory.mktemp("passes")
    requests = _requests()
    path = os.pathsep.join(filter(None, [str(PROBE), os.environ.get("PYTHONPATH")]))
    with Server(
        model,
        *("--chunked-prefill-size", str(CHUNK)),
        config={"link_pages": LINK, "span_root": ROOT},
        environment={"PYTHONPATH": path, "ROW_PROBE": str(folder)},
    ) as server:

        def ask(rid: str) -> None:
            seen = requests[rid]
            answer = server.generate(seen.prompt, seen.spans, steps=STEPS, rid=rid)
            seen.generated = answer.tokens

        for rid in ("plain", "again", "forked", "reader", "other reader"):
            ask(rid)
        _ask_at_once(server, [requests["left"], requests["right"]], ["left", "right"])
        time.sleep(1)  # a pass that was launched before the last answer was known
    for row in _passes(folder):
        if row["rid"] in requests:
            requests[row["rid"]].passes.append(row)
    reference = load_model(model)
    for seen in requests.values():
        spans = [(start, end) for start, end in seen.spans or []]
        seen.expected = expected_rows(
            reference,
            OracleRequest(seen.prompt, spans),
            seen.generated,
            page_size=PAGE,
            link_pages=LINK,
            root=ROOT,
        )
    return requests


def _ask_at_once(server: Server, asked: list[Observed], rids: list[str]) -> None:
    """In one batch, so that they run side by side."""
    params = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
    body = {
        "input_ids": [seen.prompt for seen in asked],
        "rid": rids,
        "sampling_params": [
            {**params, "custom_params": {"tessera": {"spans": seen.spans}}} for seen in asked
        ],
    }
    for seen, answer in zip(asked, server.post("/generate", body).json(), strict=True):
        seen.generated = answer["output_ids"]


def _rows(planes: list[npt.NDArray[np.float32]]) -> torch.Tensor:
    """[tokens, width] of one layer."""
    return torch.cat([torch.from_numpy(plane).flatten(1) for plane in planes], dim=-1)


def test_every_pass_was_seen(observed: dict[str, Observed]) -> None:
    chunks = {
        "plain": [128, 256, 317],
        "again": [337],
        "forked": [262],
        "reader": [SHARED + CHUNK, 420],
        "other reader": [378],
        "tessera-span-1": [128, 256, 384],
    }
    for rid, seen in observed.items():
        ends = [row["tokens"] for row in seen.passes]
        prefill = [end for end in ends if end <= len(seen.prompt)]
        assert prefill == chunks.get(rid, prefill), rid
        assert prefill[-1] == len(seen.prompt)
        decode = ends[len(prefill) :]
        assert decode == list(range(len(seen.prompt) + 1, len(seen.prompt) + 1 + len(decode)))
        assert len(decode) >= len(seen.generated) - 1, rid  # the last token need not be forwarded


def test_a_row_holds_what_the_model_computes(observed: dict[str, Observed]) -> None:
    """Width, latents (or values), and keys with the phase and pairing of their position."""
    for rid, seen in observed.items():
        for row in seen.passes:
            for number, (planes, layer) in enumerate(zip(row["kv"], seen.expected, strict=True)):
                got = _rows(planes)
                want = layer.rows[: row["tokens"]]
                assert (got.dtype, got.shape[1]) == (torch.float32, want.shape[1])
                wrong = (got[: len(want)] - want).abs().amax(dim=1) > TOLERANCE
                assert not wrong.any(), (rid, row["tokens"], number, wrong.nonzero().flatten())


def test_new_tokens_stand_where_the_prompt_has_them(observed: dict[str, Observed]) -> None:
    for rid, seen in observed.items():
        for row in seen.passes:
            want = seen.expected[0].positions[row["tokens"] - len(row["positions"]) : row["tokens"]]
            assert row["positions"], (rid, row["tokens"])
            assert row["positions"][: len(want)] == want, (rid, row["tokens"])


def test_the_valid_length_moves_once_and_by_the_whole_pass(observed: dict[str, Observed]) -> None:
    lent = {"again": 317, "forked": 3 * PAGE + 40}
    for rid, seen in observed.items():
        valid = SHARED if seen.spans else lent.get(rid, 0)
        for row in seen.passes:
            assert row["during"] == [valid] * len(row["kv"]), "it moved before the last layer"
            assert row["committed"] == row["tokens"]
            valid = row["committed"]


def test_the_block_table_keeps_pages_whole(observed: dict[str, Observed]) -> None:
    for seen in observed.values():
        for row in seen.passes:
            slots = row["slots"]
            assert len(set(slots)) == len(slots)
            assert (slots % PAGE == np.arange(len(slots)) % PAGE).all()
            pages = slots // PAGE
            assert (pages == pages[np.arange(len(slots)) // PAGE * PAGE]).all()
            assert pages.min() > 0, "page 0 takes writes of padding"


def test_shared_pages_are_the_same_slots(observed: dict[str, Observed]) -> None:
    reader, other = observed["reader"].slots, observed["other reader"].slots
    span = observed["tessera-span-1"].slots
    assert reader[:SHARED].tolist() == other[:SHARED].tolist()
    assert reader[:SHARED].tolist() == span[len(ROOT) + LINK * PAGE :].tolist()
    assert set(reader[SHARED:]).isdisjoint(span)
    left, right = observed["left"].slots, observed["right"].slots  # at once
    assert left[:SHARED].tolist() == right[:SHARED].tolist() == reader[:SHARED].tolist()
    assert set(left[SHARED:]).isdisjoint(right[SHARED:])
    plain, again, forked = (observed[rid].slots for rid in ("plain", "again", "forked"))
    assert again[: 4 * PAGE].tolist() == plain[: 4 * PAGE].tolist()
    assert forked[: 3 * PAGE].tolist() == plain[: 3 * PAGE].tolist()
    assert set(forked[3 * PAGE :]).isdisjoint(plain[: 5 * PAGE])
