"""``cache_control`` of Anthropic's messages endpoint.

SGLang converts such a request into one of the OpenAI kind and joins texts on the way, so marks are put
into its blocks before that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tessera_sglang.text.messages import (
    Weaving,
    as_list,
    declared_tools,
    get,
    is_declared,
    mark_parts,
)

from .bodies import keep_body, keep_weaving, marked_body


async def messages_arrive(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    """Around ``AnthropicServing.handle_messages``."""
    body = await marked_body(raw_request, serving.openai_serving_chat.tokenizer_manager)
    if body is not None:
        try:
            keep_weaving(raw_request, _mark(request, body))
        except ValueError as error:
            return serving._error_response(
                status_code=400, error_type="invalid_request_error", message=str(error)
            )
        keep_body(raw_request, body)
    return await original(serving, request, raw_request)


def _mark(request: Any, body: Any) -> Weaving:
    """Marks in a parsed request, where its body has ``cache_control``."""
    weaving = Weaving(tool_names=declared_tools(get(body, "tools")))
    if isinstance(request.system, list):
        mark_parts(weaving, request.system, as_list(get(body, "system")), "system")
    raw_messages = as_list(get(body, "messages"))
    for number, (message, raw) in enumerate(zip(request.messages, raw_messages, strict=False)):
        if not isinstance(message.content, list):
            continue
        if number == len(request.messages) - 1 and message.role == "assistant":
            continue  # a server may go on from it, which templates do not see
        where = f"messages[{number}].content"
        raw_content = as_list(get(raw, "content"))
        mark_parts(weaving, message.content, raw_content, where)
        for place, (block, raw_block) in enumerate(zip(message.content, raw_content, strict=False)):
            if get(block, "type") == "tool_result":
                _mark_result(weaving, block, raw_block, f"{where}[{place}]")
    return weaving


def _mark_result(weaving: Weaving, block: Any, raw: Any, where: str) -> None:
    """A tool's result: its text, or the texts in it."""
    whole = is_declared(raw, where)
    if isinstance(block.content, str):
        if whole:
            weaving.around(block, "content")
    elif isinstance(block.content, list):
        inner = as_list(get(raw, "content"))
        mark_parts(weaving, block.content, inner, f"{where}.content", every_part=whole)
