"""Contradictory flags stop the start, naming both and the remedy (case 31)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tessera_sglang.config import Config, ConfigError

startup = pytest.importorskip("tessera_sglang.startup", exc_type=ImportError)

CONTENT, RADIX = Config(), Config(index="radix")

PLAIN: dict[str, Any] = {
    "attention_backend": "tessera",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "device": "cpu",
    "page_size": 64,
    "kv_cache_dtype": "auto",
    "enable_two_batch_overlap": False,
    "enable_dp_attention": False,
    "enable_pdmux": False,
    "dcp_size": 1,
    "attn_cp_size": 1,
    "attn_dp_size": 1,
    "tp_size": 1,
    "disable_radix_cache": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
    "enable_session_radix_cache": False,
    "enable_streaming_session": False,
    "enable_hisparse": False,
    "radix_cache_backend": None,
    "speculative_algorithm": None,
    "kv_events_config": None,
    "dllm_algorithm": None,
    "disaggregation_mode": "null",
    "radix_eviction_policy": "lru",
    "radix_eviction_policy_config": None,
    "pp_size": 1,
    "tokenizer_worker_num": 1,
}
"""The resolved view of a server that is told ``--attention-backend tessera`` and nothing else."""

ALWAYS = [
    ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype fp8_e4m3", "use --kv-cache-dtype auto"),
    ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2", "use --kv-cache-dtype auto"),
    ("kv_cache_dtype", "fp4_e2m1", "--kv-cache-dtype fp4_e2m1", "use --kv-cache-dtype auto"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap", "drop the flag"),
    ("enable_dp_attention", True, "--enable-dp-attention", "drop the flag"),
    ("enable_pdmux", True, "--enable-pdmux", "drop the flag"),
    ("dcp_size", 2, "--dcp-size 2", "drop the flag"),
    ("attn_cp_size", 2, "--attn-cp-size 2", "drop the flag"),
    ("attn_dp_size", 2, "--attn-dp-size 2", "drop the flag"),
]
WITH_CONTENT = [
    ("disable_radix_cache", True, "--disable-radix-cache"),
    ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
    ("enable_lmcache", True, "--enable-lmcache"),
    ("enable_flexkv", True, "--enable-flexkv"),
    ("enable_unified_cache_external_linker", True, "--enable-unified-cache-external-linker"),
    ("enable_session_radix_cache", True, "--enable-session-radix-cache"),
    ("enable_streaming_session", True, "--enable-streaming-session"),
    ("enable_hisparse", True, "--enable-hisparse"),
    ("radix_cache_backend", "cpp", "--radix-cache-backend cpp"),
    ("speculative_algorithm", "EAGLE", "--speculative-algorithm EAGLE"),
    ("kv_events_config", "{}", "--kv-events-config {}"),
    ("dllm_algorithm", "LowConfidence", "--dllm-algorithm LowConfidence"),
    ("disaggregation_mode", "prefill", "--disaggregation-mode prefill"),
    ("disaggregation_mode", "decode", "--disaggregation-mode decode"),
    ("radix_eviction_policy", "tlru", "--radix-eviction-policy tlru"),
    ("radix_eviction_policy", "priority", "--radix-eviction-policy priority"),
    (
        "radix_eviction_policy_config",
        {"protected_threshold": 2},
        '--radix-eviction-policy-config {"protected_threshold": 2}',
    ),
    ("pp_size", 2, "--pp-size 2"),
    ("tokenizer_worker_num", 2, "--tokenizer-worker-num 2"),
]


def check(config: Config = CONTENT, *, mla: bool = True, **flags: Any) -> None:
    assert flags.keys() <= PLAIN.keys()
    startup.check(SimpleNamespace(**{**PLAIN, **flags}), config, mla=mla)


def refusal(config: Config = CONTENT, *, mla: bool = True, **flags: Any) -> str:
    with pytest.raises(startup.StartupError) as caught:
        check(config, mla=mla, **flags)
    return str(caught.value)


@pytest.mark.parametrize("config", [CONTENT, RADIX], ids=["content", "radix"])
@pytest.mark.parametrize("mla", [True, False], ids=["mla", "gqa"])
def test_nothing_stands_in_the_way_of_the_backend_alone(config: Config, mla: bool) -> None:
    check(config, mla=mla)
    check(config, mla=mla, attention_backend=None, **_both_phases("tessera"))


def test_a_root_that_is_not_whole_pages_is_refused_before_the_model_is_loaded() -> None:
    message = refusal(Config(span_root=[20] * 63))
    assert "span_root has 63 token ids" in message
    assert "whole pages of 64" in message
    check(Config(span_root=[20] * 128))


def _both_phases(name: str) -> dict[str, str]:
    return {"prefill_attention_backend": name, "decode_attention_backend": name}


@pytest.mark.parametrize("config", [CONTENT, RADIX], ids=["content", "radix"])
@pytest.mark.parametrize(("field", "value", "flag", "remedy"), ALWAYS)
def test_a_flag_that_the_backend_can_not_meet_is_refused_with_any_index(
    field: str, value: Any, flag: str, remedy: str, config: Config
) -> None:
    message = refusal(config, **{field: value})
    assert message.startswith(f"{flag} with --attention-backend tessera: ")
    assert message.endswith(f"; {remedy}")


@pytest.mark.parametrize(("field", "value", "flag"), WITH_CONTENT)
def test_a_flag_that_the_content_index_can_not_meet_is_refused_with_it_only(
    field: str, value: Any, flag: str
) -> None:
    message = refusal(**{field: value})
    assert message.startswith(f'{flag} with the content index (TESSERA_CONFIG index "content"): ')
    assert 'drop the flag, or set TESSERA_CONFIG=\'{"index": "radix"}\'' in message
    check(RADIX, device="cuda", **{field: value})


def test_an_index_that_never_hits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RADIX_FORCE_MISS", "1")
    assert refusal().startswith("SGLANG_RADIX_FORCE_MISS with the content index")
    check(RADIX)


@pytest.mark.parametrize(
    "backends",
    [
        {"prefill_attention_backend": "triton"},
        {"decode_attention_backend": "triton"},
        {"attention_backend": "triton", "decode_attention_backend": "tessera"},
    ],
)
def test_one_phase_alone_is_refused(backends: dict[str, Any]) -> None:
    message = refusal(RADIX, **backends)
    assert "--prefill-attention-backend and --decode-attention-backend resolve to" in message
    assert str(backends.get("attention_backend", "triton")) in message
    assert "use --attention-backend tessera alone" in message


@pytest.mark.parametrize("page", [1, 16, 32, 63, 65, 96])
def test_a_page_that_mla_kernels_can_not_read_is_refused(page: int) -> None:
    message = refusal(RADIX, page_size=page)
    assert message.startswith(f"--page-size {page} with --attention-backend tessera on an MLA")
    assert message.endswith("drop --page-size")
    check(RADIX, mla=False, page_size=page)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "bf16", "float16", "fp16", "float32"])
def test_rows_that_the_kernel_reads_are_allowed(dtype: str) -> None:
    check(kv_cache_dtype=dtype)


@pytest.mark.parametrize("value", [None, "null"])
def test_a_server_that_is_not_disaggregated_is_allowed(value: str | None) -> None:
    check(disaggregation_mode=value, radix_eviction_policy=None, dcp_size=None, attn_cp_size=None)


# --- on SGLang's own record ----------------------------------------------------------------------


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("TESSERA_CONFIG", raising=False)
    return startup.compat


def arguments(**flags: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="unused", **flags)


def resolved(compat: Any, **flags: Any) -> Any:
    """The view after our step of the resolution."""
    record = arguments(**flags)
    passed: list[Any] = []
    startup.choose_defaults(record, passed.append)
    assert passed == [record], "the step it wraps runs"
    return compat.resolving_view(record)


def test_an_explicit_page_of_64_is_as_good_as_none(compat: Any) -> None:
    chosen = resolved(compat, attention_backend="tessera")
    explicit = resolved(compat, attention_backend="tessera", page_size=64)
    assert chosen.page_size == explicit.page_size == startup.PAGE_TOKENS == 64
    assert chosen.disable_cuda_graph is explicit.disable_cuda_graph is True
    for view in (chosen, explicit):
        startup.check(view, CONTENT, mla=True)


def test_an_explicit_page_is_kept(compat: Any) -> None:
    view = resolved(compat, attention_backend="tessera", page_size=128)
    assert view.page_size == 128


def test_every_field_that_is_looked_at_exists_in_this_sglang(compat: Any) -> None:
    view = resolved(compat, attention_backend="tessera")
    assert {field: getattr(view, field) for field in PLAIN} == PLAIN


@pytest.mark.parametrize("backend", [None, "triton"])
def test_a_server_of_another_backend_is_left_alone(
    backend: str | None, compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", "not JSON")
    view = resolved(compat, attention_backend=backend, page_size=None)
    assert view.page_size is None
    passed: list[Any] = []
    record = arguments(attention_backend=backend, disable_radix_cache=True)
    startup.refuse_contradictions(record, passed.append)
    assert passed == [record]


@pytest.mark.parametrize(
    "field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"]
)
def test_any_of_the_three_flags_selects_tessera(field: str, compat: Any) -> None:
    assert startup.selected(arguments(**{field: "tessera"}))
    assert not startup.selected(arguments(**{field: "triton"}))


def test_a_bad_configuration_stops_the_start(compat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CONFIG", '{"link_pages": -1}')
    with pytest.raises(ConfigError, match="link_pages"):
        resolved(compat, attention_backend="tessera")


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
def test_a_policy_that_the_index_knows_is_allowed(policy: str) -> None:
    check(radix_eviction_policy=policy)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "2", None])
def test_a_threshold_that_is_no_number_of_uses_is_refused(value: Any) -> None:
    with pytest.raises(startup.StartupError, match="protected_threshold"):
        check(
            radix_eviction_policy="slru",
            radix_eviction_policy_config={"protected_threshold": value},
        )


def test_a_threshold_for_slru_is_allowed() -> None:
    check(radix_eviction_policy="slru", radix_eviction_policy_config={"protected_threshold": 4})


def test_latents_are_not_compared_across_ranks() -> None:
    latents = Config(verify="latents")
    check(latents)
    check(tp_size=2)
    with pytest.raises(startup.StartupError, match=r'verify "latents" with --tp-size 2'):
        check(latents, tp_size=2)


def test_a_model_that_picks_its_keys_has_rows_of_its_own() -> None:
    view = SimpleNamespace(**{**PLAIN, "kv_cache_dtype": "fp8_e4m3"})
    startup.check(view, CONTENT, mla=True, sparse=True)


# --- drafts --------------------------------------------------------------------------------------


@pytest.fixture
def radix(compat: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TESSERA_CONFIG", '{"index": "radix"}')
    return compat


NGRAM: dict[str, Any] = {"attention_backend": "tessera", "speculative_algorithm": "NGRAM"}


def speculated(**flags: Any) -> Any:
    """The view after our defaults, SGLang's page size and SGLang's own look at drafts."""
    from sglang.srt.arg_groups.overrides import _page_size_default, run_post_process_pass
    from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding

    record = arguments(**flags)
    startup.choose_defaults(record, lambda record: None)
    run_post_process_pass(record, _page_size_default)
    startup.place_drafts(record, handle_speculative_decoding)
    return startup.compat.resolving_view(record)


def test_the_tree_drafts_in_the_pages_that_sglang_takes(
    radix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radix, "picks_keys", lambda record: False)
    monkeypatch.setattr(radix, "default_backend_of", lambda record: "fa3")
    view = speculated(device="cuda", **NGRAM)
    assert view.page_size == 1
    assert view.speculative_draft_attention_backend == "fa3"
    check(RADIX, device="cuda", page_size=1, speculative_algorithm="NGRAM")
    with pytest.raises(ValueError, match=r"page_size\(64\) > 1 is unstable"):
        speculated(device="cuda", page_size=64, **NGRAM)  # what our own default would end in


def test_drafts_run_on_a_backend_of_sglangs(radix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "picks_keys", lambda record: True)
    assert speculated(device="cuda", **NGRAM).speculative_draft_attention_backend == "dsa"
    named = speculated(device="cuda", speculative_draft_attention_backend="triton", **NGRAM)
    assert named.speculative_draft_attention_backend == "triton"
    other = speculated(device="cuda", attention_backend="flashinfer", speculative_algorithm="NGRAM")
    assert other.speculative_draft_attention_backend is None


def test_drafts_are_refused_before_sglang_looks_at_them(
    compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(startup.StartupError) as caught:
        speculated(device="cuda", **NGRAM)
    assert str(caught.value).startswith("--speculative-algorithm NGRAM with the content index")
    monkeypatch.setenv("TESSERA_CONFIG", '{"index": "radix"}')
    with pytest.raises(startup.StartupError, match="they verify no drafts; drop the flag"):
        speculated(device="cpu", **NGRAM)
    assert "verify no drafts" in refusal(RADIX, speculative_algorithm="NGRAM")


def test_pages_of_a_plain_server_are_ours_with_either_index(radix: Any) -> None:
    assert resolved(radix, attention_backend="tessera").page_size == 64
