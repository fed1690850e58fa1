"""Put on PYTHONPATH of a server on the CPU: what its rows hold after each forward pass.

Each pass leaves a pickle in $ROW_PROBE: a list with a dict for each request, see `_row`. Hooked on
from outside, on the scheduler that is about to run: nothing in the product knows of it.
"""

import importlib.abc
import importlib.util
import os
import pickle
import sys
from pathlib import Path

SCHEDULER = "sglang.srt.managers.scheduler"


class _WhenImported(importlib.abc.MetaPathFinder):
    """Lets the scheduler's module be imported, and changes it right after."""

    def find_spec(self, name, path, target=None):
        if name != SCHEDULER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            run_event_loop = module.Scheduler.run_event_loop

            def watched(scheduler):
                _watch(scheduler)
                return run_event_loop(scheduler)

            module.Scheduler.run_event_loop = watched

        spec.loader.exec_module = exec_module
        return spec


def _watch(scheduler):
    target = Path(os.environ["ROW_PROBE"])
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    runner = scheduler.tp_worker.model_runner
    run_batch, forward, store = scheduler.run_batch, runner.forward, pool.set_kv_buffer
    reqs = []  # of the pass that runs
    valid = []  # committed lengths of them, at each layer
    positions = []  # that the model was given, of all new tokens
    passes = 0

    def committed():
        return [scheduler.tree_cache.publication.residency(r).committed_tokens for r in reqs]

    def watched_store(*args, **kwargs):
        valid.append(committed())
        return store(*args, **kwargs)

    def watched_forward(forward_batch, *args, **kwargs):
        positions[:] = forward_batch.positions.tolist()
        return forward(forward_batch, *args, **kwargs)

    def watched_run(batch, *args, **kwargs):
        nonlocal passes
        reqs[:], valid[:] = batch.reqs, []
        result = run_batch(batch, *args, **kwargs)
        rows, first = [], 0
        for number, (req, after) in enumerate(zip(reqs, committed(), strict=True)):
            during = [lengths[number] for lengths in valid]
            row = _row(scheduler, pool, req)
            new = positions[first : first + row["tokens"] - during[0]]
            first += len(new)
            rows.append({**row, "during": during, "committed": after, "positions": new})
        passes += 1
        part = target / f"{passes:05}.part"
        part.write_bytes(pickle.dumps(rows))
        part.rename(part.with_suffix(".pickle"))
        return result

    scheduler.run_batch, runner.forward, pool.set_kv_buffer = (
        watched_run,
        watched_forward,
        watched_store,
    )


def _row(scheduler, pool, req):
    tokens = req.kv.kv_committed_len
    slots = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :tokens].long()
    if hasattr(pool, "kv_buffer"):
        layers = [(rows,) for rows in pool.kv_buffer]
    else:
        layers = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    return {
        "rid": str(req.rid),
        "tokens": tokens,
        "slots": slots.numpy(),  # int64 [tokens]
        "kv": [[rows[slots].numpy() for rows in planes] for planes in layers],  # [tokens, ...]
    }


sys.meta_path.insert(0, _WhenImported())
