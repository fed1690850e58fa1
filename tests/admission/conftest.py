"""Models built by SGLang itself, on the CPU and without a server. Each test loads one anew."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import write_mla

if TYPE_CHECKING:
    from loading import Loaded


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[Path], Loaded]]:
    """Loads checkpoints with SGLang's own loader."""
    from loading import Loaded
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import prepare_server_args

    from tessera_sglang.admission import Deployment
    from tessera_sglang.admission.rotary import rope_fields
    from tessera_sglang.admission.seam import config_of, pool_row

    def arguments(path: Path) -> Any:
        flags = ["--model-path", str(path), "--dtype", "float32", "--device", "cpu"]
        return prepare_server_args([*flags, "--attention-backend", "torch_native"])

    started = False

    def load(path: Path) -> Loaded:
        nonlocal started
        server_args = arguments(path)
        if not started:
            publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
            bootstrap.init_parallel_runtime(
                server_args=server_args, device="cpu", dist_port=_free_port()
            )
            started = True
        model_config = ModelConfig.from_server_args(server_args)
        bootstrap.init_layer_runtime(model_config=model_config)
        before = rope_fields(config_of(model_config))
        model = get_model(
            model_config=model_config,
            load_config=LoadConfig(),
            device_config=DeviceConfig("cpu"),
        )
        mla = model_config.attention_arch == AttentionArch.MLA
        return Loaded(
            model,
            {**config_of(model_config), **before},
            Deployment(1, torch.float32, pool_row(model_config, mla=mla, ranks=1)),
        )

    yield load
    if started:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    reset_context()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def loaded_mla(load: Any, mla_model: Path) -> Loaded:
    found: Loaded = load(mla_model)
    return found


@pytest.fixture(scope="session")
def lite_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a latent of the query."""
    return write_mla(tmp_path_factory.mktemp("lite"), query_latent=None)


@pytest.fixture
def loaded_lite(load: Any, lite_model: Path) -> Loaded:
    found: Loaded = load(lite_model)
    return found


@pytest.fixture
def loaded_llama(load: Any, llama_model: Path) -> Loaded:
    found: Loaded = load(llama_model)
    return found
