"""Models that the server tests share: written once for the session, random, float32."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two busy cores: more threads only wait for each other
sys.path.insert(0, str(Path(__file__).parent))  # helpers: models, oracle, server, prompts

from models import write_llama, write_mla


@pytest.fixture(scope="session")
def mla_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3."""
    return write_mla(tmp_path_factory.mktemp("mla"))


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with grouped heads."""
    return write_llama(tmp_path_factory.mktemp("llama"))
