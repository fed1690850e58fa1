"""Which decode batches with spans are captured, and which of the captured steps runs one."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

graphs = pytest.importorskip("tessera_sglang.graphs", exc_type=ImportError)

from tessera_sglang.attention.layout import ContextLayout, Span, lay_out  # noqa: E402 # after the skip
from tessera_sglang.attention.plan import PRIVATE  # noqa: E402
from tessera_sglang.compat import ForwardMode  # noqa: E402
from tessera_sglang.reader import ReaderId  # noqa: E402

PAGE = 8


def layout(spans: int) -> ContextLayout:
    """A prompt of as many documents, each of two pages and some."""
    cuts = [5 + 20 * number for number in range(spans + 1)]
    found = lay_out(
        [Span(*cut) for cut in pairwise(cuts)],
        prompt_tokens=cuts[-1] + 5,
        page_size=PAGE,
        root_tokens=PAGE,
        linked_pages=0,
    )
    assert found is not None
    return found


def readers(count: int, spans: int, *, shared: bool = False) -> list[str]:
    """Requests that read as many spans each, all the same pages or none."""
    return [
        ReaderId(
            f"r{number}",
            layout(spans),
            np.arange(spans, dtype=np.int64) + (0 if shared else number * spans),
        )
        for number in range(count)
    ]


def batch(rids: list[str], mode: Any = ForwardMode.DECODE) -> Any:
    return SimpleNamespace(
        rids=rids,
        batch_size=len(rids),
        seq_lens_cpu=torch.tensor([400] * len(rids)),
        forward_mode=mode,
    )


@pytest.fixture
def variants() -> Any:
    return graphs.SpanGraphs(context_tokens=512, device="cpu")


def parts(label: str, requests: int) -> int:
    variant = graphs.SpanGraphs(context_tokens=512, device="cpu")._variants[label]
    return int(graphs.SpanGraphs._shape(requests, *variant).parts)


@pytest.mark.parametrize("requests", [1, 2, 8, 64, 256, 512, 4096])
def test_what_has_most_parts_is_captured_first(variants: Any, requests: int) -> None:
    *labels, last = variants.capture_labels
    assert last == graphs.PLAIN
    assert sorted(labels) == sorted(variants._variants)
    counts = [parts(label, requests) for label in labels]
    assert counts == sorted(counts, reverse=True)


def test_a_step_has_a_bounded_number_of_parts(variants: Any) -> None:
    assert parts("spans16", 128) == 128 * 16
    assert parts("spans16", 512) == parts("spans16_shared", 1024) == graphs.MOST_PARTS == 4096


@pytest.mark.parametrize(
    ("rids", "label"),
    [
        (["a", "b"], "plain"),
        (["a", *readers(3, 2)], "spans4"),
        (readers(4, 4, shared=True), "spans4_shared"),
        (readers(2, 5), "spans16"),
        (readers(8, 9, shared=True), "spans16_shared"),
        (readers(1, 17), None),
    ],
)
def test_the_smallest_variant_that_fits_is_chosen(
    variants: Any, rids: list[str], label: str | None
) -> None:
    found = batch(rids)
    assert variants.can_run(found) is (label is not None)
    assert variants.select(found) == (label or "plain")


def test_a_batch_with_more_parts_than_are_captured_runs_without_a_graph(
    variants: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rids = readers(4, 4)
    assert variants.can_run(batch(rids))
    monkeypatch.setattr(graphs, "MOST_PARTS", 15)
    fresh = graphs.SpanGraphs(context_tokens=512, device="cpu")
    assert not fresh.can_run(batch(rids))
    assert fresh.can_run(batch(readers(4, 4, shared=True))), "read once, they are four parts"
    assert fresh.can_run(batch(rids[:3]))


def test_a_batch_that_stays_is_not_planned_again(
    variants: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    original = graphs.static_plan
    monkeypatch.setattr(
        graphs, "static_plan", lambda queries: plans.append(queries) or original(queries)
    )
    rids = readers(2, 2)
    for _ in range(3):
        assert variants.select(batch(rids)) == "spans4"
    assert len(plans) == 1
    wider = [*rids, readers(3, 5)[2]]
    assert variants.select(batch(wider)) == "spans16"
    moved = [rids[0], ReaderId("r1", rids[1].layout, rids[0].sources)]  # type: ignore[attr-defined]
    assert variants.select(batch(moved)) == "spans4_shared"
    assert variants.select(batch(rids)) == "spans4"
    assert len(plans) == 4


def test_private_runs_are_looked_at_in_every_step(
    variants: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    original = graphs.static_plan
    monkeypatch.setattr(
        graphs, "static_plan", lambda queries: plans.append(queries) or original(queries)
    )
    rids = [ReaderId("r", layout(2), np.full(2, PRIVATE, np.int64))]
    for count in (1, 2):
        assert variants.select(batch(rids)) == "spans4"
        assert len(plans) == count


# --- steps ---------------------------------------------------------------------------------------


@pytest.fixture
def captured(variants: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The variants, one of whose steps is captured for two requests."""
    monkeypatch.setattr(graphs, "StaticDecode", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(graphs, "capture_attention_variant", lambda: "spans4")
    variants.bind(None, None)
    assert variants.step(batch(["", ""]), in_capture=True) is not None
    return variants


def test_a_replay_finds_what_was_captured(captured: Any) -> None:
    rids = readers(2, 3)
    assert captured.select(batch(rids)) == "spans4"
    step = captured.step(batch(rids), in_capture=False)
    assert captured.current is step is not None
    assert step.rids == rids


@pytest.mark.parametrize(
    "mode",
    [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2],
)
@pytest.mark.parametrize("in_capture", [False, True])
def test_only_a_decode_is_a_step_with_spans(captured: Any, mode: Any, in_capture: bool) -> None:
    """A prefill graph is loaded behind a decode with spans, whose choice is still there."""
    rids = readers(2, 3)
    captured.select(batch(rids))
    assert captured.step(batch(rids), in_capture=False) is not None
    assert captured.step(batch(rids, mode), in_capture=in_capture) is None
    assert captured.current is None


def test_a_plain_batch_is_no_step_with_spans(captured: Any) -> None:
    captured.select(batch(["a", "b"]))
    assert captured.step(batch(["a", "b"]), in_capture=False) is None
    assert captured.current is None
