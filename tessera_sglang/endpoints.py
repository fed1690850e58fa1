"""Spans in what people send: text offsets, and ``cache_control`` of the chat endpoints.

Everything ends in the same two fields, ``input_ids`` and ``custom_params.tessera.spans``. A chat request
is marked, rendered by SGLang's own code and cut at the marks; a text is cut at its offsets.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from . import chat_prompt, ignored
from .compat import attention_backends
from .config import BACKEND, MAX_SPANS, Config, load
from .text import offsets
from .text.messages import (
    Weaving,
    declared_tools,
    get,
    is_declared,
    mark_chat,
    mark_parts,
    put,
)
from .text.pieces import Encoded, encode

logger = logging.getLogger(__name__)

HINT = (
    "tessera_hint"  # in custom_params: spans that may be dropped, since nobody gave their offsets
)

_CARRIED = "tessera_weaving"  # in the state of an HTTP request: it is marked already (Anthropic)
_BODY = "tessera_body"  # likewise: the JSON that the caller sent, when it has marks


@dataclass(slots=True)
class _Rendering:
    """A chat request on its way through the template."""

    weaving: Weaving
    seen: bool = False
    found: Encoded | None = None


_current: ContextVar[_Rendering | None] = ContextVar("tessera_rendering", default=None)


def selected() -> bool:
    """Whether this server runs Tessera."""
    return BACKEND in attention_backends()


def active() -> bool:
    """Whether it reads spans."""
    return selected() and load().index == "content"


# --- the body that the caller sent ---------------------------------------------------------------


async def chat_arrives(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    """Around ``OpenAIServingChat.handle_request``: keep what the parsed request has dropped."""
    if active():
        setattr(raw_request.state, _BODY, await _marked_body(raw_request))
    return await original(serving, request, raw_request)


async def messages_arrive(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    """Around ``AnthropicServing.handle_messages``: mark the blocks before they are converted."""
    if active() and (body := await _marked_body(raw_request)) is not None:
        try:
            weaving = _mark_blocks(request, body)
        except ValueError as error:
            return serving._error_response(
                status_code=400, error_type="invalid_request_error", message=str(error)
            )
        setattr(raw_request.state, _CARRIED, weaving)
    return await original(serving, request, raw_request)


async def _marked_body(raw_request: Any) -> Any:
    """The JSON of a request, or None where nobody marked anything."""
    body = await raw_request.body()
    return json.loads(body) if b"cache_control" in body else None


def _mark_blocks(request: Any, body: Any) -> Weaving:
    """Marks in a parsed Anthropic request, where its body has ``cache_control``."""
    weaving = Weaving(tool_names=declared_tools(body.get("tools")))
    if isinstance(request.system, list):
        mark_parts(weaving, request.system, _list(body.get("system")), "system")
    raw_messages = _list(body.get("messages"))
    for number, message in enumerate(request.messages):
        if not isinstance(message.content, list) or number >= len(raw_messages):
            continue
        where = f"messages[{number}].content"
        raw = _list(get(raw_messages[number], "content"))
        last = number == len(request.messages) - 1
        if last and message.role == "assistant":
            continue
        mark_parts(weaving, message.content, raw, where)
        for place, block in enumerate(message.content):
            if get(block, "type") == "tool_result" and place < len(raw):
                _mark_result(weaving, block, raw[place], f"{where}[{place}]")
    return weaving


def _mark_result(weaving: Weaving, block: Any, raw: Any, where: str) -> None:
    """A tool's result: its text, or the texts in it."""
    whole = is_declared(raw, where)
    if isinstance(block.content, str):
        if whole:
            weaving.around(block, "content")
    elif isinstance(block.content, list):
        inner = _list(get(raw, "content"))
        mark_parts(weaving, block.content, inner, f"{where}.content", every_part=whole)


# --- through the template ------------------------------------------------------------------------


def convert(
    original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    """Around ``OpenAIServingChat._convert_to_internal_request``: mark, render, add the spans."""
    if not active():
        return original(serving, request, raw_request)
    rendering = _Rendering(_weave(request, raw_request, load()))
    if not rendering.weaving:
        return original(serving, request, raw_request)
    token = _current.set(rendering)
    try:
        adapted, processed = original(serving, request, raw_request)
    finally:
        _current.reset(token)
        _unmark(rendering.weaving, request)
    if not rendering.seen:
        ignored.count(
            serving.tokenizer_manager, "encoder", "the model's chat encoder has no template"
        )
        return original(serving, request, raw_request)
    if rendering.found is not None and rendering.found.spans:
        if isinstance(adapted.input_ids, list):
            _declare(adapted, _longest(rendering.found.spans))
        else:
            ignored.count(serving.tokenizer_manager, "text", "the engine takes this prompt as text")
    return adapted, processed


def render(
    original: Callable[..., Any], serving: Any, messages: Sequence[Any], **options: Any
) -> Any:
    """Around ``OpenAIServingChat._render_and_encode_chat_template``."""
    rendering = _current.get()
    if rendering is None:
        return original(serving, messages, **options)
    rendering.seen = True
    marks = rendering.weaving.marks
    manager = serving.tokenizer_manager
    if serving._prompt_text_round_trip_is_lossy:
        ignored.count(manager, "tokenizer", "it writes control tokens that have no text")
    else:
        try:
            return _cut_and_encode(rendering, serving, messages, **options)
        except chat_prompt.TemplateError as error:
            ignored.count(manager, "template", str(error))
    rendering.found = None
    return original(serving, [chat_prompt.unmarked(m, marks) for m in messages], **options)


def _cut_and_encode(
    rendering: _Rendering,
    serving: Any,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None,
    template_kwargs: dict[str, Any],
    encode_kwargs: dict[str, Any],
    use_cache: bool,
    add_generation_prompt: bool = True,
) -> tuple[list[int], str | None]:
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

    found = encode(
        manager.tokenizer,
        chat_prompt.cut(rendering.weaving, messages, tools, text_of),
        page_tokens=manager.config_value("page_size"),
        special_tokens=bool(encode_kwargs.get("add_special_tokens", False)),
    )
    rendering.found = found
    return found.input_ids, manager.tokenizer.decode(found.input_ids) if use_cache else None


def _weave(request: Any, raw_request: Any, config: Config) -> Weaving:
    state = getattr(raw_request, "state", None)
    weaving: Weaving | None = getattr(state, _CARRIED, None)
    body = getattr(state, _BODY, None)
    every = config.span_policy == "messages"
    given = isinstance(request.custom_params, dict) and isinstance(
        request.custom_params.get("tessera"), dict
    )
    offsets_given = given and "spans" in request.custom_params["tessera"]
    if request.input_ids is not None or offsets_given:
        if body is not None and offsets_given:
            raise ValueError(
                "custom_params.tessera.spans and cache_control declare spans in two ways; "
                "leave one of them out"
            )
        return weaving or Weaving()
    raw_messages = _list(get(body, "messages"))
    if weaving is None:
        weaving = Weaving(tool_names=declared_tools(get(body, "tools")))
        if body is not None or every:
            mark_chat(weaving, request.messages, raw_messages, every_message=every)
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
        for part in content if isinstance(content, list) else ():
            if isinstance(get(part, "text"), str):
                part.text = weaving.marks.remove(part.text)


def _declare(adapted: Any, spans: list[list[int]]) -> None:
    params = adapted.sampling_params
    custom = dict(params.get("custom_params") or {})
    custom["tessera"] = {**(custom.get("tessera") or {}), "spans": spans}
    custom[HINT] = True
    adapted.sampling_params = {**params, "custom_params": custom}


def drop_hint(params: Any) -> bool:
    """Take spans out of sampling parameters, if they are a hint; whether they were."""
    custom = get(params, "custom_params")
    if not isinstance(custom, dict) or HINT not in custom:
        return False
    kept = {key: value for key, value in custom.items() if key not in ("tessera", HINT)}
    put(params, "custom_params", kept or None)
    return True


def _longest(spans: list[list[int]]) -> list[list[int]]:
    """At most as many as a request may declare."""
    if len(spans) <= MAX_SPANS:
        return spans
    return sorted(sorted(spans, key=lambda span: span[0] - span[1])[:MAX_SPANS])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --- texts ---------------------------------------------------------------------------------------


async def tokenize(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any) -> Any:
    """Around ``TokenizerManager._tokenize_one_request``: cut a text at its declared offsets."""
    raw = _declared_offsets(obj)
    if raw is not None and selected():
        if active():
            _encode_text(manager, obj, raw)
        else:
            _put_declaration(obj, None)  # SGLang's tree: spans are ordinary text
    return await original(manager, obj)


def tokenize_in_batches(original: Callable[..., Any], manager: Any, size: int, batch: Any) -> Any:
    """Around ``TokenizerManager._should_use_batch_tokenization``: one by one where offsets are given."""
    if any(_declared_offsets(batch[number]) is not None for number in range(size)) and active():
        return False
    return original(manager, size, batch)


def _declared_offsets(obj: Any) -> Any:
    params = getattr(obj, "sampling_params", None)
    return offsets.text_spans(params.get("custom_params")) if isinstance(params, dict) else None


def _encode_text(manager: Any, obj: Any, raw: Any) -> None:
    tessera = obj.sampling_params["custom_params"]["tessera"]
    if "spans" in tessera:
        raise ValueError(
            f"{offsets.FIELD} and custom_params.tessera.spans declare spans in two ways; "
            "leave one of them out"
        )
    if not isinstance(obj.text, str) or obj.input_ids is not None or manager.tokenizer is None:
        raise ValueError(
            f"{offsets.FIELD} are offsets into 'text', which this request has not or this server can "
            "not tokenise; give 'text', or token offsets in custom_params.tessera.spans"
        )
    found = encode(
        manager.tokenizer,
        offsets.cut(obj.text, raw),
        page_tokens=manager.config_value("page_size"),
        special_tokens=True,
    )
    obj.input_ids = found.input_ids
    declared = {key: value for key, value in tessera.items() if key != "text_spans"}
    _put_declaration(obj, {**declared, "spans": found.spans} if found.spans else None)


def _put_declaration(obj: Any, tessera: dict[str, Any] | None) -> None:
    """Replace ``custom_params.tessera``. In copies: samples and batches share these dicts."""
    params = obj.sampling_params
    custom = {key: value for key, value in params["custom_params"].items() if key != "tessera"}
    if tessera is not None:
        custom["tessera"] = tessera
    obj.sampling_params = {**params, "custom_params": custom or None}
