"""Retrieval-augmented questions over the OpenAI client: passages in any order, each computed once.

    python examples/rag.py [--url http://localhost:30000] [--passages 4] [--questions 8]

The server needs --enable-cache-report for the counts. Passages are sections of the shipped handbook;
every question draws some of them in another order, as a retriever would.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from openai import OpenAI

from tessera_sglang import text_part

HANDBOOK = Path(__file__).parents[1] / "tessera_sglang/demo/handbook.txt"
QUESTIONS = (
    "Who decides during an incident?",
    "How slowly is a valve closed?",
    "Who is called first?",
    "What is written down, and by whom?",
)


def passages() -> list[str]:
    """The handbook's sections, two by two, so that each is several pages long."""
    sections = HANDBOOK.read_text("utf-8").strip().split("\n\n")
    return ["\n\n".join(sections[i : i + 2]) for i in range(0, len(sections), 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://localhost:30000")
    parser.add_argument("--passages", type=int, default=4, help="for each question")
    parser.add_argument("--questions", type=int, default=8)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    draw = random.Random(1)
    corpus = passages()
    for number in range(options.questions):
        drawn = draw.sample(corpus, min(options.passages, len(corpus)))
        question = QUESTIONS[number % len(QUESTIONS)]
        answer = client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": "Answer from the passages. Quote the sentence."},
                {
                    "role": "user",
                    "content": [
                        *(text_part(passage) for passage in drawn),
                        {"type": "text", "text": f"\n\n{question}"},
                    ],
                },
            ],
            max_tokens=32,
            temperature=0,
        )
        usage = answer.usage
        details = usage.prompt_tokens_details if usage else None
        cached = details.cached_tokens if details else "not reported"
        print(f"{cached:>7} of {usage.prompt_tokens if usage else 0} cached  {question}")


if __name__ == "__main__":
    main()
