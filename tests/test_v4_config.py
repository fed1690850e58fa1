"""Which DeepSeek-V4 is served on a CPU, with what, and what its start refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import rewrite_config, write_llama, write_v4
from safetensors.torch import load_file

pytest.importorskip("tessera_sglang.compat", exc_type=ImportError)

from tessera_sglang import outlook  # after the skip
from tessera_sglang.v4_serving import config as v4
from tessera_sglang.v4_serving import model as v4_model

VIEW: dict[str, Any] = {
    "page_size": 128,
    "dtype": "float32",
    "tp_size": 1,
    "enable_lora": False,
    "load_format": "auto",
    "max_running_requests": None,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_v4(tmp_path_factory.mktemp("v4"))


@pytest.fixture(params=[True, False], ids=["cpu", "elsewhere"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(v4.compat, "platform_is_plugin_cpu", lambda: request.param)
    return bool(request.param)


def view(directory: Path, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(model_path=str(directory), **{**VIEW, **fields})


def test_sglang_is_told_of_another_architecture_on_our_cpu_platform_only(
    directory: Path, on_cpu: bool
) -> None:
    found = v4.load_config(lambda *_, **__: "sglang's own", str(directory), trust_remote_code=True)
    assert v4.is_served(found) is on_cpu
    if on_cpu:
        assert found.qk_rope_head_dim == 8
        assert found.layer_types[1] == "compressed_sparse_attention"
    else:
        assert found == "sglang's own"


def test_other_models_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4.compat, "platform_is_plugin_cpu", lambda: True)
    write_llama(tmp_path / "llama", layers=1)
    for path in (tmp_path / "llama", tmp_path / "nothing", "deepseek-ai/DeepSeek-V4-Pro"):
        assert v4.load_config(lambda model: model, str(path)) == str(path)


def test_what_a_server_is_started_with(directory: Path) -> None:
    chosen = v4.defaults(view(directory, page_size=None, dtype="auto"))
    assert chosen == {
        "disable_overlap_schedule": True,
        "page_size": 128,
        "max_running_requests": v4.MAX_RUNNING_REQUESTS,
        "dtype": "float32",
    }
    explicit = v4.defaults(view(directory, page_size=256, max_running_requests=3))
    assert explicit == {"disable_overlap_schedule": True}


@pytest.mark.parametrize(
    ("fields", "settings", "flag", "why"),
    [
        ({"page_size": 64}, {}, "--page-size 64", "128"),
        ({"dtype": "half"}, {}, "--dtype half", "float32 or bfloat16"),
        ({"tp_size": 2}, {}, "--tp-size 2", "whole"),
        ({"enable_lora": True}, {}, "--enable-lora", "as they are"),
        ({"load_format": "dummy"}, {}, "--load-format dummy", "safetensors"),
        ({}, {"index": "radix"}, 'TESSERA_CONFIG index "radix"', "gone on from"),
        ({}, {"verify": "latents"}, 'TESSERA_CONFIG verify "latents"', "not compared"),
    ],
)
def test_what_can_not_be_met_is_refused(
    directory: Path, fields: dict[str, Any], settings: dict[str, str], flag: str, why: str
) -> None:
    known = {"index": "content", "verify": "tokens"}
    assert not list(v4.contradictions(view(directory), **known))
    ((found, reason, _),) = v4.contradictions(view(directory, **fields), **{**known, **settings})
    assert found == flag
    assert why in reason


def test_the_outlook_reads_what_transformers_saves(directory: Path) -> None:
    found, heads = outlook.look(str(directory))
    assert (found.spans, heads) == (False, None)
    assert "on a CPU, for trying things out, spans are served" in found.why
    assert (found.page_tokens, found.page_bytes) == (None, None)


def _model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(v4_model, "attention_backends", lambda: ("tessera",))
    monkeypatch.setattr(v4_model, "LogitsProcessor", lambda config: torch.nn.Identity())
    return v4_model.TesseraV4ForCausalLM(v4.v4_config(str(directory)))


def test_all_weights_are_filled_whoever_named_them(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = load_file(directory / "model.safetensors")
    by_name = _model(directory, monkeypatch)
    by_name.load_weights(written.items())
    by_name.model.save_pretrained(tmp_path)  # under the names of the published checkpoint
    published = load_file(tmp_path / "model.safetensors")
    translated = _model(tmp_path, monkeypatch)
    translated.load_weights(published.items())
    for made in (by_name, translated):
        state = made.model.state_dict()
        assert state.keys() == written.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in written.items())


def test_a_checkpoint_that_lacks_weights_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    written = load_file(directory / "model.safetensors")
    del written["lm_head.weight"]
    v4.v4_config(str(directory)).save_pretrained(tmp_path)
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights do not fit.*lm_head\.weight"):
        _model(tmp_path, monkeypatch).load_weights(written.items())


def test_quantised_weights_and_other_backends_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(v4_model, "attention_backends", lambda: ("torch_native",))
    with pytest.raises(ValueError, match="needs --attention-backend tessera"):
        v4_model.TesseraV4ForCausalLM(v4.v4_config(str(directory)))
    monkeypatch.setattr(v4_model, "attention_backends", lambda: ("tessera",))
    with pytest.raises(ValueError, match="not fp8"):
        v4_model.TesseraV4ForCausalLM(
            v4.v4_config(str(directory)), SimpleNamespace(get_name=lambda: "fp8")
        )


def test_a_config_that_says_something_else_is_not_ours(directory: Path, tmp_path: Path) -> None:
    v4.v4_config(str(directory)).save_pretrained(tmp_path)
    assert v4.is_v4(str(tmp_path))
    other = tmp_path / "other"
    v4.v4_config(str(directory)).save_pretrained(other)
    assert not v4.is_v4(str(rewrite_config(other, model_type="deepseek_v3")))
