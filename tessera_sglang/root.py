"""The root: the constant context of whole pages behind which every span is computed."""

from __future__ import annotations

import logging
from array import array
from typing import Any

from .config import AUTO_ROOT_TEXT, VARIABLE, ConfigError

logger = logging.getLogger(__name__)


def root_tokens(
    span_root: str | list[int], *, tokenizer: Any, vocab_size: int, page_size: int
) -> array[int]:
    """Token ids of the root, a multiple of ``page_size`` of them.

    ``auto`` is one page: what the tokenizer puts before a text (BOS), then a neutral sentence, over
    and over. A text of the user's is repeated in the same way until its last page is full. Without a
    tokenizer ``auto`` is no root, which is said in the log.

    Raises:
        ConfigError: a list that is not whole pages or not in the vocabulary, or a text without a
            tokenizer.
    """
    if isinstance(span_root, list):
        return _checked_ids(span_root, vocab_size, page_size)
    if span_root == "none":
        return array("q")
    if tokenizer is None:
        if span_root == "auto":
            logger.warning(
                "span_root auto is no root on this server, which has no tokenizer "
                "(--skip-tokenizer-init); give span_root as a list of token ids to have one"
            )
            return array("q")
        raise ConfigError(
            f"{VARIABLE}: span_root is a text, but the server has no tokenizer "
            "(--skip-tokenizer-init); give a list of token ids"
        )
    text = AUTO_ROOT_TEXT if span_root == "auto" else span_root
    first = list(tokenizer.encode(text))
    more = list(tokenizer.encode(text, add_special_tokens=False))
    if not more:
        raise ConfigError(f"{VARIABLE}: span_root {text!r} has no tokens; give a text or 'none'")
    pages = -(-len(first) // page_size) if span_root != "auto" else 1
    ids = first
    while len(ids) < pages * page_size:
        ids = ids + more
    return _checked_ids(ids[: pages * page_size], vocab_size, page_size)


def _checked_ids(ids: list[int], vocab_size: int, page_size: int) -> array[int]:
    if len(ids) % page_size:
        raise ConfigError(
            f"{VARIABLE}: span_root has {len(ids)} token ids, but it must be whole pages of "
            f"{page_size}; add or remove ids"
        )
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ConfigError(
            f"{VARIABLE}: span_root holds token id {outside[0]}, outside the vocabulary of "
            f"{vocab_size}"
        )
    return array("q", ids)
