"""Where SGLang calls admission: before the model is built, and before the KV pool is allocated."""

from __future__ import annotations

import logging
from typing import Any

from tessera_sglang.compat import attention_backends, get_parallel
from tessera_sglang.config import BACKEND
from tessera_sglang.survey import foreign_of

from . import admit
from .checks import Config, Deployment
from .rotary import check_written_thetas, rope_fields

logger = logging.getLogger(__name__)


def remember_config(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``ModelRunner.load_model``: building a DeepSeek model writes over its rope type."""
    if BACKEND in attention_backends():
        runner.tessera_rope_fields = rope_fields(config_of(runner.model_config))


def admit_model(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``ModelRunner.alloc_memory_pool``. Raises AdmissionError, which ends the start."""
    if BACKEND not in attention_backends() or runner.is_draft_worker:
        return
    check_written_thetas(runner.model_config.model_path)
    config = config_of(runner.model_config)
    config = {**config, **getattr(runner, "tessera_rope_fields", {})}
    foreign = foreign_of(runner.model) is not None
    parallel = get_parallel()
    deployment = Deployment(
        ranks=parallel.attn_tp_size,
        cache_dtype=None if foreign else runner.kv_cache_dtype,
        pool_row=pool_row(
            runner.model_config, mla=runner.use_mla_backend, ranks=parallel.attn_tp_size
        ),
        values=runner.startup_weight_load is None,  # else weights come while the pool is made
    )
    logger.info("%s", admit(runner.model, config, deployment, whole=parallel.pp_size == 1))


def config_of(model_config: Any) -> Config:
    """The text model's configuration, with the fields that SGLang adds to the object."""
    config = model_config.hf_text_config
    return {**config.to_dict(), **vars(config)}


def pool_row(model_config: Any, *, mla: bool, ranks: int) -> tuple[int, ...]:
    """What SGLang is about to size its pool by."""
    if mla:
        return model_config.kv_lora_rank, model_config.qk_rope_head_dim
    return model_config.get_num_kv_heads(ranks), model_config.head_dim, model_config.v_head_dim
