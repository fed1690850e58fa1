"""Spans that nobody gave offsets for: a hint, which may be dropped, and not a demand.

``cache_control`` becomes offsets like any other; this mark beside them says where they come from.
"""

from __future__ import annotations

import secrets
from typing import Any

from .text import messages

FIELD = "tessera_hint"  # in custom_params
_TOKEN = secrets.token_hex(16)  # a caller can not write it, so what has it was put there by us


def put(custom_params: dict[str, Any]) -> dict[str, Any]:
    """The parameters, marked as a hint."""
    return {**custom_params, FIELD: _TOKEN}


def forged(params: Any) -> bool:
    """Whether a caller wrote the mark. To be asked in the process that puts it."""
    custom = _custom(params)
    return FIELD in custom and custom[FIELD] != _TOKEN


def drop(params: Any) -> bool:
    """Take spans out of sampling parameters, a dict or SGLang's, if they are a hint.

    Returns whether they were.
    """
    custom = _custom(params)
    if FIELD not in custom:
        return False
    kept = {key: value for key, value in custom.items() if key not in ("tessera", FIELD)} or None
    messages.put(params, "custom_params", kept)
    return True


def _custom(params: Any) -> dict[Any, Any]:
    custom = messages.get(params, "custom_params")
    return custom if isinstance(custom, dict) else {}
