"""Where Tessera meets a running SGLang: the functions that the hooks call, and the list of hooks."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from tessera_sglang.attention.kernels.base import Phase

from . import hints, ignored, metrics, scheduling, spans
from .accounting import account, correct_prefill_stats, count_asked
from .admission.seam import admit_model, remember_config
from .backend import TesseraBackend
from .batches import mark_readers
from .cache import TesseraCache
from .compat import (
    Hook,
    HookType,
    MLATokenToKVPool,
    attention_backends,
    default_backend_name,
    verify,
)
from .config import BACKEND, load
from .endpoints import anthropic, chat, generate
from .graphs import (
    SpanGraphs,
    can_run_graph,
    can_run_prefill_graph,
    graph_variants,
    serve,
)
from .inspection import add_state, log_resolved
from .intake import SpanIntake, SpanSettings
from .kernels import keep_router, make_router, stock_of
from .kv_memory import compare_with_ledger
from .publication import rope_hash, run_pass
from .reader import is_span_prefill
from .root import root_tokens
from .stock import build_stock, keep_prefix_chunks, register_forward_method, stand_aside
from .survey import LatentRow, Survey, survey
from .tier_stack import manifest_of, tiers_of
from .v4_serving import config as v4_config
from .v4_serving import pool as v4_pool
from .v4_serving.backend import V4Backend
from .v4_serving.cache import V4Cache

logger = logging.getLogger(__name__)


def _active() -> bool:
    return BACKEND in attention_backends()


# --- model and backend ---------------------------------------------------------------------------


def survey_of(runner: Any) -> Survey:
    """The verdict on a runner's model, made once."""
    found = getattr(runner, "tessera_survey", None)
    if found is None:
        pool = runner.token_to_kv_pool
        latent = None
        if isinstance(pool, MLATokenToKVPool):
            latent = LatentRow(pool.kv_lora_rank, pool.qk_rope_head_dim)
        if v4_pool.is_v4_pool(pool):
            refusal = v4_config.refusal(runner.model.config)
            found = Survey(foreign=v4_config.SERVED_BY, refusal=refusal)
        else:
            found = survey(runner.model, runner.model_config.hf_text_config, latent)
        runner.tessera_survey = found
    return found


def make_backend(runner: Any) -> Any:
    """Factory of ``--attention-backend tessera``."""
    verify(HOOKS)
    if v4_pool.is_v4_pool(getattr(runner, "token_to_kv_pool", None)):
        logger.info("attention: %s, a request at a time", v4_config.SERVED_BY)
        return V4Backend()
    register_forward_method()
    verdict = survey_of(runner)
    if verdict.foreign is not None:
        name = verdict.stock or default_backend_name(runner)
        logger.warning(
            "attention goes to SGLang's %s backend, with prefix reuse and without spans: %s",
            name,
            verdict.foreign,
        )
        return stand_aside(build_stock(runner, name, name))
    config = load()
    router = make_router(runner, config.kernel)
    choice = stock_of(runner, router)
    if choice.names is None:
        logger.info("plain batches: the same kernels (%s)", choice.reason)
        keep_router(runner, router)
        return TesseraBackend(runner, verdict, router)
    logger.info(
        "plain batches: SGLang's %s prefill and %s decode (%s)", *choice.names, choice.reason
    )
    stock = build_stock(runner, *choice.names)
    if config.index == "radix":  # nobody reads spans, so every batch is plain
        return stand_aside(stock)
    keep_router(runner, router)
    graphs = None
    if verdict.refusal is None and router.kernel(Phase.DECODE).capabilities.graph_safe:
        graphs = SpanGraphs(context_tokens=runner.model_config.context_len, device=runner.device)
        serve(graphs)
    return TesseraBackend(runner, verdict, router, stock, graphs)


# --- cache and intake ----------------------------------------------------------------------------


def make_cache(original: Any, ctx: Any) -> Any:
    """Around ``default_radix_cache_factory``: the content index where it can serve."""
    if not _active():
        return original(ctx)
    config = load()
    if config.index == "radix":
        logger.info(
            "index: SGLang's own tree (TESSERA_CONFIG index radix); spans are ordinary text"
        )
        return original(ctx)
    if ctx.is_hybrid_swa or ctx.is_hybrid_ssm:
        logger.warning("index: SGLang's own tree; a hybrid pool has windows or states to keep")
        return original(ctx)
    model = ctx.model_config
    identity = "|".join(
        str(part)
        for part in (
            model.hf_config.architectures,
            model.model_path,
            model.revision,
            model.dtype,
            ctx.params.token_to_kv_pool_allocator.get_kvcache().dtype,
            ctx.params.page_size,
            ctx.tp_size,
        )
    )
    logger.info("index: content index, pages of %d tokens", ctx.params.page_size)
    rotation = survey_of(ctx.tp_worker.model_runner).rotation
    rope = rope_hash(
        getattr(model, "hf_text_config", model.hf_config),
        pairing=rotation.pairing.value if rotation is not None else "unknown",
    )
    manifest = None
    if config.store is not None:  # names that another process has to find again
        manifest = manifest_of(ctx, rope=rope, identity=identity, key=config.store)
        identity = manifest.digest
    v4 = v4_pool.is_v4_pool(ctx.params.token_to_kv_pool_allocator.get_kvcache())
    cache = (V4Cache if v4 else TesseraCache)(
        ctx.params,
        model_identity=identity,
        rope_hash=rope,
        verify_latents=config.verify == "latents",
        tiers=tiers_of(config, manifest),
    )
    if v4:
        logger.info("index: prefixes end at pages whose state was saved")
    elif cache.memory is None:
        logger.info("index: partly equal pages are computed, not forked: unknown pool layout")
    else:
        compare_with_ledger(
            cache.memory,
            config=getattr(model, "hf_text_config", model.hf_config),
            dtype=ctx.params.token_to_kv_pool_allocator.get_kvcache().dtype,
            page_size=ctx.params.page_size,
            tensor_parallel=ctx.tp_size,
        )
    return cache


def make_intake(result: Any, scheduler: Any) -> Any:
    """After ``Scheduler.init_schedule_policy``: the cache and the tokenizer are there."""
    if not _active() or (config := load()).index == "radix":
        return result
    verdict = survey_of(scheduler.tp_worker.model_runner)
    cache = scheduler.tree_cache
    if not isinstance(cache, TesseraCache):
        scheduler.tessera_refusal = verdict.refusal or "the model's pool is hybrid"
        return result
    cache.forward_stream = lambda: getattr(scheduler, "forward_stream", None)
    if scheduler.tp_worker.model_runner.ngram_embedding_manager.enabled:
        verdict = dataclasses.replace(
            verdict, refusal="the model embeds n-grams, which a row in another order would change"
        )
    root = root_tokens(
        config.span_root if verdict.refusal is None else "none",
        tokenizer=scheduler.tokenizer,
        vocab_size=scheduler.model_config.vocab_size,
        page_size=cache.page_size,
    )
    settings = SpanSettings(config.link_pages, root, verdict.refusal)
    scheduler.tessera_intake = SpanIntake(scheduler, cache, settings)
    if verdict.refusal is not None:
        logger.warning("spans are refused on this server: %s", verdict.refusal)
    else:
        logger.info("spans: root of %d tokens, link_pages %d", len(root), config.link_pages)
    return result


# --- requests ------------------------------------------------------------------------------------


def check_on_arrival(result: Any, manager: Any, obj: Any, input_ids: Any) -> Any:
    """After ``TokenizerManager._validate_one_request``: a bad declaration is an HTTP 400."""
    if not _active():
        return result
    tokens = len(input_ids) if input_ids is not None else 0
    if not tokens and obj.input_embeds is None and not obj.contains_mm_input():
        raise ValueError("the prompt has no tokens; give a text or input_ids that are not empty")
    if getattr(obj, "input_ids", None) is not None:
        _check_vocabulary(input_ids, manager.model_config.vocab_size)
    if hints.forged(obj.sampling_params):
        raise ValueError(f"custom_params.{hints.FIELD} is set by the server; leave it out")
    try:
        _check_declaration(manager, obj, tokens)
    except spans.SpanError as error:
        if not hints.drop(obj.sampling_params):
            raise
        ignored.count(manager, "request", str(error))
    return result


def _check_declaration(manager: Any, obj: Any, tokens: int) -> None:
    params = obj.sampling_params
    custom = params.get("custom_params") if isinstance(params, dict) else None
    declared = spans.parse(spans.declared(custom), tokens)
    spans.overrides(
        custom,
        page_size=manager.config_value("page_size"),
        vocab_size=manager.model_config.vocab_size,
    )
    if declared:
        spans.check_request(obj, declared, None)


def _check_vocabulary(input_ids: Any, vocab_size: int) -> None:
    """A CPU embedding looks an unknown id up out of bounds, which would end the server."""
    if input_ids and not (min(input_ids) >= 0 and max(input_ids) < vocab_size):
        wrong = next(i for i, token in enumerate(input_ids) if not 0 <= token < vocab_size)
        raise ValueError(
            f"input_ids[{wrong}] = {input_ids[wrong]} is outside the vocabulary of {vocab_size}"
        )


def accept(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``Scheduler._add_request_to_queue``."""
    found: SpanIntake | None = getattr(scheduler, "tessera_intake", None)
    refusal: str | None = getattr(scheduler, "tessera_refusal", None)
    if found is not None:
        refusal = found.settings.refusal
    if refusal is not None and hints.drop(req.sampling_params):
        ignored.count(None, "refused", refusal)
    if found is not None:
        found.accept(req)
        return
    if refusal is not None and req.to_finish is None:
        try:
            if spans.declared(req.sampling_params.custom_params):
                spans.check_request(req, (), refusal)
        except spans.SpanError as error:
            req.set_finish_with_abort(str(error))


def queue_limit(original: Any, scheduler: Any, req: Any) -> Any:
    """Around ``Scheduler._abort_on_queued_limit``: nobody asked for a span prefill, so none counts."""
    if scheduler.max_queued_requests is None:  # no limit: nothing to look through the queue for
        return original(scheduler, req)
    queue = scheduler.waiting_queue
    asked = [waiting for waiting in queue if not is_span_prefill(waiting)]
    if len(asked) == len(queue):
        return original(scheduler, req)
    scheduler.waiting_queue = list(asked)
    try:
        return original(scheduler, req)
    finally:
        kept = {id(waiting) for waiting in scheduler.waiting_queue}
        scheduler.waiting_queue = [
            waiting for waiting in queue if is_span_prefill(waiting) or id(waiting) in kept
        ]


def stream(original: Any, streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``SchedulerOutputStreamer.stream_output``: nobody outside waits for a span prefill."""
    if any(is_span_prefill(req) for req in reqs):
        reqs = [req for req in reqs if not is_span_prefill(req)]
    return original(streamer, reqs, *args, **kwargs)


def send_abort(original: Any, scheduler: Any, abort: Any, req: Any) -> Any:
    """Around ``Scheduler.send_abort_output``: likewise."""
    return None if is_span_prefill(req) else original(scheduler, abort, req)


def weights_change(updater: Any, *args: Any, **kwargs: Any) -> None:
    """Before the scheduler's weights are updated, from wherever."""
    cache = updater.scheduler.tree_cache
    if isinstance(cache, TesseraCache):
        cache.weights_change()


_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_DECODE_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
_REPORTERS = "sglang.srt.managers.scheduler_components.metrics_reporter"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_REPORTER = f"{_REPORTERS}.SchedulerMetricsReporter"
_GATES = "sglang.srt.model_executor.model_runner_components.misc_utils"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
HOOKS = (
    Hook(
        "sglang.srt.utils.hf_transformers.config.get_config",
        HookType.AROUND,
        v4_config.load_config,
    ),
    Hook(f"{_RUNNER}.initialize", HookType.BEFORE, v4_config.register),
    Hook(f"{_CONFIGURATOR}._resolve_kv_pool_class", HookType.AROUND, v4_pool.pool_class),
    Hook(f"{_RUNNER}.alloc_memory_pool", HookType.AFTER, v4_pool.attach),
    Hook(f"{_GATES}.maybe_disable_chunked_prefix_cache", HookType.BEFORE, keep_prefix_chunks),
    Hook(f"{_RUNNER}.load_model", HookType.BEFORE, remember_config),
    Hook(f"{_RUNNER}.alloc_memory_pool", HookType.BEFORE, admit_model),
    Hook("sglang.srt.mem_cache.registry.default_radix_cache_factory", HookType.AROUND, make_cache),
    Hook(f"{_SCHEDULER}.init_schedule_policy", HookType.AFTER, make_intake),
    Hook(f"{_SCHEDULER}.init_schedule_policy", HookType.AFTER, log_resolved),
    Hook(
        f"{_TOKENIZER}._validate_one_request",
        HookType.AFTER,
        check_on_arrival,
    ),
    Hook(f"{_TOKENIZER}._tokenize_one_request", HookType.AROUND, generate.tokenize),
    Hook(
        f"{_TOKENIZER}._should_use_batch_tokenization",
        HookType.AROUND,
        generate.tokenize_in_batches,
    ),
    Hook(f"{_CHAT}.handle_request", HookType.AROUND, chat.chat_arrives),
    Hook(f"{_CHAT}._convert_to_internal_request", HookType.AROUND, chat.convert),
    Hook(f"{_CHAT}._render_and_encode_chat_template", HookType.AROUND, chat.render),
    Hook(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages",
        HookType.AROUND,
        anthropic.messages_arrive,
    ),
    Hook(f"{_SCHEDULER}._add_request_to_queue", HookType.BEFORE, accept),
    Hook(f"{_SCHEDULER}._abort_on_queued_limit", HookType.AROUND, queue_limit),
    Hook(f"{_SCHEDULER}._get_new_batch_prefill_raw", HookType.AROUND, scheduling.schedule),
    Hook(f"{_SCHEDULER}.maybe_sleep_on_idle", HookType.AROUND, scheduling.stay_awake),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        HookType.AROUND,
        scheduling.admit,
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        HookType.AFTER,
        account,
    ),
    Hook(f"{_SCHEDULER}.run_batch", HookType.AROUND, run_pass),
    Hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        HookType.AFTER,
        mark_readers,
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer"
        ".SchedulerOutputStreamer.stream_output",
        HookType.AROUND,
        stream,
    ),
    Hook(f"{_SCHEDULER}.send_abort_output", HookType.AROUND, send_abort),
    Hook(f"{_DECODE_RUNNER}.create_attention_graph_variants", HookType.AROUND, graph_variants),
    Hook(f"{_DECODE_RUNNER}.DecodeCudaGraphRunner.can_run_graph", HookType.AROUND, can_run_graph),
    Hook(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
        ".PrefillCudaGraphRunner.can_run_graph",
        HookType.AROUND,
        can_run_prefill_graph,
    ),
    *(
        Hook(f"{_UPDATER}.update_weights_from_{source}", HookType.BEFORE, weights_change)
        for source in ("disk", "distributed", "tensor", "ipc")
    ),
    Hook(f"{_SCHEDULER}.get_internal_state", HookType.AFTER, add_state),
    Hook(f"{_REPORTERS}.PrefillStats.from_adder", HookType.AFTER, correct_prefill_stats),
    Hook(
        "sglang.srt.observability.metrics_collector.QueueCount.from_reqs",
        HookType.AROUND,
        count_asked,
    ),
    Hook(f"{_REPORTER}.log_batch_result_stats", HookType.AFTER, metrics.after_pass),
    Hook(f"{_REPORTER}._maybe_log_idle_metrics", HookType.AFTER, metrics.when_idle),
)
