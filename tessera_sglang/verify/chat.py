"""A chat template as SGLang's chat endpoint uses it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any


class ServedTemplate:
    """A tokenizer whose template is given contents in the form that it was written for.

    Some templates read a content in parts, others only a string. The endpoint finds out which and, for
    the latter, joins the parts; so must whoever renders a prompt without it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        """The tokenizer's own."""
        ids: list[int] = self._tokenizer.encode(text, **options)
        return ids

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        """The tokenizer's own, on contents in the right form."""
        from sglang.srt.parser.jinja_template_utils import process_content_for_template_format

        known = [{**message, "content": message.get("content") or ""} for message in messages]
        served = [
            process_content_for_template_format(message, self._content_format, [], [], [], [])
            for message in known
        ]
        return self._tokenizer.apply_chat_template(served, **options)

    @cached_property
    def _content_format(self) -> str:
        from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

        template = self._tokenizer.get_chat_template()
        return str(detect_jinja_template_content_format(template))
