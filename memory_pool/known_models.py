"""Models whose geometry can be asked for by name, and figures that were printed for them.

Configs hold the fields that decide the cache, written by hand from the numbers published at each
source. Printed figures are kept as printed, so that whoever compares them with the ledger sees
which ones are rounded, mislabelled or cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

K = 1 << 10  # a context of 128K tokens has 131,072
M = 1 << 20


class Unit(Enum):
    """What a printed figure was computed in, whatever its label says: bytes, or none for a quotient."""

    BYTE = ("B", 1)
    KB = ("KB", 1000)
    KIB = ("KiB", 1 << 10)
    MIB = ("MiB", 1 << 20)
    GIB = ("GiB", 1 << 30)
    TIMES = ("x", 1)
    PERCENT = ("%", 1)

    @property
    def sign(self) -> str:
        """As it is written behind a number."""
        return self.value[0]

    @property
    def size(self) -> int:
        """Bytes in one of it; 1 for a quotient."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Printed:
    """One figure as a publication prints it."""

    of: str  # a format of the ledger ("bf16"), a quotient of two ("mha/bf16"), a layer kind, "window"
    figure: str  # digits as printed: they say how far it was rounded
    unit: Unit
    source: str
    tokens: int = 1  # of the context that it is for
    remark: str = ""  # what is known of why it differs


@dataclass(frozen=True, slots=True)
class KnownModel:
    """The fields of a config that decide its cache, where they are published, and printed figures."""

    config: Mapping[str, object]
    source: str
    printed: tuple[Printed, ...] = ()


def _mla(model_type: str, layers: int, heads: int, **more: object) -> dict[str, object]:
    """Every published model with latents of this kind has the same widths."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        **more,
    }


def _v4(layers: int, heads: int, hidden: int, first: int) -> dict[str, object]:
    """CSA and HCA in turn behind two layers of ratio ``first``; the last ratio is the MTP head's."""
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "hidden_size": hidden,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "index_head_dim": 128,
        "compress_ratios": [first, first, *([4, 128] * layers)[: layers - 2], 0],
    }


def _grouped(
    layers: int, heads: int, kv_heads: int, hidden: int, **more: object
) -> dict[str, object]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        **more,
    }


_HUB = "https://huggingface.co/{}/blob/main/config.json"
_V3_HARDWARE = "arXiv:2505.09343, table 1"
_COMPARISON = "comparison for DeepSeek-V3 at 128K, labelled GB"
_V2_NOTE = "note on DeepSeek-V2 at 4,096 tokens"
_V4_TABLE = "table of DeepSeek-V4 bytes per token and layer"
_VLLM = "https://vllm.ai/blog/deepseek-v4"
_V4_CARD = "https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro, model card"
_GQA_SHARE = "https://huggingface.co/blog/deepseekv4"
_CUT = "the printed value is an integer division"

_V4_LAYERS = (
    Printed("CSA", "160", Unit.BYTE, _V4_TABLE),
    Printed("HCA", "4", Unit.BYTE, _V4_TABLE, remark=_CUT),
    Printed("window", "576", Unit.BYTE, _V4_TABLE),
)

_V3_PRINTED = (
    Printed("bf16", "70.272", Unit.KB, _V3_HARDWARE),
    Printed("mha", "488.0", Unit.GIB, _COMPARISON, 128 * K),
    Printed(
        "bf16",
        "8.68",
        Unit.GIB,
        _COMPARISON,
        128 * K,
        "how it came about is not known; 8.578125 is exact",
    ),
    Printed("mha/bf16", "56.2", Unit.TIMES, _COMPARISON, 128 * K, "follows from 8.68"),
    Printed(
        "fp8-packed",
        "4.84",
        Unit.GIB,
        _COMPARISON,
        128 * K,
        "how it came about is not known; rows of 656 B give 4.8848",
    ),
)

KNOWN: Mapping[str, KnownModel] = {
    "deepseek-v2": KnownModel(
        _mla("deepseek_v2", 60, 128),
        _HUB.format("deepseek-ai/DeepSeek-V2") + "; arXiv:2405.04434",
        (
            Printed("bf16", "67.5", Unit.KIB, _V2_NOTE),
            Printed("bf16", "270", Unit.MIB, _V2_NOTE, 4 * K),
            Printed("expanded", "18.75", Unit.GIB, _V2_NOTE, 4 * K),
            Printed("expanded/bf16", "71.1", Unit.TIMES, _V2_NOTE, 4 * K),
        ),
    ),
    "deepseek-v2-lite": KnownModel(
        _mla("deepseek_v2", 27, 16),
        _HUB.format("deepseek-ai/DeepSeek-V2-Lite") + "; arXiv:2405.04434",
    ),
    "deepseek-v3": KnownModel(
        _mla("deepseek_v3", 61, 128),
        _HUB.format("deepseek-ai/DeepSeek-V3") + "; arXiv:2412.19437",
        _V3_PRINTED,
    ),
    "deepseek-r1": KnownModel(
        _mla("deepseek_v3", 61, 128), _HUB.format("deepseek-ai/DeepSeek-R1"), _V3_PRINTED
    ),
    "deepseek-v3.2": KnownModel(
        _mla("deepseek_v32", 61, 128, index_head_dim=128),
        _HUB.format("deepseek-ai/DeepSeek-V3.2"),
    ),
    "deepseek-v4-flash": KnownModel(
        _v4(43, 64, 4096, first=0),
        _HUB.format("deepseek-ai/DeepSeek-V4-Flash"),
        (
            *_V4_LAYERS,
            Printed("fp8-packed/v3.2", "7", Unit.PERCENT, _V4_CARD, M),
            Printed("fp8-packed/gqa8", "2", Unit.PERCENT, _GQA_SHARE, M),
        ),
    ),
    "deepseek-v4-pro": KnownModel(
        _v4(61, 128, 7168, first=128),
        _HUB.format("deepseek-ai/DeepSeek-V4-Pro"),
        (
            *_V4_LAYERS,
            Printed("fp8-packed/v3.2", "10", Unit.PERCENT, _V4_CARD, M),
            Printed("bf16", "9.62", Unit.GIB, _VLLM, M),
            Printed("fp8-packed/gqa8", "2", Unit.PERCENT, _GQA_SHARE, M),
        ),
    ),
    "kimi-k2": KnownModel(
        _mla("kimi_k2", 61, 64), _HUB.format("moonshotai/Kimi-K2-Instruct") + "; arXiv:2507.20534"
    ),
    "moonlight": KnownModel(
        _mla("deepseek_v3", 27, 16), _HUB.format("moonshotai/Moonlight-16B-A3B")
    ),
    "mistral-large-3": KnownModel(
        _mla("deepseek_v3", 61, 128, architectures=["MistralLarge3ForCausalLM"]),
        "https://huggingface.co/mistralai/Mistral-Large-3-675B-Instruct-2512/blob/main/params.json, "
        "DeepSeek-V3's attention under Mistral's names; SGLang loads it as deepseek_v3",
    ),
    "llama-2-7b": KnownModel(_grouped(32, 32, 32, 4096), _HUB.format("meta-llama/Llama-2-7b-hf")),
    "llama-3.1-8b": KnownModel(_grouped(32, 32, 8, 4096), _HUB.format("meta-llama/Llama-3.1-8B")),
    "llama-3.1-405b": KnownModel(
        _grouped(126, 128, 8, 16384),
        _HUB.format("meta-llama/Llama-3.1-405B"),
        (Printed("bf16", "516.096", Unit.KB, _V3_HARDWARE),),
    ),
    "qwen2.5-72b": KnownModel(
        _grouped(80, 64, 8, 8192, model_type="qwen2", use_sliding_window=False),
        _HUB.format("Qwen/Qwen2.5-72B-Instruct"),
        (Printed("bf16", "327.680", Unit.KB, _V3_HARDWARE),),
    ),
    "qwen3-8b": KnownModel(
        _grouped(36, 32, 8, 4096, model_type="qwen3", head_dim=128),
        _HUB.format("Qwen/Qwen3-8B"),
    ),
    "smollm2-135m": KnownModel(
        _grouped(30, 9, 3, 576), _HUB.format("HuggingFaceTB/SmolLM2-135M-Instruct")
    ),
}
