"""The ways to read a prompt that are compared: full attention, spans, and what others reuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera_sglang.root import root_tokens
from tessera_sglang.verify.run import VOCABULARY

LINK_PAGES = (0, 1, 2)
OWN_ROOTS = {  # text, repeated until its last page is full
    "sentence": "It was a quiet day in a small town. ",
    "role": "You are a careful assistant. You read what is given to you, and answer from it alone. ",
}
FULL, AGAIN = "full attention", "full attention again"
DEFAULT, BARE = "auto/1", "none/0"
REUSED, PATCHED = "reused", "reused, 15 % recomputed"
RECOMPUTED_SHARE = 0.15  # of each document's tokens, its first ones


@dataclass(frozen=True, slots=True)
class Way:
    """``root`` is None without spans; ``overrides`` are what a request says beside its spans."""

    name: str
    root: str | None = None
    link_pages: int | None = None
    root_ids: tuple[int, ...] = ()  # of an own root

    @property
    def overrides(self) -> Mapping[str, Any]:
        """``custom_params.tessera`` without the spans."""
        return {"root": list(self.root_ids) or self.root, "link_pages": self.link_pages}


def span_ways(tokenizer: Any, page_tokens: int) -> Iterator[Way]:
    """Every root with every number of linked pages."""
    for root in ("none", "auto", *OWN_ROOTS):
        ids: Sequence[int] = ()
        if root in OWN_ROOTS:
            ids = root_tokens(
                OWN_ROOTS[root],
                tokenizer=tokenizer,
                vocab_size=VOCABULARY,
                page_size=page_tokens,
            )
        for pages in LINK_PAGES:
            yield Way(f"{root}/{pages}", root, pages, tuple(ids))
