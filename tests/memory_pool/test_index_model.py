"""Random operations on the content index against a model: shrinkable ones, and many of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from index_helpers import short_hash
from index_model import MAX_PAGES, PHYSICAL_PAGES, Draft, IndexMachine

from tessera_sglang.memory_pool.keys import xxh3_128
from tessera_sglang.memory_pool.runs import Counters

MACHINES = {  # tokens a page, bits of the hash, policy
    "lru": (4, 128, "lru"),
    "lfu": (4, 128, "lfu"),
    "slru": (4, 128, "slru"),
    "8 bits": (4, 8, "lru"),
    "4 bits": (2, 4, "lfu"),
    "pages of 1": (1, 128, "lru"),
    "pages of 2": (2, 128, "slru"),
    "pages of 64": (64, 128, "lfu"),
}


def machine(name: str) -> type[IndexMachine]:
    size, bits, policy_name = MACHINES[name]

    class Machine(IndexMachine):
        page_size = size
        hash_function = staticmethod(short_hash(bits) if bits < 128 else xxh3_128)
        policy = policy_name
        smallest_fork = max(size // 4, 1)

    return Machine


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(
    "examples", [8, pytest.param(200, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_the_index_is_a_dict_of_pages(examples: int, name: str) -> None:
    """Up to fifty operations an example."""
    profile = settings(max_examples=examples, stateful_step_count=50, deadline=None, database=None)
    run_state_machine_as_test(machine(name), settings=profile)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(
    "operations", [800, pytest.param(25_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_an_index_agrees_with_the_model_all_its_life(operations: int, name: str) -> None:
    """The same operations in the proportions of a busy server; 200,000 in all with ``-m slow``."""
    index, draw = machine(name)(), random.Random(name)

    def part() -> tuple[int, int]:
        return draw.randrange(4), draw.randrange(8)

    def draft() -> Draft:
        behind = [part() for _ in range(draw.choice((0, 0, 1, 1, 2, 3)))]
        return draw.randrange(PHYSICAL_PAGES + 2), behind, (*part(), draw.randrange(3))

    def diverging() -> int | None:
        return draw.randrange(MAX_PAGES) if draw.random() < 0.2 else None

    for _ in range(operations):
        at = draw.random()
        if at < 0.25:
            length = (draw.randrange(MAX_PAGES), draw.randrange(3))
            index.look_up(draft(), draw.choice((None, length)), draw.randrange(3))
        elif at < 0.5:
            index.finish(draft(), draw.randrange(MAX_PAGES), diverging(), draw.random() < 0.3)
        elif at < 0.57 and index.running():
            index.extend(draw.randrange(12), draft(), diverging())
        elif at < 0.61 and index.found:
            index.join(draw.randrange(12), draw.randrange(12))
        elif at < 0.76 and index.found:
            index.keep(draw.randrange(12), draw.choice(("lock", *["hold"] * 4, "both")))
        elif at < 0.94 and len(index.locked) + len(index.held) > 3:
            index.leave(draw.randrange(12))
        elif at < 0.998:
            index.evict(draw.randrange(10), draw.random() < 0.7)
        else:
            index.reset(sure=3)
        index.check_all()
    assert {*Counters.__slots__} - {*+index.counters} <= {"collisions"}, "everything was reached"
