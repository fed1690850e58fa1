"""Spans for those who write prompts: ``span(text)``.

``span`` returns a ``str`` that remembers what of it was declared, through ``+`` and slices. In an SGLang
program write ``s += span(document)``, also inside roles; wherever else a prompt is text, send
:attr:`SpannedText.spans` as ``custom_params.tessera.text_spans``. A server without Tessera gets the same
text and nothing else.
"""

from __future__ import annotations

import logging
import threading
from http import HTTPStatus
from typing import Any, SupportsIndex

logger = logging.getLogger(__name__)

_PATCHED = "tessera_spans"
_UNKNOWN = "unknown"
_lock = threading.Lock()
_serves: dict[str, bool] = {}  # by base URL


class SpannedText(str):
    """A text with spans.

    Attributes:
        spans: (start, end) of each, half-open, in characters (Unicode code points), ascending.
    """

    spans: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, spans: tuple[tuple[int, int], ...] = ()) -> SpannedText:
        """``text`` with ``spans`` in it."""
        made = super().__new__(cls, text)
        made.spans = spans
        return made

    def __str__(self) -> SpannedText:  # SGLang's programs copy their text with str()
        """Itself."""
        return self

    def __add__(self, other: str) -> SpannedText:
        """Concatenation keeps the spans of both."""
        if not isinstance(other, str):
            return NotImplemented
        return SpannedText(
            super().__add__(other), self.spans + _shifted(_spans_of(other), len(self))
        )

    def __radd__(self, other: str) -> SpannedText:
        """Likewise, behind a plain text."""
        if not isinstance(other, str):
            return NotImplemented
        return SpannedText(
            str.__add__(other, self), _spans_of(other) + _shifted(self.spans, len(other))
        )

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        """A slice keeps the spans that lie in it whole."""
        part = super().__getitem__(key)
        if not isinstance(key, slice):
            return part
        start, stop, step = key.indices(len(self))
        if step != 1:
            return part
        inside = tuple(span for span in self.spans if start <= span[0] and span[1] <= stop)
        return SpannedText(part, _shifted(inside, -start))

    def __getnewargs__(self) -> tuple[str, tuple[tuple[int, int], ...]]:  # type: ignore[override]
        """For pickling."""
        return (str.__str__(self), self.spans)


def span(text: str) -> SpannedText:
    """``text``, declared as a span: computed once and shared wherever it stands in a prompt.

    Raises:
        TypeError: not a text.
    """
    if not isinstance(text, str):
        raise TypeError(f"span() takes a text, got {type(text).__name__}")
    _teach_endpoint()
    plain = str.__str__(text)
    return SpannedText(plain, ((0, len(plain)),) if plain else ())


def text_part(text: str) -> dict[str, Any]:
    """A content part for the OpenAI and Anthropic APIs that declares ``text`` as a span."""
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def _spans_of(text: str) -> tuple[tuple[int, int], ...]:
    return text.spans if isinstance(text, SpannedText) else ()


def _shifted(spans: tuple[tuple[int, int], ...], by: int) -> tuple[tuple[int, int], ...]:
    return tuple((start + by, end + by) for start, end in spans)


# --- SGLang programs -----------------------------------------------------------------------------


def _teach_endpoint() -> None:
    """Let SGLang's client of a running server send the spans of a program's text."""
    try:
        from sglang.lang.backend import runtime_endpoint
    except ImportError:  # no SGLang here: span() is of use to those who send requests themselves
        return
    with _lock:
        original = runtime_endpoint.http_request
        if getattr(original, _PATCHED, False):
            return

        def http_request(url: str, json: Any = None, **options: Any) -> Any:
            return original(url, json=_declared(url, json, options), **options)

        setattr(http_request, _PATCHED, True)
        runtime_endpoint.http_request = http_request


def _declared(url: str, request: Any, options: dict[str, Any]) -> Any:
    """The request with the spans of its text, if it has any and the server reads them."""
    text = request.get("text") if isinstance(request, dict) else None
    first = text[0] if isinstance(text, list) and text else text
    if not isinstance(first, SpannedText) or not first.spans or not _reads_spans(url, options):
        return request
    # the choices of select share their beginning, and with it the spans
    spans = [list(pair) for pair in first.spans]
    params = dict(request.get("sampling_params") or {})
    params["custom_params"] = {
        **(params.get("custom_params") or {}),
        "tessera": {"text_spans": spans},
    }
    return {**request, "sampling_params": params}


def _reads_spans(url: str, options: dict[str, Any]) -> bool:
    """Whether the server behind ``url`` has Tessera and serves spans; said once where it does not.

    A server that does not say is taken to: one without Tessera ignores what it is sent.
    """
    base = url.rsplit("/generate", 1)[0]
    if base not in _serves:
        refusal = _refusal(base, options)
        if refusal is _UNKNOWN:
            return True
        with _lock:
            if base not in _serves and refusal is not None:
                logger.warning("spans are ordinary text on the server at %s: %s", base, refusal)
            _serves.setdefault(base, refusal is None)
    return _serves[base]


def _refusal(base: str, options: dict[str, Any]) -> str | None:
    """Why a server serves no spans; None where it does, ``_UNKNOWN`` where it does not answer."""
    from sglang.utils import http_request

    asked = {key: options[key] for key in ("api_key", "verify") if key in options}
    try:
        answer = http_request(base + "/server_info", **asked)
        if answer.status_code != HTTPStatus.OK:
            return _UNKNOWN
        state = answer.json()["internal_states"][0]
        if "tessera" not in state:
            return "it has no Tessera"
        refusal: str | None = state["tessera"]["spans"]["refused"]
        return refusal
    except (OSError, ValueError, LookupError, TypeError):
        return _UNKNOWN
