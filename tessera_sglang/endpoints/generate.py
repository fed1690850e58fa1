"""``text_spans``: spans of a prompt that arrives as text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tessera_sglang import spans
from tessera_sglang.config import PAGE_TOKENS
from tessera_sglang.text import offsets
from tessera_sglang.text.pieces import CutError, encode

from .bodies import active, selected


async def tokenize(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any) -> Any:
    """Around ``TokenizerManager._tokenize_one_request``: cut a text at its declared offsets."""
    raw = _declared(obj)
    if raw is not None and selected():
        if active():
            _encode(manager, obj, raw)
        else:
            _declare(obj, None)  # SGLang's tree: spans are ordinary text
    return await original(manager, obj)


def tokenize_in_batches(original: Callable[..., Any], manager: Any, size: int, batch: Any) -> Any:
    """Around ``TokenizerManager._should_use_batch_tokenization``: one by one where offsets are given."""
    if selected() and any(_declared(batch[number]) is not None for number in range(size)):
        return False
    return original(manager, size, batch)


def _declared(obj: Any) -> Any:
    params = getattr(obj, "sampling_params", None)
    return offsets.text_spans(params.get("custom_params")) if isinstance(params, dict) else None


def _encode(manager: Any, obj: Any, raw: Any) -> None:
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
    try:
        found = encode(
            manager.tokenizer,
            offsets.cut(obj.text, raw),
            page_tokens=manager.config_value("page_size"),
            special_tokens=True,
        )
    except CutError as error:
        raise ValueError(
            f"{offsets.FIELD}: {error}; give token offsets in custom_params.tessera.spans"
        ) from error
    obj.input_ids = found.input_ids
    declared = {key: value for key, value in tessera.items() if key != "text_spans"}
    spans.check_settings(
        {"tessera": declared},
        page_size=manager.config_value("page_size"),
        vocab_size=manager.model_config.vocab_size,
    )
    kept = _before(getattr(obj, "logprob_start_len", None), found.spans)
    _declare(obj, {**declared, "spans": kept} if kept else None)


def _before(start: int | None, found: list[list[int]]) -> list[list[int]]:
    """Spans without the last tokens of the last one, where log-probabilities of these are asked for.

    SGLang's ``select`` asks for those of the last two tokens before a choice, which may be a span's.
    More than a page is not taken away: that is a contradiction, and is refused as one.
    """
    if not found or start is None or not found[-1][1] - PAGE_TOKENS <= start < found[-1][1]:
        return found
    *others, last = found
    return [*others, [last[0], start]] if start > last[0] else others


def _declare(obj: Any, tessera: dict[str, Any] | None) -> None:
    """Replace ``custom_params.tessera``. In copies: samples and batches share these dicts."""
    params = obj.sampling_params
    custom = {key: value for key, value in params["custom_params"].items() if key != "tessera"}
    if tessera is not None:
        custom["tessera"] = tessera
    obj.sampling_params = {**params, "custom_params": custom or None}
