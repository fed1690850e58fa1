"""``custom_params.tessera.spans``: what a request may declare, and what it may not.

Used where a request enters (an HTTP 400 before anything is queued) and again by the scheduler, which
trusts nobody. Knows nothing of the engine.
"""

from __future__ import annotations

from typing import Any

from tessera_sglang.attention.layout import Span

from .config import MAX_SPANS

FIELD = "custom_params.tessera.spans"

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


def declared(custom_params: Any) -> Any:
    """The raw ``spans`` of a request, or None when it declares none.

    Raises:
        SpanError: ``tessera`` is not an object, or holds anything but ``spans``.
    """
    if not isinstance(custom_params, dict) or custom_params.get("tessera") is None:
        return None
    tessera = custom_params["tessera"]
    if not isinstance(tessera, dict):
        raise SpanError(
            f'custom_params.tessera must be an object such as {{"spans": [[0, 128]]}}, '
            f"got {_shown(tessera)}"
        )
    if "spans" not in tessera:
        raise SpanError(
            f"custom_params.tessera has no 'spans', got {_shown(tessera)}; give a list of pairs, "
            "or leave tessera out"
        )
    unknown = sorted(str(key) for key in tessera if key != "spans")
    if unknown:
        raise SpanError(
            f"custom_params.tessera: unknown key {unknown[0]!r}; the only key is 'spans'"
        )
    return tessera.get("spans")


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


def check_request(req: Any, prompt_tokens: int, refusal: str | None) -> None:
    """Raise SpanError for a request whose other wishes spans can not meet.

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
    start = getattr(req, "logprob_start_len", None)
    inside = start is not None and 0 <= start < prompt_tokens
    if req.return_logprob and inside:
        raise SpanError(
            "input log-probabilities (logprob_start_len) can not be combined with "
            f"{FIELD}; leave logprob_start_len out to get those of the output"
        )


def _param(req: Any, name: str) -> Any:
    params = req.sampling_params
    return params.get(name) if isinstance(params, dict) else getattr(params, name, None)


def _parse_entry(where: str, entry: Any, prompt_tokens: int) -> Span:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise SpanError(f"{where} must be a pair [start, end], got {_shown(entry)}")
    for name, value in zip(("start", "end"), entry, strict=True):
        # bool is an int in Python, and a JSON true is not an offset
        if isinstance(value, bool) or not isinstance(value, int):
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
