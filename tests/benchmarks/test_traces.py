"""Recorded sessions: nothing is lost, spans are messages, and what repeats elsewhere is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.traces import sglang_sets, suite
from benchmarks.workloads.traces import (
    VARIABLE,
    Call,
    Options,
    Session,
    folder_of,
    messages,
    replayed,
    sessions,
)


def encode(text: str) -> list[int]:
    """A byte is a token."""
    return list(text.encode())


def body(letter: str, tokens: int = 100) -> str:
    """A message of that many tokens."""
    return letter * tokens


FIRST = f"user: {body('a')}\n\nassistant: {body('b')}\n\nuser: short"
SHIFTED = f"system: {body('s', 70)}\n\nuser: {body('b')}\n\n\n\nuser: {body('c')}"


def session(*prompts: str, answer: str = "") -> Session:
    return Session("one", tuple(Call(prompt, answer) for prompt in prompts))


def spans_of(prompt: str, *before: str, policy: str = "messages", answer: str = "") -> list[str]:
    """The texts that are spans of the last prompt."""
    made = replayed(session(*before, prompt, answer=answer), encode, Options(policy))[-1].request
    text = bytes(made.input_ids).decode()
    assert text == prompt, "no token is lost"
    return [text[start:end] for start, end in made.spans]


@pytest.mark.parametrize(
    "prompt", [FIRST, SHIFTED, "", "no role", "x\n\nuser: y", "user: ", "user: a: b"]
)
def test_the_pieces_of_a_prompt_make_up_the_prompt(prompt: str) -> None:
    assert "".join(text for text, _ in messages(prompt)) == prompt


def test_contents_of_at_least_a_page_are_spans_whoever_says_them() -> None:
    assert spans_of(FIRST) == [body("a"), body("b")]
    assert spans_of(SHIFTED)[1] == body("b") + "\n\n"  # of two breaks one is the content's
    assert spans_of(f"user: {body('a', 63)}") == []


def test_repeated_elsewhere_is_shifted_and_a_common_beginning_is_not() -> None:
    again = f"{FIRST}\n\nuser: {body('d')}"
    elsewhere = f"system: x\n\nuser: {body('b')}"
    found = replayed(session(FIRST, again, elsewhere), encode, Options())
    assert [one.shifted_tokens for one in found] == [0, 0, 100]


def test_short_messages_can_be_left_to_be_text() -> None:
    made = replayed(session(FIRST), encode, Options(least_tokens=101))
    assert made[0].request.spans == ()


def test_an_earlier_answer_inside_a_template_is_a_span_of_its_own() -> None:
    template = f"user: We work on this:\n{body('q', 200)}\nNow plan it."
    before = f"user: {body('a')}"
    assert spans_of(template, before, answer=body("q", 200)) == [template.removeprefix("user: ")]
    assert spans_of(template, before, policy="known", answer=body("q", 200)) == [body("q", 200)]


def test_a_message_is_cut_once_though_more_is_known_later() -> None:
    """Else the same message would be other tokens, and other spans, in the next turn."""
    whole = body("p", 150) + body("q", 200)
    first = f"user: {whole}"
    later = f"{first}\n\nuser: {body('q', 200)}"
    assert spans_of(first, policy="known") == [whole]
    assert spans_of(f"{later}\n\nuser: x", first, later, policy="known") == [whole, body("q", 200)]


def test_a_folder_is_named_by_option_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert folder_of(None) is None
    assert folder_of(tmp_path) is None, "nothing is recorded there"
    lines = [{"timestamp": 2, "input": SHIFTED}, {"timestamp": 1, "input": FIRST}]
    lines += [{"timestamp": 3, "input": ""}]
    text = "".join(json.dumps({**line, "output": "x"}) + "\n" for line in lines)
    (tmp_path / "abcdefghij.jsonl").write_text(text)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert folder_of(None) == tmp_path
    (found,) = sessions(tmp_path)
    assert found.name == "abcdefgh"
    assert [call.prompt for call in found.calls] == [FIRST, SHIFTED], "in order, without empty ones"


def test_without_sessions_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert suite.main([]) == 0
    said = capsys.readouterr()
    assert "skipped" in said.err
    assert said.out == ""


def test_conversations_for_sglang_are_prompts_that_continue_each_other(tmp_path: Path) -> None:
    recorded = session(
        "user: a",
        "system: other",
        "user: a\n\nassistant: b\n\nuser: c",
        "user: a\n\nassistant: b\n\nuser: c\n\nassistant: d\n\nsystem: e\n\nuser: f",
    )
    path = sglang_sets.write_agentic([recorded], tmp_path / "agentic.json")
    (conversation,) = json.loads(path.read_text())["conversations"]
    assert [turn["messages"] for turn in conversation] == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "c"}],
        [{"role": "system", "content": "e"}, {"role": "user", "content": "f"}],
    ]
