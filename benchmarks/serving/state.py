"""What a server counts: its own figures, read before and after a run."""

from __future__ import annotations

from dataclasses import dataclass

from tessera_sglang.demo.client import counters, tessera_state

# SGLang's count of tokens that went through a prefill, whoever asked for them
COMPUTED = ("sglang:realtime_tokens_total", "mode", "prefill_compute")


@dataclass(frozen=True, slots=True)
class State:
    """One moment of a server. Counts only grow; SGLang's tree has no hits by kind and no pages."""

    page_tokens: int
    link_pages: int
    root_tokens: int
    pool_tokens: int
    held_tokens: int  # of the pool, by anybody
    computed_tokens: int  # by prefills, of spans too
    prefix_hit_tokens: int | None
    span_hit_tokens: int | None
    span_prefills: int
    sealed_pages: int | None
    evicted_pages: int | None


def state_of(url: str) -> State:
    """Of the server at ``url``, started with ``--enable-metrics``.

    Raises:
        RequestError: it does not answer, or counts nothing.
    """
    state = tessera_state(url)
    traffic = state.get("traffic") or {}
    name, label, mode = COMPUTED
    return State(
        page_tokens=state["page_tokens"],
        link_pages=state["spans"]["link_pages"],
        root_tokens=state["spans"]["root_tokens"],
        pool_tokens=state["pool_tokens"],
        held_tokens=state["held_tokens"],
        computed_tokens=int(counters(url, name, label).get(mode, 0)),
        prefix_hit_tokens=traffic.get("prefix_hit"),
        span_hit_tokens=traffic.get("span_hit"),
        span_prefills=traffic.get("span_prefills", 0),
        sealed_pages=(state.get("pages") or {}).get("sealed"),
        evicted_pages=(state.get("counters") or {}).get("evicted_pages"),
    )
