"""What a server would make of a model, as far as its ``config.json`` tells.

The server looks at the loaded model (:mod:`survey`, :mod:`admission`) and has the last word: modules
that a config does not mention, such as norms behind the rotation, show only there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tessera_sglang.memory_pool import ledger
from tessera_sglang.memory_pool.model_geometry import ModelConfigError
from tessera_sglang.memory_pool.models import AnyModel, GroupedModel, HybridModel, MlaModel

from .config import PAGE_TOKENS
from .layout import CONFIG_FILES, LayoutError, find

_MOVING_TABLES = ("dynamic", "longrope", "su")  # rotary tables that depend on the length served
_PER_LAYER = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval")
_OTHER_ROPE = (
    *("rope_local_base_freq", "rope_theta_local", "mrope_section"),
    "dual_chunk_attention_config",
)
_ROPE_TABLES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True, slots=True)
class Outlook:
    """``spans``: whether requests may declare any; None where only the loaded model can tell.

    Geometry is that of one rank (tensor parallel 1), BF16, and None for an unknown architecture.
    """

    model: str
    spans: bool | None
    why: str
    attention: str | None = None
    layers: int | None = None
    page_tokens: int | None = None
    page_bytes: int | None = None  # of all layers; None where no layer pages its whole context
    token_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """What kernels are chosen by, where Tessera's serve the model."""

    query_heads: int
    kv_heads: int
    key_width: int  # channels
    value_width: int
    latent: bool


def look(text: str) -> tuple[Outlook, Heads | None]:
    """The outlook for a config file, a directory that holds one, or a known model's name.

    Raises:
        LayoutError: there is none.
    """
    try:
        model, known = find(text)
    except ModelConfigError as error:
        why = f"{error}. The server looks at the loaded model when it starts"
        return Outlook(Path(text).name or text, None, why), None
    except ValueError as error:
        raise LayoutError(str(error)) from error
    config = dict(known.config) if known is not None else _raw(Path(text))
    refusals = [*_of_attention(model), *_of_rotary(config)]
    page_tokens = None if isinstance(model, HybridModel) else PAGE_TOKENS
    outlook = Outlook(
        model=model.name,
        spans=not refusals,
        why=refusals[0] if refusals else "every layer pages its whole context, by one rotary table",
        attention=_attention(model),
    )
    try:
        sheet = ledger.build(model, (PAGE_TOKENS,), page_tokens=page_tokens)
    except ValueError:  # rows of a tiny model do not divide into the scales of a packed format
        return outlook, None if refusals else _heads(model)
    outlook = replace(
        outlook,
        layers=sheet.layers,
        page_tokens=sheet.page.page_tokens,
        page_bytes=sheet.page.page_bytes or None,
        token_bytes=sheet.page.page_bytes / sheet.page.page_tokens or None,
    )
    return outlook, None if refusals else _heads(model)


def _raw(path: Path) -> dict[str, object]:
    """The text model's config, which `find` has read before."""
    if path.is_dir():
        path = next(path / name for name in CONFIG_FILES if (path / name).is_file())
    config: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    while isinstance(inner := config.get("text_config"), dict):
        config = inner
    return config


def _of_attention(model: AnyModel) -> Iterator[str]:
    if isinstance(model, HybridModel):
        yield (
            "on a GPU compressed and windowed layers are SGLang's to run, which reads shared pages only "
            "where they were computed; on a CPU, for trying things out, spans are served"
        )
    elif isinstance(model, MlaModel) and model.index_width:
        yield "sparse attention: an indexer chooses what a query reads"
    elif isinstance(model, GroupedModel) and any(model.windows):
        windowed = sum(map(bool, model.windows))
        yield f"sliding-window attention (window {max(model.windows)}, {windowed} layers)"


def _of_rotary(config: Mapping[str, object]) -> Iterator[str]:
    for table in (config, *(config.get(name) or {} for name in _ROPE_TABLES)):
        if not isinstance(table, Mapping):
            continue
        for field in (*_PER_LAYER, *_OTHER_ROPE):
            value = table.get(field)
            every_layer = field == "no_rope_layers" and isinstance(value, list) and all(value)
            if value and not every_layer:
                yield f"rotary embedding differs between layers or axes ({field} = {value})"
        kind = table.get("rope_type") or table.get("type")
        if kind in _MOVING_TABLES:
            yield f"rotary embedding {kind!r} depends on the length served"


def _attention(model: AnyModel) -> str:
    if isinstance(model, HybridModel):
        return f"compressed and windowed, {model.content + model.rope} channels"
    if isinstance(model, MlaModel):
        return f"MLA, {model.heads} heads, latent {model.latent} + rotary {model.rope}"
    return f"{model.heads} heads, {model.kv_heads} of keys and values, {model.head_width} channels"


def _heads(model: AnyModel) -> Heads:
    if isinstance(model, MlaModel):
        return Heads(model.heads, 1, model.latent + model.rope, model.latent, True)
    assert isinstance(model, GroupedModel), "hybrids are refused"
    return Heads(model.heads, model.kv_heads, model.head_width, model.head_width, False)


def lines(outlook: Outlook) -> Iterator[tuple[str, str]]:
    """Name and text of each thing to say, for readers."""
    verdict = {True: "yes", False: "no", None: "not known"}[outlook.spans]
    besides = "; prefixes are reused all the same" if outlook.spans is False else ""
    yield "spans", f"{verdict}: {outlook.why}{besides}"
    if outlook.page_bytes is not None:
        yield "attention", f"{outlook.attention}; {outlook.layers} layers"
        yield (
            "page",
            f"{outlook.page_tokens} tokens, {outlook.page_bytes:,} B over all layers "
            f"({outlook.token_bytes:,.0f} B a token)",
        )
