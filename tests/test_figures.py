"""The figures of the documentation show what the code does, and are the ones that are committed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.figures import described, draw, parts
from docs.figures.described import Piece
from tessera_sglang.attention.layout import Span, lay_out

FOLDER = Path(draw.__file__).parent
SVG = "{http://www.w3.org/2000/svg}"


def boxes(text: str) -> Iterator[dict[str, float]]:
    """What the boxes of a figure stand for, with where they are drawn."""
    for box in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        data = {key[5:]: int(value) for key, value in box.items() if key.startswith("data-")}
        if data:
            yield {**data, "x": float(box.attrib["x"]), "width": float(box.attrib["width"])}


def drawn_row_order(text: str) -> list[int]:
    """Prompt positions in the order in which a figure's row has them."""
    order: list[int] = []
    for box in sorted(boxes(text), key=lambda box: box["row"]):
        assert box["row"] == len(order), "the row has a hole"
        order += range(int(box["prompt"]), int(box["prompt"] + box["tokens"]))
    return order


def row_order_of(prompt: tuple[Piece, ...], page_tokens: int = 64) -> list[int]:
    """What the code makes of a described prompt."""
    starts = np.cumsum([0, *(piece.tokens for piece in prompt)]).tolist()
    spans = [
        Span(start, start + piece.tokens)
        for start, piece in zip(starts, prompt, strict=False)
        if piece.colour is not None
    ]
    layout = lay_out(
        spans, prompt_tokens=starts[-1], page_size=page_tokens, root_tokens=64, linked_pages=1
    )
    assert layout is not None
    return layout.row_order.tolist()


@pytest.mark.parametrize("name", draw.FIGURES)
def test_the_committed_figure_is_what_the_script_draws(name: str) -> None:
    committed = (FOLDER / name).read_text(encoding="utf-8")
    assert committed == str(draw.FIGURES[name]()), "run python -m docs.figures.draw"


def test_no_other_figure_is_committed() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == set(draw.FIGURES)


def test_writing_leaves_those_files(tmp_path: Path) -> None:
    draw.write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {name: (FOLDER / name).read_bytes() for name in draw.FIGURES}


@pytest.mark.parametrize("name", draw.FIGURES)
def test_a_figure_stands_alone_and_on_any_page(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title"), "a screen reader says the title"
    assert "prefers-color-scheme: dark" in text
    assert not any(word in text for word in ("url(", "@import", "href", "<script"))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        x, y, across, down = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
        assert min(x, y) >= 0
        assert x + across <= width
        assert y + down <= height
    styled = root.findtext(f"{SVG}style") or ""
    used = {word for item in root.iter() for word in item.attrib.get("class", "").split()}
    assert all(f".{word} " in styled for word in used)


def test_the_row_is_drawn_as_the_code_orders_it() -> None:
    text = (FOLDER / "rows.svg").read_text(encoding="utf-8")
    order = drawn_row_order(text)
    assert order == row_order_of(described.TWO_SPANS)
    assert order != sorted(order), "the figure shows a row in another order than the prompt"
    assert sum(box["width"] for box in boxes(text)) == pytest.approx(832, abs=1)


pieces = st.builds(
    Piece,
    st.just("text"),
    st.integers(1, 400),
    st.sampled_from([None, "a", "b"]),
)


@given(st.lists(pieces, max_size=6))
def test_any_prompt_is_drawn_as_the_code_orders_it(found: list[Piece]) -> None:
    prompt = (*found, Piece("document", 200, "a"), Piece("question", 20))
    assert drawn_row_order(str(draw.draw_rows(prompt))) == row_order_of(prompt)


def test_another_layout_is_another_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the order is written by hand: it follows when the code changes its mind."""

    def without_links(*args: Any, **kwargs: Any) -> Any:
        return lay_out(*args, **{**kwargs, "linked_pages": 0})

    before = {name: str(figure()) for name, figure in draw.FIGURES.items()}
    monkeypatch.setattr(described, "lay_out", without_links)
    for name, figure in draw.FIGURES.items():
        assert str(figure()) != before[name], name


def test_runs_are_seen_from_where_the_code_says() -> None:
    layout = described.laid_out(described.TWO_SPANS)
    drawn = [
        (box["row"], box["tokens"], box["seen-from"])
        for box in boxes((FOLDER / "parts.svg").read_text(encoding="utf-8"))
    ]
    expected = [
        (run.row_start, run.tokens, seen)
        for run, seen in zip(layout.runs, layout.visible_from, strict=True)
    ]
    assert drawn == expected


def test_the_decode_step_is_the_plan_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def unshared(build: Callable[..., Any]) -> Callable[..., Any]:
        return lambda batch: build(
            parts.BatchQueries(
                batch.query_tokens,
                batch.seq_tokens,
                batch.layouts,
                tuple(source + number for number, source in enumerate(batch.sources)),
            )
        )

    def documents() -> int:
        root = ElementTree.fromstring(str(parts.draw_parts()))
        return sum(text.text == "document" for text in root.iter(f"{SVG}text"))

    assert documents() == 1, "three readers of the same pages, one part"
    monkeypatch.setattr(parts, "build_plan", unshared(parts.build_plan))
    assert documents() == 3, "readers of other pages have a part each"


# --- links of the documents around the figures ---------------------------------------------------

DOCUMENTS = sorted(FOLDER.parent.glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchor_of(heading: str) -> str:
    """What GitHub calls a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def test_there_are_documents_with_figures() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert all(f"figures/{name}" in text for name in draw.FIGURES if name != "overview.svg")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {anchor_of(heading) for heading in headings}, target
