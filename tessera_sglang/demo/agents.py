"""The workload: agents with a role and a question each, and one document between the two.

``MLA`` runs on the example model, whose tokens are bytes; ``TEXT`` on a small real language model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

_DOCUMENT_GOES_HERE = "\x00"


@dataclass(frozen=True, slots=True)
class Workload:
    """One document, the questions about it, and what is to be shown with them.

    ``computed_share`` times the number of agents is the share of stock's tokens that the content
    index may compute; ``copies_tolerance`` covers the pages at the document's edges, which hold
    other text as well.
    """

    name: str
    document_file: str
    questions: tuple[str, ...]
    new_tokens: int
    answers_mean_something: bool
    computed_share: float
    copies_tolerance: float

    @property
    def document(self) -> str:
        """The text that all agents read."""
        return resources.files(__package__).joinpath(self.document_file).read_text("utf-8").strip()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one agent sends: token ids, and where in them the document stands."""

    role: str
    question: str
    tokens: tuple[int, ...]
    document: tuple[int, int]  # half-open token offsets: the span


def prompts(workload: Workload, agents: int, model: Path) -> list[Prompt]:
    """The prompts of the first ``agents`` agents, through the model's own chat template.

    The document is tokenised by itself, so its tokens are the same in every prompt.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    document = _encode(tokenizer, workload.document)
    made = []
    for role, question in zip(ROLES[:agents], workload.questions, strict=False):
        messages = [
            {"role": "system", "content": role},
            {"role": "user", "content": f"{_DOCUMENT_GOES_HERE}\n\n{question}"},
        ]
        rendered: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before, after = (_encode(tokenizer, text) for text in rendered.split(_DOCUMENT_GOES_HERE))
        start, end = len(before), len(before) + len(document)
        made.append(Prompt(role, question, (*before, *document, *after), (start, end)))
    return made


def _encode(tokenizer: Callable[..., Any], text: str) -> Sequence[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


# No two begin alike, so that nothing of what stands before the document is shared by anybody.
ROLES = (
    "Night dispatcher: you want only what is urgent, in one plain sentence.",
    "Auditor from the ministry: you check dates and numbers and trust no adjective.",
    "Teacher of a fourth form: explain it so that a child of ten can retell it.",
    "Engineer new to the job: you ask what comes first and what must never be done.",
    "Reporter with a deadline: you look for the one line that will be quoted.",
    "Translator: you keep names as they are and stop at every ambiguous word.",
    "Lawyer for the other side: you look for who decided, and on what grounds.",
    "Archivist: you note who wrote what, when, and where the paper is kept.",
    "Retired sailor: you distrust offices, but you respect a good procedure.",
    "Insurance clerk: you care about causes, about times, and about nothing else.",
    "Stage director: you look for the moment at which everything turns round.",
    "Editor of short texts: cut what can be cut and keep the meaning whole.",
    "Historian of towns: you ask what people were used to before it changed.",
    "Safety officer: you look for the step at which somebody could get hurt.",
    "Patient grandparent: you answer slowly, kindly, and without hard words.",
    "Quizmaster: you want an answer that is short and can be proved from the text.",
)

MLA = Workload(
    name="mla",
    document_file="handbook.txt",
    questions=(
        "Who decides during an incident?",
        "What is read before anything is closed?",
        "How fast may the make-up meter run?",
        "Which valve is closed first?",
        "Which loops have no bypass?",
        "How long can the hospital live on stored heat?",
        "At which oxygen level does nobody go in?",
        "When do messages go out?",
        "What does the scribe do?",
        "Where is the list of schools kept?",
        "What is a level two incident?",
        "Who may take off a red tag?",
        "How is a drill started?",
        "Why are valves not closed in a hurry?",
        "What is written within three days?",
        "Who buys the cake?",
    ),
    new_tokens=8,
    answers_mean_something=False,
    computed_share=2.0,
    copies_tolerance=0.02,
)

TEXT = Workload(
    name="text",
    document_file="essay.txt",
    questions=(
        "How many minutes fast was the clock?",
        "Quote the sentence that says how the bell rang.",
        "Who built the clock, and what did she cast the bell from?",
        "What did Tobias Renck own?",
        "Quote what the mayor told the French officer.",
        "How far from the town did the railway come?",
        "Why did the council put the matter off?",
        "Where do the letter and the reply hang today?",
        "How far out could fishermen hear the bell?",
        "On which night did the storm take the roof?",
        "How many pieces did Elias Brandt clean?",
        "Quote what Karin Holm told him.",
        "How long was the town without a clock?",
        "What happened to the great wheel?",
        "What became of the cider house?",
        "What is harder, the bronze of cannons or the bronze of bells?",
    ),
    new_tokens=24,
    answers_mean_something=True,
    computed_share=4.0,  # a short document: linked pages and questions weigh more
    copies_tolerance=0.08,
)
