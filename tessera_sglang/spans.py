"""``custom_params.tessera``: what a request may declare, and what it may not.

Used where a request enters (an HTTP 400 before anything is queued) and again by the scheduler, which
trusts nobody. Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera_sglang.attention.layout import Span

from .config import MAX_SPANS

OBJECT = "custom_params.tessera"
FIELD = f"{OBJECT}.spans"
_KEYS = ("spans", "link_pages", "root")
_TEXT_SPANS = "text_spans"  # offsets into `text`, turned into spans where the text is tokenised

# Fields that spans can not meet: the prompt is more than token ids, or its tokens are answered for,
# or read by somebody else, in their order.
_WISHES = (
    "session_id",
    "input_embeds",
    "positional_embed_overrides",
    "image_data",
    "video_data",
    "audio_data",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "token_type_ids",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
    "custom_logit_processor",
)


class SpanError(ValueError):
    """The declaration is malformed or can not be served; the message says what, where and why."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Settings of the server that a request replaces for itself; None keeps the server's."""

    link_pages: int | None = None
    root: str | tuple[int, ...] | None = None  # "auto", "none", or token ids: whole pages


def declared(custom_params: Any) -> Any:
    """The raw ``spans`` of a request, or None when it declares none.

    Raises:
        SpanError: ``tessera`` is not an object, lacks ``spans``, or has an unknown key.
    """
    tessera = _object(custom_params)
    if tessera is None:
        return None
    _check_keys({key: value for key, value in tessera.items() if key != _TEXT_SPANS})
    if _TEXT_SPANS in tessera:
        raise SpanError(
            f"{OBJECT} has 'text_spans' and 'spans'; give one of them"
            if "spans" in tessera
            else f"{OBJECT}.text_spans needs the prompt as `text`; give 'spans', in token offsets, "
            "with input_ids"
        )
    if "spans" not in tessera:
        raise SpanError(
            f"{OBJECT} has no 'spans', got {_shown(tessera)}; give a list of pairs "
            "(or 'text_spans', with a prompt of text), or leave tessera out"
        )
    return tessera["spans"]


def only_settings(custom_params: Any) -> bool:
    """Whether ``tessera`` has settings and leaves it to marks in the texts to declare spans.

    Raises:
        SpanError: ``tessera`` is not an object.
    """
    tessera = _object(custom_params)
    return tessera is not None and "spans" not in tessera and _TEXT_SPANS not in tessera


def check_settings(custom_params: Any, *, page_size: int, vocab_size: int) -> None:
    """Of a request whose spans are not found yet, or are none: unknown keys, and :func:`overrides`.

    Raises:
        SpanError: naming the key.
    """
    _check_keys(_object(custom_params) or {})
    overrides(custom_params, page_size=page_size, vocab_size=vocab_size)


def overrides(custom_params: Any, *, page_size: int, vocab_size: int) -> Overrides:
    """What a request replaces of the server's settings. ``page_size`` in tokens.

    Raises:
        SpanError: ``link_pages`` or ``root`` can not be used.
    """
    tessera = _object(custom_params) or {}
    link_pages = tessera.get("link_pages")
    if link_pages is not None and (not _is_int(link_pages) or link_pages < 0):
        raise SpanError(
            f"{OBJECT}.link_pages must be a whole number from 0 on, got {_shown(link_pages)}; "
            "leave it out for the server's"
        )
    root = tessera.get("root")
    if root is not None and root not in ("auto", "none"):
        root = _checked_root(root, page_size, vocab_size)
    return Overrides(link_pages, root)


def _check_keys(tessera: dict[Any, Any]) -> None:
    unknown = sorted(str(key) for key in tessera if key not in _KEYS)
    if unknown:
        known = ", ".join(map(repr, (*_KEYS[:1], _TEXT_SPANS, *_KEYS[1:])))
        raise SpanError(f"{OBJECT}: unknown key {unknown[0]!r}; remove it. Known keys: {known}")


def _object(custom_params: Any) -> dict[Any, Any] | None:
    if not isinstance(custom_params, dict) or custom_params.get("tessera") is None:
        return None
    tessera = custom_params["tessera"]
    if not isinstance(tessera, dict):
        raise SpanError(
            f'{OBJECT} must be an object such as {{"spans": [[0, 128]]}}, got {_shown(tessera)}'
        )
    return tessera


def _checked_root(root: Any, page_size: int, vocab_size: int) -> tuple[int, ...]:
    where = f"{OBJECT}.root"
    if not isinstance(root, list | tuple):
        raise SpanError(
            f'{where} must be "auto", "none" or a list of token ids, got {_shown(root)}'
        )
    if len(root) % page_size or not root:
        raise SpanError(
            f"{where} has {len(root)} token ids, but it must be whole pages of {page_size}; add or "
            'remove ids, or give "none" for no root'
        )
    for number, token in enumerate(root):
        if not _is_int(token) or not 0 <= token < vocab_size:
            raise SpanError(
                f"{where}[{number}] must be a token id below {vocab_size}, got {_shown(token)}"
            )
    return tuple(root)


def parse(raw: Any, prompt_tokens: int) -> tuple[Span, ...]:
    """Spans of a prompt, checked: integers, half-open, ascending, disjoint, inside the prompt.

    Raises:
        SpanError: naming the offending entry.
    """
    if raw is None:
        return ()
    if not isinstance(raw, list | tuple):
        raise SpanError(f"{FIELD} must be a list of [start, end] pairs, got {_shown(raw)}")
    if len(raw) > MAX_SPANS:
        raise SpanError(
            f"{FIELD}[{MAX_SPANS}]: {len(raw)} spans, but a request may declare at most {MAX_SPANS}"
        )
    spans: list[Span] = []
    for number, entry in enumerate(raw):
        spans.append(_parse_entry(f"{FIELD}[{number}]", entry, prompt_tokens))
        if number and spans[number].start < spans[number - 1].end:
            previous = spans[number - 1]
            raise SpanError(
                f"{FIELD}[{number}] starts at {spans[number].start}, before "
                f"{FIELD}[{number - 1}] = [{previous.start}, {previous.end}] ends; "
                "spans must be ascending and must not overlap"
            )
    return tuple(spans)


def check_request(req: Any, spans: Sequence[Span], refusal: str | None) -> None:
    """Raise SpanError for a request whose other wishes its spans can not meet.

    ``req`` is SGLang's ``Req`` or its ``GenerateReqInput``; only what both have is looked at.
    """
    if refusal is not None:
        raise SpanError(f"this server serves no spans: {refusal}")
    wishes = {
        "session_params": getattr(req, "session", None) or getattr(req, "session_params", None),
        "multimodal inputs": getattr(req, "multimodal_inputs", None),
        "watermark": _param(req, "watermark"),
        "beam_width": (_param(req, "beam_width") or 1) > 1,
        **{name: getattr(req, name, None) for name in _WISHES},
    }
    for name, value in wishes.items():
        if value:
            raise SpanError(f"{name} can not be combined with {FIELD}; drop one of them")
    if req.return_logprob:
        _check_input_logprobs(getattr(req, "logprob_start_len", None), spans)


def _check_input_logprobs(start: int | None, spans: Sequence[Span]) -> None:
    """SGLang slices input log-probabilities out of the row, which has the prompt's order only from
    the end of the last span on."""
    end = spans[-1].end if spans else 0
    if start is None or start == -1 or start >= end:
        return
    raise SpanError(
        f"logprob_start_len = {start} is before the end of the last of {FIELD}, {end}; input "
        f"log-probabilities start at {end} or later: raise logprob_start_len, end the span there, or "
        "leave logprob_start_len out to get those of the output"
    )


def _param(req: Any, name: str) -> Any:
    params = req.sampling_params
    return params.get(name) if isinstance(params, dict) else getattr(params, name, None)


def _parse_entry(where: str, entry: Any, prompt_tokens: int) -> Span:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise SpanError(f"{where} must be a pair [start, end], got {_shown(entry)}")
    for name, value in zip(("start", "end"), entry, strict=True):
        if not _is_int(value):
            raise SpanError(f"{where}: {name} must be an integer, got {_shown(value)}")
    start, end = entry
    if start < 0:
        raise SpanError(f"{where} = [{start}, {end}]: start must not be negative")
    if end <= start:
        raise SpanError(f"{where} = [{start}, {end}]: end must be greater than start")
    if end > prompt_tokens:
        raise SpanError(
            f"{where} = [{start}, {end}] ends past the prompt, which has {prompt_tokens} tokens"
        )
    return Span(start, end)


def _is_int(value: Any) -> bool:
    # bool is an int in Python, and a JSON true is not a number
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
