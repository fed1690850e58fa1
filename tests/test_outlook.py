"""What a config.json says of a model: whether spans are served, and what a page costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera_sglang import outlook
from tessera_sglang.layout import LayoutError

TINY_MLA = Path(__file__).parents[1] / "examples" / "tiny-mla"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def told(tmp_path: Path, **fields: Any) -> outlook.Outlook:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return outlook.look(str(tmp_path))[0]


def test_the_example_model_is_served_with_spans() -> None:
    found, heads = outlook.look(str(TINY_MLA))
    assert found.spans is True
    assert (found.layers, found.page_tokens) == (4, 64)
    assert (found.page_bytes, found.token_bytes) == (64 * 768, 768), "as its README says"
    assert heads == outlook.Heads(4, 1, 96, 64, True)


def test_grouped_heads_are_served_with_spans(tmp_path: Path) -> None:
    found = told(tmp_path)
    assert found.spans is True
    assert found.page_bytes == 64 * 2 * (2 * 2 * 16) * 2  # tokens, layers, K and V of 2 heads, BF16


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "window 4096, 2 layers"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic' depends on"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' depends on"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, "mrope_section"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers = [1, 0]"),
        ({"rope_local_base_freq": 10000}, "differs between layers"),
    ],
)
def test_what_the_server_would_refuse_is_refused(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    found = told(tmp_path, **fields)
    assert found.spans is False
    assert why in found.why
    windowed = fields.get("model_type") == "mistral"
    assert (found.page_bytes is None) == windowed, "its cache costs what it costs"


@pytest.mark.parametrize(
    "fields",
    [
        {"no_rope_layers": [1, 1]},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
        {"rope_scaling": None, "sliding_window": None},
        {"text_config": {**LLAMA, "num_hidden_layers": 3}},
    ],
)
def test_harmless_fields_are_no_reason(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert told(tmp_path, **fields).spans is True


def test_the_fields_are_those_of_the_survey() -> None:
    survey = pytest.importorskip("tessera_sglang.survey", exc_type=ImportError)
    assert outlook._PER_LAYER == survey._PER_LAYER_ROPE
    assert outlook._OTHER_ROPE == survey._OTHER_ROPE


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek-v3.2", "an indexer chooses"),
        ("deepseek-v4-pro", "compressed and windowed layers"),
    ],
)
def test_known_models_without_spans(name: str, why: str) -> None:
    found, heads = outlook.look(name)
    assert (found.spans, heads) == (False, None)
    assert why in found.why


def test_an_unknown_architecture_is_left_to_the_server(tmp_path: Path) -> None:
    found = told(tmp_path, model_type="mamba2")
    assert (found.spans, found.page_bytes) == (None, None)
    assert "'mamba2'" in found.why
    assert dict(outlook.lines(found))["spans"].startswith("not known: ")


def test_no_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"holds no config\.json"):
        outlook.look(str(tmp_path))
    with pytest.raises(LayoutError, match="no known name"):
        outlook.look("no-such-model")
