"""``cache_control`` of OpenAI's chat endpoint, and of every endpoint that ends in it.

A request is marked, rendered by SGLang's own code, and cut at the marks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tessera_sglang import chat_prompt, hints, ignored, spans
from tessera_sglang.config import MAX_SPANS, load
from tessera_sglang.text.messages import Weaving, as_list, declared_tools, get, mark_chat
from tessera_sglang.text.pieces import CutError, Encoded, encode

from .bodies import active, body_of, has_mark, keep_body, marked_body, weaving_of


@dataclass(slots=True)
class _Rendering:
    """A chat request on its way through the template."""

    weaving: Weaving
    seen: bool = False
    found: Encoded | None = None


_current: ContextVar[_Rendering | None] = ContextVar("tessera_rendering", default=None)


async def chat_arrives(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    """Around ``OpenAIServingChat.handle_request``: keep what the parsed request has dropped."""
    body = await marked_body(raw_request, serving.tokenizer_manager)
    if body is not None:
        keep_body(raw_request, body)
    return await original(serving, request, raw_request)


def convert(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    """Around ``OpenAIServingChat._convert_to_internal_request``: mark, render, add the spans."""
    if not active():
        return original(serving, request, raw_request)
    manager = serving.tokenizer_manager
    own = _settings(request, manager)
    body = body_of(raw_request)
    rendering = _Rendering(_weave(request, body, weaving_of(raw_request)))
    if body is not None and not rendering.weaving and has_mark(body):
        ignored.count(manager, "place", "only texts and tools can be marked")
    adapted, processed = _render_marked(original, serving, request, raw_request, rendering)
    found = rendering.found.spans if rendering.found is not None else []
    if found and not isinstance(adapted.input_ids, list):
        ignored.count(manager, "text", "the engine takes this prompt as text")
        found = []
    if found or own is not None:
        _declare(adapted, own or {}, _longest(found))
    return adapted, processed


def render(
    original: Callable[..., Any], serving: Any, messages: Sequence[Any], **options: Any
) -> Any:
    """Around ``OpenAIServingChat._render_and_encode_chat_template``."""
    rendering = _current.get()
    if rendering is None:
        return original(serving, messages, **options)
    rendering.seen, rendering.found = True, None
    manager = serving.tokenizer_manager
    if serving._prompt_text_round_trip_is_lossy:
        ignored.count(manager, "tokenizer", "it writes control tokens that have no text")
    else:
        try:
            rendering.found = _cut_and_encode(rendering.weaving, serving, messages, **options)
        except chat_prompt.TemplateError as error:
            ignored.count(manager, "template", str(error))
        except CutError as error:
            ignored.count(manager, "tokenizer", str(error))
    if rendering.found is None:
        marks = rendering.weaving.marks
        plain = [chat_prompt.unmarked(message, marks) for message in messages]
        return original(serving, plain, **options)
    ids = rendering.found.input_ids
    return ids, manager.tokenizer.decode(ids) if options.get("use_cache") else None


def _render_marked(
    original: Callable[..., Any],
    serving: Any,
    request: Any,
    raw_request: Any,
    rendering: _Rendering,
) -> Any:
    """SGLang's conversion of a request with marks in it, which are gone afterwards."""
    if not rendering.weaving:
        return original(serving, request, raw_request)
    token = _current.set(rendering)
    try:
        converted = original(serving, request, raw_request)
    finally:
        _current.reset(token)
        _unmark(rendering.weaving, request)
    if rendering.seen:
        return converted
    ignored.count(serving.tokenizer_manager, "encoder", "the prompt is not made by a chat template")
    return original(serving, request, raw_request)


def _cut_and_encode(
    weaving: Weaving,
    serving: Any,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None,
    template_kwargs: dict[str, Any],
    encode_kwargs: dict[str, Any],
    use_cache: bool,
    add_generation_prompt: bool = True,
) -> Encoded:
    manager = serving.tokenizer_manager

    def text_of(messages: Sequence[Any], tools: Sequence[Any] | None) -> str:
        return str(
            manager.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                return_dict=False,
                **template_kwargs,
            )
        )

    return encode(
        manager.tokenizer,
        chat_prompt.cut(weaving, messages, tools, text_of),
        page_tokens=manager.config_value("page_size"),
        special_tokens=bool(encode_kwargs.get("add_special_tokens", False)),
    )


def _settings(request: Any, manager: Any) -> dict[str, Any] | None:
    """What ``custom_params.tessera`` of a chat sets beside its marks, checked; None without any.

    Raises:
        SpanError: it can not be used.
    """
    custom = request.custom_params
    if not spans.only_settings(custom):
        return None
    spans.check_settings(
        custom,
        page_size=manager.config_value("page_size"),
        vocab_size=manager.model_config.vocab_size,
    )
    own: dict[str, Any] = custom["tessera"]
    return own


def _weave(request: Any, body: Any, weaving: Weaving | None) -> Weaving:
    """Marks around the request's texts; ``weaving`` has those that are there already."""
    every = load().span_policy == "messages"
    tessera = get(request.custom_params, "tessera") if request.custom_params else None
    if isinstance(tessera, dict) and ("spans" in tessera or "text_spans" in tessera):
        if has_mark(body):
            raise ValueError(
                "custom_params.tessera.spans and cache_control declare spans in two ways; "
                "leave one of them out"
            )
        return weaving or Weaving()
    if request.input_ids is not None:
        return weaving or Weaving()
    if weaving is None:
        weaving = Weaving(tool_names=declared_tools(get(body, "tools")))
        if body is not None or every:
            raw = as_list(get(body, "messages"))
            mark_chat(weaving, request.messages, raw, every_message=every)
    elif every:
        mark_chat(weaving, request.messages, [], every_message=True)
    if every and request.tools:
        weaving.tool_names = None
    return weaving


def _unmark(weaving: Weaving, request: Any) -> None:
    weaving.undo()
    for message in request.messages:  # an Anthropic request was marked before it became this one
        content = get(message, "content")
        if isinstance(content, str):
            message.content = weaving.marks.remove(content)
        for part in as_list(content):
            if isinstance(get(part, "text"), str):
                part.text = weaving.marks.remove(part.text)


def _declare(adapted: Any, own: dict[str, Any], found: list[list[int]]) -> None:
    params = adapted.sampling_params
    custom = {k: v for k, v in (params.get("custom_params") or {}).items() if k != "tessera"}
    if found:
        custom = hints.put({**custom, "tessera": {**own, "spans": found}})
    adapted.sampling_params = {**params, "custom_params": custom or None}


def _longest(found: list[list[int]]) -> list[list[int]]:
    """At most as many as a request may declare."""
    if len(found) <= MAX_SPANS:
        return found
    return sorted(sorted(found, key=lambda span: span[0] - span[1])[:MAX_SPANS])
