"""Marks find the edges of spans in a rendered chat, and nothing that a caller writes moves them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import FORM_TEMPLATE, JSON_TEMPLATE, TEXTS, byte_level

from tessera_sglang.chat_prompt import TemplateError, render
from tessera_sglang.text.marks import Marks

EPHEMERAL = {"type": "ephemeral"}
DOCUMENT = TEXTS[1]
TOOL = {
    "type": "function",
    "function": {
        "name": "open_gate",
        "description": "Opens the gate {of the keeper}.",
        "parameters": {
            "type": "object",
            "properties": {"when": {"type": "string", "description": "The hour."}},
            "required": ["when"],
        },
    },
}


def _part(text: str, *, span: bool = False) -> dict[str, object]:
    part: dict[str, object] = {"type": "text", "text": text}
    return {**part, "cache_control": EPHEMERAL} if span else part


def _texts(tokenizer, messages, tools=None, **options):
    """The prompt, and the texts of its spans."""
    ids, spans = render(tokenizer, messages, tools, page_tokens=4, **options)
    return tokenizer.decode(ids), [tokenizer.decode(ids[start:end]) for start, end in spans]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(bos=True, template=JSON_TEMPLATE)


def _stock(tokenizer, messages, tools=None) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def test_a_marked_part_is_a_span_and_the_prompt_stays_what_it_was(tokenizer):
    messages = [
        {"role": "system", "content": [_part("Be brief. "), _part(f"\n {DOCUMENT} \n", span=True)]},
        {"role": "user", "content": "Who opens it?"},
    ]
    prompt, spans = _texts(tokenizer, messages)
    assert spans == [DOCUMENT]
    assert prompt == _stock(tokenizer, messages)


def test_without_marks_there_are_no_spans(tokenizer):
    messages = [{"role": "user", "content": [_part(DOCUMENT)]}]
    assert _texts(tokenizer, messages) == (_stock(tokenizer, messages), [])


def test_the_policy_makes_every_text_and_tool_a_span_but_a_final_assistants(tokenizer):
    messages = [
        {"role": "system", "content": DOCUMENT},
        {"role": "user", "content": [_part(TEXTS[0])]},
        {"role": "assistant", "content": "The keeper opens the gate"},
    ]
    prompt, spans = _texts(tokenizer, messages, [TOOL], every_message=True)
    assert spans == [json.dumps(TOOL), DOCUMENT, TEXTS[0]]
    assert prompt == _stock(tokenizer, messages, [TOOL])


def test_a_tool_printed_as_json_is_a_span_from_brace_to_brace(tokenizer):
    plain = {**TOOL, "function": {**TOOL["function"], "name": "close_gate"}}
    for tools in ([TOOL | {"cache_control": EPHEMERAL}, plain], [plain, _marked_inside()]):
        prompt, (span,) = _texts(tokenizer, [{"role": "user", "content": "Go."}], tools)
        shown = json.loads(span)
        assert shown["function"]["name"] == "open_gate"
        assert prompt == _stock(tokenizer, [{"role": "user", "content": "Go."}], tools)


def _marked_inside() -> dict[str, object]:
    return {**TOOL, "function": {**TOOL["function"], "cache_control": EPHEMERAL}}


def test_a_tool_in_a_form_of_its_own_is_a_span_from_its_first_text_to_its_last():
    tokenizer = byte_level(bos=False, template=FORM_TEMPLATE)
    messages = [{"role": "user", "content": "Go."}]
    tools = [TOOL | {"cache_control": EPHEMERAL}]
    prompt, spans = _texts(tokenizer, messages, tools)
    assert spans == [
        "Opens the gate {of the keeper}.\ntype open_gate = (when: string, // The hour."
    ]
    assert prompt == _stock(tokenizer, messages, tools)


def test_a_definition_is_found_whatever_stands_before_its_name():
    tokenizer = byte_level(bos=True, template=JSON_TEMPLATE)
    properties = {f"p{i}": {"type": "object", "x": {"{": "}"}} for i in range(40)}
    for description in ('Takes {"a": {}} and {}.', "{" * 100, '"}]}', "{}"):
        function = {
            "description": description,
            "parameters": {"type": "object", "properties": properties},
            "name": "open_gate",
        }
        tools = [{"type": "function", "function": function, "cache_control": EPHEMERAL}]
        _, (span,) = _texts(tokenizer, [{"role": "user", "content": "Go."}], tools)
        assert json.loads(span) == tools[0]


def test_an_unmarked_tool_between_marked_ones_is_in_no_span():
    template = (
        "{% for t in tools %}{{ t.function.description }}:{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = byte_level(bos=True, template=template)
    tools = [
        {"function": {"name": f"n{i}", "description": f"The gate opens at {i}."}} for i in range(3)
    ]
    tools[0]["cache_control"] = tools[2]["cache_control"] = EPHEMERAL
    _, spans = _texts(tokenizer, [{"role": "user", "content": "Go."}], tools)
    assert spans == ["The gate opens at 0.:n0", "The gate opens at 2.:n2"]


def test_halves_of_two_texts_are_no_span():
    template = (
        "{% for m in messages %}{{ m.content.split('|')[0] if loop.first else "
        "m.content.split('|')[1] }}{% endfor %}"
    )
    tokenizer = byte_level(bos=True, template=template)
    messages = [{"role": "user", "content": f"{TEXTS[0]}|{TEXTS[1]}"} for _ in range(2)]
    prompt, spans = _texts(tokenizer, messages, every_message=True)
    assert (prompt, spans) == (TEXTS[0] + TEXTS[1], [])


def test_a_template_that_looks_at_how_a_text_begins_is_found_out():
    template = (
        "{% for m in messages %}{{ 'T' if m.content.startswith('<result>') else 'U' }}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = byte_level(bos=False, template=template)
    messages = [{"role": "user", "content": "<result>" + DOCUMENT}]
    with pytest.raises(TemplateError, match="differently when it is marked"):
        render(tokenizer, messages, page_tokens=4, every_message=True)


def test_a_template_that_fails_on_marks_is_found_out_and_one_that_fails_anyway_says_why():
    template = "{% for m in messages %}{{ m.content | int + 1 / (m.content | int) }}{% endfor %}"
    tokenizer = byte_level(bos=False, template=template)
    with pytest.raises(TemplateError, match="fails on a marked text"):
        render(tokenizer, [{"role": "user", "content": "1234"}], every_message=True)
    with pytest.raises(ZeroDivisionError):
        render(tokenizer, [{"role": "user", "content": "0"}], every_message=True)


@pytest.mark.parametrize("control", ["ephemeral", {"type": "forever"}, {}, True])
def test_a_malformed_mark_is_named(tokenizer, control):
    part = {"type": "text", "text": DOCUMENT, "cache_control": control}
    with pytest.raises(ValueError, match=r"messages\[1\].content\[0\].cache_control must be"):
        render(tokenizer, [{"role": "system", "content": "x"}, {"role": "user", "content": [part]}])


HOSTILE = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        [
            "</s><s>system\n",
            "\u200b\u2060\ufeff",
            "<bos>",
            "{{ messages }}",
            "{% raw %}",
            "\0",
            '"}]',
        ],
    ),
    st.builds(lambda: Marks.drawn().nonce + "o0z"),
    st.builds(lambda: Marks.drawn().around("x", 0)),
    st.just("tsr" + "0" * 32 + "c0z"),
)


@settings(max_examples=150, deadline=None)
@given(before=HOSTILE, inside=HOSTILE, after=HOSTILE)
def test_no_text_forges_or_breaks_an_edge(tokenizer, before, inside, after):
    span = f"{DOCUMENT}{inside}{DOCUMENT}"
    messages = [
        {"role": "user", "content": [_part(before), _part(span, span=True), _part(after)]},
        {"role": "user", "content": after + before},
    ]
    ids, spans = render(tokenizer, messages, page_tokens=4)
    ((start, end),) = spans
    assert ids[start:end] == tokenizer.encode(span.strip(), add_special_tokens=False)
    stock = _stock(tokenizer, messages)
    place = stock.index(span.strip())
    assert ids[:start] == tokenizer.encode(stock[:place], add_special_tokens=False)


def test_a_megabyte_keeps_its_edges(tokenizer):
    document = (DOCUMENT + "\n") * (1_000_000 // len(DOCUMENT))
    messages = [{"role": "user", "content": [_part("x"), _part(document, span=True), _part("y")]}]
    ids, ((start, end),) = render(tokenizer, messages)
    assert tokenizer.decode(ids[start:end]) == document.strip()
