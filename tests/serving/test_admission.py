"""Admission in a real server: before a page is allocated, the line it logs or the reason it stops."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from models import rewrite_config
from server import Server

POOL = "KV Cache is allocated"  # what SGLang says of its pool


def copied(model: Path, directory: Path, **fields: Any) -> Path:
    """The checkpoint under a configuration that its weights do not have."""
    shutil.copytree(model, directory)
    return rewrite_config(directory, **fields)


@pytest.mark.slow
def test_ranks_of_a_latent_model_are_admitted(mla_model: Path) -> None:
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(mla_model, "--tp-size", "2", environment=environment) as server:
        log = server.log()
    wanted = "admission: 27 tensors of 3 layers fit the geometry (MLA, 2 heads of 32+32, row 64+32"
    assert log.count(wanted) == 2
    assert log.count("absorbed weights, yarn rotary table, projection path)") == 2
    assert log.index(wanted) < log.index(POOL)


@pytest.mark.slow
def test_a_model_of_grouped_heads_is_admitted(llama_model: Path) -> None:
    with Server(llama_model) as server:
        log = server.log()
    assert "admission: 9 tensors of 3 layers fit the geometry (4 query and 2 KV heads of 32" in log
    assert "not checked" not in log


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    (  # SGLang would build YaRN of it
        {
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 10000.0,
                "factor": 4.0,
            }
        },
        ["model.layers.0.self_attn.rotary_emb.cos_sin_cache: wanted rope_type linear"],
    ),
    (  # transformers would drop it
        {"rope_theta": 1000000.0},
        ["config rope_theta: wanted 10000.0, as in rope_parameters; found 1000000.0"],
    ),
]


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=["scaling", "theta"])
def test_a_wrong_checkpoint_stops_before_a_page_is_allocated(
    mla_model: Path, tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    server = Server(copied(mla_model, tmp_path / "wrong", **fields))
    with pytest.raises(RuntimeError, match="did not start"):
        server.start()
    log = server.log()
    for word in ["AdmissionError", *words]:
        assert word in log, word
    assert POOL not in log
