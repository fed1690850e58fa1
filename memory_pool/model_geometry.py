"""From a Hugging Face ``config.json`` to the geometry of its cache.

``read_model`` finds in a config the numbers that :mod:`memory_pool.models` derives a geometry from::

    model = read_model(json.loads(path.read_text()), path.parent.name)
    geometry = model.geometry()

An architecture that is not listed here is refused: a guess would size pools wrongly, or read a
cache that means something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .models import AnyModel, GroupedModel, HybridKind, HybridModel, MlaModel

Config = Mapping[str, object]

MLA_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "mistral4"})
SPARSE_MLA_TYPES = frozenset({"deepseek_v32"})
HYBRID_TYPES = frozenset({"deepseek_v4"})
WHOLE_CONTEXT_TYPES = frozenset({"granite", "llama", "olmo2"})
OPT_IN_WINDOW_TYPES = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"})
WINDOW_TYPES = frozenset({"mistral", "mixtral"})  # the window, if any, is every layer's
MIXED_TYPES = frozenset({"gpt_oss"})  # windows in turn with whole contexts
GROUPED_TYPES = WHOLE_CONTEXT_TYPES | OPT_IN_WINDOW_TYPES | WINDOW_TYPES | MIXED_TYPES

V4_ROPE_WIDTH = 64  # transformers does not save qk_rope_head_dim
V4_STRIDES = {HybridKind.CSA: 4, HybridKind.HCA: 128}
V4_RATIOS = {0: HybridKind.WINDOW, 4: HybridKind.CSA, 128: HybridKind.HCA}
_SLIDING, _FULL = "sliding_attention", "full_attention"

MISTRAL_NAMES = {  # of params.json, as SGLang's mistral_utils translates them
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}


class ModelConfigError(ValueError):
    """A config that no geometry can be read from; says what was wanted and what was found."""


def read_model(config: Config, name: str) -> AnyModel:
    """The model that a config describes; of a multimodal one, its ``text_config``.

    Raises :class:`ModelConfigError` for an architecture that is not known, and for a field that is
    missing or not what it should be.
    """
    while isinstance(inner := config.get("text_config"), Mapping):
        config = inner
    if "model_type" not in config and "n_layers" in config:
        config = _from_mistral(config)
    reader = _Reader(config, name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise reader.error("model_type as a word", model_type)
    if model_type in HYBRID_TYPES:
        return _hybrid(reader)
    if model_type in MLA_TYPES | SPARSE_MLA_TYPES:
        return _mla(reader, sparse=model_type in SPARSE_MLA_TYPES)
    if model_type in GROUPED_TYPES:
        return _grouped(reader)
    known = ", ".join(sorted(GROUPED_TYPES | MLA_TYPES | SPARSE_MLA_TYPES | HYBRID_TYPES))
    raise ModelConfigError(
        f"{name}: no geometry is known for model_type {model_type!r} "
        f"(architectures {config.get('architectures')!r}); known are {known}"
    )


def _from_mistral(config: Config) -> Config:
    """Mistral's own ``params.json`` under the names of the architecture that it stands for."""
    renamed = {MISTRAL_NAMES.get(field, field): value for field, value in config.items()}
    latent = renamed.get("kv_lora_rank") is not None
    model_type = "deepseek_v3" if latent else "mistral"
    return {"sliding_window": None, **renamed, "model_type": model_type}


def _grouped(reader: _Reader) -> GroupedModel:
    reader.refuse("kv_lora_rank", "latent attention")
    heads = reader.count("num_attention_heads")
    kv_heads = reader.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise reader.error(f"num_key_value_heads dividing num_attention_heads {heads}", kv_heads)
    if reader.has("head_dim"):
        width = reader.count("head_dim")
    else:
        width, rest = divmod(reader.count("hidden_size"), heads)
        if rest:
            raise reader.error(f"head_dim, or hidden_size in {heads} equal heads", None)
    return GroupedModel(reader.name, heads, kv_heads, width, _windows(reader))


def _windows(reader: _Reader) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none.

    Which layers have one where ``layer_types`` does not say differs from model to model and between
    transformers and SGLang, so it is read only where there is no doubt.
    """
    layers = reader.count("num_hidden_layers")
    model_type = reader.config["model_type"]
    opted_in = model_type in OPT_IN_WINDOW_TYPES and reader.config.get("use_sliding_window")
    if reader.has("layer_types") or model_type in MIXED_TYPES or opted_in:
        kinds = reader.words("layer_types", layers, (_FULL, _SLIDING))
    elif model_type in WINDOW_TYPES and "sliding_window" not in reader.config:
        raise reader.error("sliding_window (null for none)", None)
    elif model_type in WINDOW_TYPES and reader.has("sliding_window"):
        kinds = (_SLIDING,) * layers
    else:
        kinds = (_FULL,) * layers
    if _SLIDING not in kinds:
        return (0,) * layers
    window = reader.count("sliding_window")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _mla(reader: _Reader, *, sparse: bool) -> MlaModel:
    if not sparse:
        reader.refuse("index_head_dim", "a sparse indexer")
    return MlaModel(
        name=reader.name,
        layers=reader.count("num_hidden_layers"),
        heads=reader.count("num_attention_heads"),
        latent=reader.count("kv_lora_rank"),
        rope=reader.count("qk_rope_head_dim"),
        nope=reader.count("qk_nope_head_dim"),
        value=reader.count("v_head_dim"),
        index_width=reader.count("index_head_dim") if sparse else 0,
    )


def _hybrid(reader: _Reader) -> HybridModel:
    if reader.count("num_key_value_heads") != 1:
        raise reader.error("num_key_value_heads 1", reader.config["num_key_value_heads"])
    width = reader.count("head_dim")
    rope = reader.count("qk_rope_head_dim", default=_rope_width(reader, width))
    if rope >= width:
        raise reader.error(f"qk_rope_head_dim below head_dim {width}", rope)
    rates = reader.config.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise reader.error("compress_rates by layer type", rates)
    usual = {kind.value: stride for kind, stride in V4_STRIDES.items()}
    strides = _Reader({**usual, **rates}, reader.name)
    return HybridModel(
        name=reader.name,
        kinds=_hybrid_kinds(reader),
        content=width - rope,
        rope=rope,
        window=reader.count("sliding_window"),
        csa_tokens=strides.count(HybridKind.CSA.value),
        hca_tokens=strides.count(HybridKind.HCA.value),
        index_width=reader.count("index_head_dim"),
    )


def _rope_width(reader: _Reader, width: int) -> int:
    """Where ``qk_rope_head_dim`` is missing, as in what transformers saves."""
    share = reader.config.get("partial_rotary_factor")
    if isinstance(share, float) and 0 < share < 1:
        return int(width * share)
    return V4_ROPE_WIDTH


def _hybrid_kinds(reader: _Reader) -> tuple[HybridKind, ...]:
    """Kind of each layer: transformers saves ``layer_types``, published configs ``compress_ratios``.

    Ratios behind the last layer belong to prediction heads, which are no part of the model's cache.
    """
    layers = reader.count("num_hidden_layers")
    if reader.has("layer_types"):
        known = tuple(kind.value for kind in HybridKind)
        return tuple(HybridKind(word) for word in reader.words("layer_types", layers, known))
    ratios = reader.config.get("compress_ratios")
    wanted = f"layer_types, or at least {layers} compress_ratios of 0, 4 or 128"
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) < layers:
        raise reader.error(wanted, ratios)
    if any(ratio not in tuple(V4_RATIOS) for ratio in ratios[:layers]):
        raise reader.error(wanted, ratios)
    return tuple(V4_RATIOS[ratio] for ratio in ratios[:layers])


MOST_LAYERS = 10_000
MOST_ELEMENTS = 10**9  # of anything that is counted in a row, a layer or a window


@dataclass(frozen=True, slots=True)
class _Reader:
    """A config's fields, each checked when it is read."""

    config: Config
    name: str

    def error(self, wanted: str, found: object) -> ModelConfigError:
        shown = repr(found)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ModelConfigError(f"{self.name}: config wants {wanted}, found {shown}")

    def has(self, field: str) -> bool:
        """Whether the field is there; null counts as not."""
        return self.config.get(field) is not None

    def count(self, field: str, *, default: int | None = None, least: int = 1) -> int:
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        most = MOST_LAYERS if field == "num_hidden_layers" else MOST_ELEMENTS
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{field} as a whole number from {least} to {most:,}", value)
        return value

    def words(self, field: str, layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
        value = self.config.get(field)
        wanted = f"{field} as {layers} of {', '.join(known)}"
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != layers:
            raise self.error(wanted, value)
        if any(word not in known for word in value):
            raise self.error(wanted, value)
        return tuple(value)

    def refuse(self, field: str, what: str) -> None:
        """Stop at a field that means the architecture is not the one its model_type names."""
        if self.has(field):
            raise self.error(f"no {field} ({what})", self.config[field])
