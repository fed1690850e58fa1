"""Sixteen agents read one document behind sixteen preambles: an SGLang program.

    python examples/agents.py [--url http://localhost:30000] [--agents 16] [--document FILE]

Prints for each agent how much of its prompt was cached. The same program runs on a server without
Tessera, where the document is computed by every agent again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import sglang as sgl

from tessera_sglang import span

HANDBOOK = Path(__file__).parents[1] / "tessera_sglang/demo/handbook.txt"
ROLES = (
    "You are a lawyer. Look for duties and who bears them.",
    "You are on shift tonight and in a hurry. One sentence.",
    "You train new colleagues. Explain as to a beginner.",
    "You audit costs. Name everything that has to be paid for.",
    "You speak to customers. No jargon.",
    "You plan drills. Look for what people get wrong.",
    "You look after safety below ground.",
    "You write the log. Times and names only.",
)
QUESTION = "Who decides during an incident?"


@sgl.function
def ask(s: Any, document: str, roles: list[str]) -> None:
    """One fork for each role; the document stands behind the role, at another offset in each."""
    for fork, role in zip(forks := s.fork(len(roles)), roles, strict=True):
        fork += sgl.system(role)
        fork += sgl.user(span(document) + "\n\n" + QUESTION)
        fork += sgl.assistant(sgl.gen("answer", max_tokens=48, temperature=0))
    forks.join()
    s["cached"] = [fork.get_meta_info("answer") for fork in forks]
    s["answers"] = [fork["answer"] for fork in forks]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://localhost:30000")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--document", type=Path, default=HANDBOOK)
    options = parser.parse_args()
    roles = [f"Agent {i + 1}. {ROLES[i % len(ROLES)]}" for i in range(options.agents)]
    state = ask.run(
        document=options.document.read_text("utf-8"),
        roles=roles,
        backend=sgl.RuntimeEndpoint(options.url),
    )
    for role, meta, answer in zip(roles, state["cached"], state["answers"], strict=True):
        print(f"{meta['cached_tokens']:>7} of {meta['prompt_tokens']} cached  {role}")
        print(f"        {' '.join(answer.split())[:90]}")


if __name__ == "__main__":
    main()
