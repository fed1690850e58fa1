"""Which KV pools the backend serves; what it computes is tested in `tests/serving`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

backend = pytest.importorskip("tessera_sglang.backend", exc_type=ImportError)

from tessera_sglang.compat import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402 # after the skip

COMMON: dict[str, Any] = {
    "size": 128,
    "page_size": 64,
    "layer_num": 1,
    "device": "cpu",
    "enable_memory_saver": False,
}


def grouped(kind: Any = MHATokenToKVPool, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return kind(dtype=dtype, head_num=2, head_dim=8, **COMMON, **more)


def refusal(pool: Any) -> str:
    with pytest.raises(backend.UnservableError) as caught:
        backend._check_pool(pool)
    return str(caught.value)


def test_the_pools_that_sglang_makes_are_served() -> None:
    backend._check_pool(grouped())
    backend._check_pool(
        MLATokenToKVPool(dtype=torch.float32, kv_lora_rank=32, qk_rope_head_dim=8, **COMMON)
    )


def test_a_pool_with_heads_before_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    pool = grouped()
    assert pool.get_key_buffer(0).shape[1:] != (2, 8), "not rows of tokens"
    message = refusal(pool)
    assert "'hnd'" in message
    assert "unset SGLANG_USE_HND_KVCACHE" in message


def test_a_layout_that_nobody_knows_is_refused() -> None:
    pool = grouped()
    pool.kv_cache_layout = "vectorized_5d"
    assert "'vectorized_5d'" in refusal(pool)


def test_a_pool_of_another_kind_or_dtype_is_refused() -> None:
    class OtherPool(MHATokenToKVPool):  # type: ignore[misc] # untyped base
        pass

    assert "OtherPool" in refusal(grouped(OtherPool))
    assert "drop --kv-cache-dtype" in refusal(grouped(dtype=torch.float8_e5m2))
