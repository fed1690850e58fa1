"""Rotary pairing, theta, scaling and the softmax scale of a model against its configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loading import ATTENTION, Loaded, admission, refusal, spoiled
from models import rewrite_config, write_llama

from tessera_sglang.admission.rotary import check_written_thetas


def turned_by(**changes: Any) -> Callable[[Any], None]:
    """The layer's rotary table built from other parameters."""

    def spoil(layer: Any) -> None:
        rope = copy.deepcopy(layer.rotary_emb)
        for name, value in changes.items():
            setattr(rope, name, value)
        rope.cos_sin_cache = rope._compute_cos_sin_cache()
        layer.rotary_emb = rope

    return spoil


TABLE = f"{ATTENTION}.rotary_emb.cos_sin_cache: wanted rope_type "


def test_the_other_pairing_is_refused(loaded_mla: Loaded, loaded_llama: Loaded) -> None:
    for loaded, wanted, found, is_neox in (
        (loaded_mla, "interleaved", "half_split", True),
        (loaded_llama, "half_split", "interleaved", False),
    ):
        reason = refusal(spoiled(loaded, turned_by(is_neox_style=is_neox)))
        assert reason == (
            f"{ATTENTION}.rotary_emb: wanted {wanted}, pairing of channels; found {found}"
        )


def test_a_pairing_that_the_configuration_does_not_have_is_refused(loaded_mla: Loaded) -> None:
    reason = refusal(spoiled(loaded_mla, rope_interleave=False))
    assert "wanted half_split, pairing of channels; found interleaved" in reason


@pytest.mark.parametrize(
    "changes",
    [
        {"base": 10_100},
        {"scaling_factor": 4.1},
        {"beta_fast": 64},
        {"mscale": 1.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_latent_table_of_other_parameters_is_refused(
    loaded_mla: Loaded, changes: dict[str, Any]
) -> None:
    reason = refusal(spoiled(loaded_mla, turned_by(**changes)))
    assert reason.startswith(TABLE + "yarn (rope_theta 10000.0, factor 4.0")


def test_a_grouped_table_of_another_theta_is_refused(loaded_llama: Loaded) -> None:
    reason = refusal(spoiled(loaded_llama, turned_by(base=500_000)))
    assert reason.startswith(TABLE + "default (rope_theta 10000.0)")


@pytest.mark.parametrize("kind", ["linear", "llama3", "default"])
def test_a_scaling_that_sglang_takes_for_yarn_is_refused(loaded_mla: Loaded, kind: str) -> None:
    parameters = {**loaded_mla.config["rope_parameters"], "rope_type": kind, "type": kind}
    reason = refusal(spoiled(loaded_mla, rope_parameters=parameters))
    assert reason.startswith(
        f"model.layers.0.self_attn.rotary_emb.cos_sin_cache: wanted rope_type {kind}"
    )


def test_a_scaling_without_a_formula_is_said_not_to_be_checked(loaded_mla: Loaded) -> None:
    parameters = {**loaded_mla.config["rope_parameters"], "rope_type": "longrope"}
    verdict = spoiled(loaded_mla, rope_parameters=parameters).admit()
    assert "rotary table of type 'longrope'" in verdict.left_out
    assert "softmax scale under rope type 'longrope'" in verdict.left_out


def test_two_thetas_are_refused(loaded_llama: Loaded, tmp_path: Path) -> None:
    wanted = "config rope_theta: wanted 10000.0, as in rope_parameters; found 1000000.0"
    assert refusal(spoiled(loaded_llama, rope_theta=1e6)) == wanted
    rewrite_config(write_llama(tmp_path, layers=1), rope_theta=1e6)
    with pytest.raises(admission.AdmissionError) as raised:
        check_written_thetas(str(tmp_path))
    assert str(raised.value) == wanted


@pytest.mark.parametrize("scaled", [1.0, 0.93])
def test_another_softmax_scale_is_refused(loaded_mla: Loaded, scaled: float) -> None:
    def spoil(layer: Any) -> None:
        layer.attn_mqa.scaling = scaled * 64**-0.5  # YaRN's temperature left out, or another one

    reason = refusal(spoiled(loaded_mla, spoil))
    assert reason.startswith(f"{ATTENTION}.attn_mqa.scaling: wanted 0.162")
    assert "softmax scale of 64 channels, factor 4.0, mscale 1.0" in reason
