"""Agents with many tool schemas, each agent with another selection in another order: Anthropic client.

    python examples/tools.py [--url http://localhost:30000] [--agents 6] [--tools 5]

The server needs --enable-cache-report for the counts.

Every schema with cache_control is computed once, whichever tools stand before it. Schemas shorter than
two pages of 64 tokens share nothing, so what is worth marking is the long ones.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from anthropic import Anthropic

SYSTEMS = ("pumps", "valves", "meters", "customers", "vaults", "drills", "boilers", "pipes")


def schema(name: str) -> dict[str, Any]:
    """A tool with the descriptions that real ones have."""
    fields = {
        "since": f"Start of the period, ISO 8601. Records of {name} before it are left out.",
        "until": f"End of the period, ISO 8601. Records of {name} after it are left out.",
        "loop": "One of Heron, Gull, Tern, Curlew, Plover and Swift. Leave out for all of them.",
        "limit": f"At most so many records of {name}, newest first. From 1 to 500.",
    }
    return {
        "name": f"search_{name}",
        "description": (
            f"Searches the records of {name}. Use it before you say anything about {name}; "
            "never answer from memory. Returns one record a line, newest first, with time, place "
            "and who wrote it. An empty answer means that nothing was recorded, not that nothing "
            "happened: say so."
        ),
        "input_schema": {
            "type": "object",
            "properties": {
                field: {"type": "string", "description": meaning}
                for field, meaning in fields.items()
            },
            "required": ["since"],
        },
        "cache_control": {"type": "ephemeral"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://localhost:30000")
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--tools", type=int, default=5, help="of each agent")
    options = parser.parse_args()
    client = Anthropic(base_url=options.url, api_key="none")
    draw = random.Random(1)
    for number in range(options.agents):
        tools = [schema(name) for name in draw.sample(SYSTEMS, min(options.tools, len(SYSTEMS)))]
        answer = client.messages.create(
            model="default",
            max_tokens=16,
            system=f"You are agent {number + 1}.",
            tools=tools,  # type: ignore[arg-type]
            messages=[{"role": "user", "content": "What happened last night?"}],
        )
        cached = answer.usage.cache_read_input_tokens or 0  # left out where it is 0
        computed = answer.usage.input_tokens
        names = ", ".join(tool["name"].removeprefix("search_") for tool in tools)
        print(f"{cached:>7} cached, {computed} computed  agent {number + 1}: {names}")


if __name__ == "__main__":
    main()
