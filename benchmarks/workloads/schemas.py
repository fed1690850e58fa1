"""Tool definitions in OpenAI's format, of a wanted length."""

from __future__ import annotations

import json
import random
from typing import Any

from tessera_sglang.bench.agents import Encode

_VERBS = ("get", "list", "create", "update", "delete", "search", "export", "send", "close", "find")
_THINGS = (
    *("invoice", "ticket", "shipment", "customer", "sensor", "valve", "shift", "report", "order"),
    *("booking", "document", "message", "account", "vehicle", "contract", "alarm", "meter"),
)
_FIELDS: dict[str, dict[str, Any]] = {
    "id": {"type": "string", "description": "Unique id."},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "description": "Most results."},
    "status": {"type": "string", "enum": ["open", "closed", "waiting"]},
    "since": {"type": "string", "format": "date-time", "description": "Not before this time."},
    "until": {"type": "string", "format": "date-time", "description": "Not after this time."},
    "owner": {"type": "string", "description": "User name of the person in charge."},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "All must match."},
    "priority": {"type": "string", "enum": ["low", "normal", "high", "urgent"]},
    "dry_run": {"type": "boolean", "description": "Only say what would be done."},
    "comment": {"type": "string", "description": "Free text that is kept in the log."},
    "sort": {"type": "string", "enum": ["newest", "oldest", "name"]},
    "page": {"type": "integer", "minimum": 1},
}


def schema(number: int, tokens: int, encode: Encode, chance: random.Random) -> list[int]:
    """JSON of a tool that no other number has, as long as fits into ``tokens`` tokens.

    Never shorter than one without parameters: some 150 tokens where a token is a byte.
    """
    verb = _VERBS[number % len(_VERBS)]
    thing = _THINGS[number // len(_VERBS) % len(_THINGS)]
    unlike = number // (len(_VERBS) * len(_THINGS))
    name = f"{verb}_{thing}" + (f"_{unlike}" if unlike else "")
    fields = chance.sample(list(_FIELDS), len(_FIELDS))
    found = _encoded(name, f"{verb.capitalize()} {thing}s.", [], encode)
    for count in range(1, len(fields) + 1):
        longer = _encoded(name, f"{verb.capitalize()} {thing}s.", fields[:count], encode)
        if len(longer) > tokens:
            break
        found = longer
    return found


def _encoded(name: str, description: str, fields: list[str], encode: Encode) -> list[int]:
    properties = {field: _FIELDS[field] for field in fields}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": description, "parameters": parameters}
    tool = {"type": "function", "function": function}
    return list(encode(json.dumps(tool)))
