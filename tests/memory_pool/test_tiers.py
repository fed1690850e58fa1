"""The stack of tiers: bytes down and up again, who waits for whom, what is bounded, what is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from tier_helpers import (
    PAGE_BYTES,
    MemoryStore,
    chain_names,
    content,
    document,
    pages,
    weak,
    worths,
)

from tessera_sglang.memory_pool.host import HostTier
from tessera_sglang.memory_pool.lower import PageName
from tessera_sglang.memory_pool.names import blake2b_256
from tessera_sglang.memory_pool.tiers import Lease, Ticket, TierStack

WAIT = 30.0

Make = Callable[..., TierStack]


@pytest.fixture
def make() -> Iterator[Make]:
    """Stacks over host memory of some pages, sound and closed in the end."""
    made: list[TierStack] = []

    def stack(host_pages: int, store: MemoryStore | None = None, **options: int) -> TierStack:
        host = HostTier(PAGE_BYTES, host_pages * PAGE_BYTES)
        made.append(TierStack(host, store, **options))  # type: ignore[arg-type]
        return made[-1]

    yield stack
    for one in made:
        if isinstance(one.store, MemoryStore):
            one.store.may_read.set()
            one.store.may_write.set()
        one.check_invariants()
        assert one.close(WAIT)
        one.check_invariants()


def demote(stack: TierStack, names: list[PageName]) -> int:
    """As the index evicts: from the end of the chain on."""
    kept = stack.demote(names[::-1], worths(names)[::-1], pages(names[::-1]))
    stack.check_invariants()
    return kept


def settle(stack: TierStack) -> None:
    assert stack.drain(WAIT)
    stack.check_invariants()


def until(stack: TierStack, reached: Callable[[], bool]) -> None:
    """Take up what threads do until it is enough, while some of them hang."""
    stack.poll()
    while not reached():
        assert stack._finished.wait(time.monotonic() + WAIT), "nothing happens any more"
        stack.poll()


def stored(names: list[PageName]) -> MemoryStore:
    """A store that has pages from an earlier process."""
    store = MemoryStore()
    store.pages = {name.key: (name, content(name)) for name in names}
    return store


def read_back(stack: TierStack, names: list[PageName]) -> int:
    """Lease what is held and compare it; returns how many pages."""
    lease = stack.lease(names, len(names))
    if lease is None:
        return 0
    with lease:
        data = lease.data()
        assert data.shape == (lease.pages, PAGE_BYTES)
        assert torch.equal(data, pages(names[: lease.pages]))
        views = lease.views()
        assert sum(len(view) for view in views) == lease.pages
        base = stack.host.data.data_ptr()
        assert all(base <= view.data_ptr() < base + stack.host.data.nbytes for view in views)
        stack.check_invariants()
        found = lease.pages
    stack.check_invariants()
    return found


# --- down and up ---------------------------------------------------------------------------------


def test_bytes_come_back_through_all_tiers(make: Make) -> None:
    store, names = MemoryStore(), document(1, 6)
    stack = make(8, store)
    assert demote(stack, names) == 6
    settle(stack)
    assert read_back(stack, names) == stack.held(names) == 6
    assert {key: raw for key, (_, raw) in store.pages.items()} == {
        name.key: content(name) for name in names
    }
    for number in range(2, 6):  # a storm
        demote(stack, document(number, 8))
        settle(stack)
    assert stack.held(names) == 0
    assert stack.known(names) == 6
    ticket = stack.prefetch(names, "r")
    assert ticket is not None
    settle(stack)
    assert ticket.done
    assert read_back(stack, names) == 6
    ticket.cancel()
    counters = stack.counters
    assert (counters.from_store, counters.loaded_back, counters.dropped) == (6, 12, 0)
    assert stack.host.lost == 0
    assert stack.sizes().dirty_pages == 0


def test_a_later_process_finds_what_an_earlier_one_drained(make: Make) -> None:
    store, names = MemoryStore(), document(1, 5)
    first = make(8, store, write_queue_pages=1)
    demote(first, names)
    assert first.close(WAIT)
    assert store.closed
    assert first.counters.written == 5
    second = make(8, store)
    assert second.known(names) == 5
    ticket = second.prefetch(names, "r", start=0, shared=True)
    assert ticket is not None
    settle(second)
    assert read_back(second, names) == 5
    ticket.cancel()


def test_without_a_store_pages_live_in_host_memory_only(make: Make) -> None:
    stack, names = make(4), document(1, 4)
    demote(stack, names)
    ticket = stack.prefetch(names, "r")  # they are on their way
    assert ticket is not None
    settle(stack)
    assert ticket.done
    assert read_back(stack, names) == 4
    ticket.cancel()
    demote(stack, document(2, 4))
    settle(stack)
    assert stack.known(names) == 0
    assert stack.prefetch(names, "r") is None
    assert stack.counters.prefetches_refused == 1


def test_a_page_that_is_held_is_not_copied_again(make: Make) -> None:
    stack, names = make(8), document(1, 3)
    demote(stack, names)
    assert stack.holds(names) == [True] * 3, "also while it is copied"
    settle(stack)
    assert demote(stack, names) == 3
    assert (stack.counters.demoted, stack.counters.already_held) == (3, 3)
    entry = stack.host.find(names[0])
    assert entry is not None
    uses = entry.uses
    assert stack.holds(document(1, 4), worths(document(1, 4), hits=9)) == [True] * 3 + [False]
    assert (entry.uses, entry.worth.hits) == (uses + 1, 9)


def test_of_more_than_fits_the_beginnings_stay(make: Make) -> None:
    stack, names = make(4), document(1, 6)
    assert demote(stack, names) == 4
    settle(stack)
    assert stack.held(names) == 4
    assert stack.counters.dropped == 2


def test_namespaces_do_not_meet(make: Make) -> None:
    stack, names = make(8, MemoryStore()), document(1, 3)
    demote(stack, names)
    settle(stack)
    other = chain_names(range(1000, 1012), root=b"o" * 32)
    assert [name.tokens for name in other] == [name.tokens for name in names]
    assert stack.known(other) == stack.held(other) == 0
    assert stack.known(names) == 3


# --- nothing waits -------------------------------------------------------------------------------


def test_a_disk_that_does_not_answer_holds_up_nobody(make: Make) -> None:
    """Reads and writes hang; everything else goes on, and what they bring comes when it comes."""
    cold, warm = document(1, 4), document(2, 4)
    store = stored(cold)
    stack = make(16, store)
    store.may_read.clear()
    store.may_write.clear()
    ticket = stack.prefetch(cold, "cold")
    assert ticket is not None
    assert store.reads.acquire(timeout=WAIT)
    demote(stack, warm)
    until(stack, lambda: stack.held(warm) == 4)  # copies have a thread of their own
    assert store.writes.acquire(timeout=WAIT)
    for number in range(3, 20):
        stack.poll()
        assert read_back(stack, warm[:1]) == 1
        assert stack.known(cold) == 4
        assert stack.held(cold) == 0
        assert not ticket.done
        demote(stack, document(number, 2))
        stack.check_invariants()
    assert not stack.drain(0.01)
    store.may_read.set()
    store.may_write.set()
    settle(stack)
    assert ticket.done
    assert read_back(stack, cold) == 4
    ticket.cancel()


def test_requests_share_a_read(make: Make) -> None:
    names = document(1, 4)
    store = stored(names)
    stack = make(8, store)
    store.may_read.clear()
    one, other = stack.prefetch(names[:2], "one"), stack.prefetch(names, "other")
    assert one is not None
    assert other is not None
    one.cancel()
    one.cancel()
    stack.check_invariants()
    store.may_read.set()
    settle(stack)
    assert other.done
    assert stack.counters.from_store == 4
    assert read_back(stack, names) == 4
    other.cancel()


def test_an_abort_gives_back_what_is_queued(make: Make) -> None:
    first, second = document(1, 2), document(2, 3)
    store = stored([*first, *second])
    stack = make(8, store, workers=1)
    store.may_read.clear()
    begun = stack.prefetch(first, "a")
    assert store.reads.acquire(timeout=WAIT)
    assert stack.prefetch(second, "b") is not None
    assert stack.sizes().reading_pages == 5
    stack.cancel("b")
    stack.cancel("b")
    stack.cancel("nobody")
    stack.check_invariants()
    assert stack.sizes().reading_pages == 2
    assert stack.host.free_slots == 6
    assert stack.counters.prefetch_cancelled == 3
    assert begun is not None
    begun.cancel()  # a thread is at it: what it brings stays while there is room
    stack.check_invariants()
    store.may_read.set()
    settle(stack)
    assert stack.held(first) == 2
    assert stack.held(second) == 0
    assert stack.counters.prefetch_cancelled == 3


def test_who_stops_waiting_for_a_slow_store_has_what_came(make: Make) -> None:
    class Slow(MemoryStore):
        permits = threading.Semaphore(0)

        def read(self, names: list[PageName], into: memoryview) -> list[bool]:
            assert self.permits.acquire(timeout=WAIT)
            return super().read(names, into)

    names, store = document(1, 40), Slow()
    store.pages = stored(names).pages
    stack = make(40, store, workers=1)
    ticket = stack.prefetch(names, "r")
    assert ticket is not None
    store.permits.release()
    until(stack, lambda: stack.held(names) > 0)
    came = stack.held(names)
    assert came < 40, "a request's pages do not all come at once"
    assert not ticket.done
    ticket.cancel()
    assert stack.counters.prefetch_cancelled > 0, "what no thread has begun"
    store.permits.release(2)
    assert read_back(stack, names[:came]) == came


def test_reads_that_do_not_fit_are_refused(make: Make) -> None:
    names, others = document(1, 6), document(2, 2)
    store = stored([*names, *others])
    stack = make(16, store, queue_pages=4)
    store.may_read.clear()
    ticket = stack.prefetch(names, "long")
    assert ticket is not None
    assert ticket.pages == 4, "as many as the queue has places"
    assert stack.prefetch(others, "r") is None
    assert stack.counters.prefetches_refused == 1
    again = stack.prefetch(names[:4], "again")
    assert again is not None, "it needs no place"
    store.may_read.set()
    settle(stack)
    assert stack.held(names) == 4
    rest = stack.prefetch(names, "long")
    settle(stack)
    assert stack.held(names) == 6
    for one in (ticket, again, rest):
        assert one is not None
        one.cancel()


def test_pages_that_a_request_waits_for_are_not_evicted(make: Make) -> None:
    names = document(1, 3)
    stack = make(4, stored(names))
    ticket = stack.prefetch(names, "r")
    settle(stack)
    for number in range(2, 8):
        demote(stack, document(number, 2))
        settle(stack)
        assert stack.held(names) == 3
    assert ticket is not None
    full = document(9, 3)
    assert isinstance(stack.store, MemoryStore)
    stack.store.pages |= {name.key: (name, content(name)) for name in full}
    other = stack.prefetch(full, "other")
    assert other is None or other.pages == 1, "host memory has one page that nobody waits for"
    stack.cancel("other")
    ticket.cancel()
    settle(stack)
    for number in range(12, 20):
        demote(stack, document(number, 4))
        settle(stack)
    assert stack.held(names) < 3


# --- writes --------------------------------------------------------------------------------------


def test_writes_that_do_not_fit_come_later(make: Make) -> None:
    store, names = MemoryStore(), document(1, 6)
    stack = make(8, store, write_queue_pages=2)
    store.may_write.clear()
    demote(stack, names)
    until(stack, lambda: stack.held(names) == 6)
    assert stack.sizes().writing_pages == 2
    assert stack.sizes().dirty_pages == 6
    assert not stack.accepts()
    store.may_write.set()
    settle(stack)
    assert stack.accepts()
    assert stack.sizes().dirty_pages == 0
    assert stack.counters.written == len(store.pages) == 6


def test_where_neither_tier_has_room_pages_are_lost_and_counted(make: Make) -> None:
    store = MemoryStore()
    stack = make(4, store, write_queue_pages=1)
    store.may_write.clear()
    for number in range(1, 6):
        demote(stack, document(number, 4))
        until(stack, lambda: not stack.sizes().filling_pages)
        stack.check_invariants()
    assert stack.host.lost > 0
    store.may_write.set()
    settle(stack)
    lost = stack.host.lost + stack.counters.dropped
    assert len(store.pages) + lost == 20
    for name in [name for number in range(1, 6) for name in document(number, 4)]:
        assert store.pages.get(name.key, (None, content(name)))[1] == content(name)


@pytest.mark.parametrize("fault", ["full", "broken"])
def test_a_store_that_takes_nothing_costs_nothing_else(make: Make, fault: str) -> None:
    store, names = MemoryStore(), document(1, 4)
    stack = make(4, store)
    setattr(store, fault, True)
    demote(stack, names)
    settle(stack)
    assert stack.counters.write_refused == 4
    assert (stack.counters.worker_faults > 0) == (fault == "broken")
    assert read_back(stack, names) == 4
    demote(stack, document(2, 4))
    settle(stack)
    demote(stack, document(3, 4))
    settle(stack)
    assert stack.host.lost > 0
    setattr(store, fault, False)
    demote(stack, document(4, 4))
    settle(stack)
    assert all(name.key in store.pages for name in document(4, 4) if stack.host.find(name))


# --- damage --------------------------------------------------------------------------------------


def damage(stack: TierStack, name: PageName) -> None:
    entry = stack.host.find(name)
    assert entry is not None
    stack.host.buffer(entry.slot)[7] ^= 16


def test_a_damaged_page_ends_a_lease_and_is_gone(make: Make) -> None:
    stack, names = make(8), document(1, 4)
    demote(stack, names)
    settle(stack)
    damage(stack, names[2])
    assert read_back(stack, names) == 2
    assert stack.host.damaged == 1
    assert stack.held(names) == 2
    damage(stack, names[0])
    assert read_back(stack, names) == 0
    assert stack.counters.loaded_back == 2


def test_a_damaged_page_is_read_from_the_store_again(make: Make) -> None:
    stack, names = make(8, MemoryStore()), document(1, 3)
    demote(stack, names)
    settle(stack)
    damage(stack, names[1])
    assert read_back(stack, names) == 1
    ticket = stack.prefetch(names, "r")
    assert ticket is not None
    settle(stack)
    assert read_back(stack, names) == 3
    ticket.cancel()


def test_a_damaged_page_never_reaches_the_store(make: Make) -> None:
    store, names = MemoryStore(), document(1, 4)
    stack = make(8, store, write_queue_pages=1)
    store.may_write.clear()
    demote(stack, names)
    until(stack, lambda: stack.held(names) == 4)
    assert store.writes.acquire(timeout=WAIT)
    waiting = [name for name in names if (e := stack.host.find(name)) is not None and not e.pins]
    damage(stack, waiting[-1])
    store.may_write.set()
    settle(stack)
    assert stack.host.damaged == 1
    assert waiting[-1].key not in store.pages
    assert len(store.pages) == 3


def test_a_page_that_the_store_lost_is_a_miss(make: Make) -> None:
    names = document(1, 4)
    store = stored(names)
    stack = make(8, store)
    assert stack.known(names) == 4
    del store.pages[names[2].key]
    ticket = stack.prefetch(names, "r")
    assert ticket is not None
    settle(stack)
    assert ticket.done
    assert read_back(stack, names) == 2
    assert stack.counters.read_misses == 1
    assert stack.known(names) == 2
    ticket.cancel()


def test_a_store_that_raises_is_a_miss(make: Make) -> None:
    names = document(1, 4)
    store = stored(names)
    store.broken = True
    stack = make(8, store)
    ticket = stack.prefetch(names, "r")
    settle(stack)
    assert ticket is not None
    assert ticket.done
    assert read_back(stack, names) == 0
    assert stack.counters.worker_faults > 0
    ticket.cancel()
    assert stack.host.free_slots == 8


def test_a_flush_empties_host_memory_whatever_is_on_its_way(make: Make) -> None:
    names, others = document(1, 4), document(2, 4)
    store = stored(names)
    stack = make(8, store)
    store.may_read.clear()
    assert stack.prefetch(names, "r") is not None
    assert store.reads.acquire(timeout=WAIT)
    demote(stack, others)
    stack.clear()
    stack.check_invariants()
    store.may_read.set()
    settle(stack)
    assert (stack.held(names), stack.held(others), len(stack.host)) == (0, 0, 0)
    assert stack.host.free_slots == 8


def test_equal_keys_of_different_pages_never_meet(make: Make) -> None:
    """Case 21 in every tier: a miss, a count, and the first still hits."""
    name = document(1, 1, weak)[0]
    other = next(
        found
        for number in range(2, 5000)
        if (found := document(number, 1, weak)[0]).key == name.key
    )
    store = MemoryStore()
    stack = make(4, store)
    demote(stack, [name])
    settle(stack)
    lease = stack.lease([name], 1)
    assert demote(stack, [other]) == 0
    assert stack.held([other]) == 0
    assert stack.host.collisions > 0
    assert stack.prefetch([other], "r") is None
    assert read_back(stack, [name]) == 1
    assert lease is not None
    lease.release()
    stack.clear()
    ticket = stack.prefetch([other], "r")  # the store has that key
    settle(stack)
    assert stack.held([other]) == 0
    assert stack.counters.read_misses == 1
    assert ticket is not None
    ticket.cancel()
    assert store.pages[name.key] == (name, content(name))


def test_settings_are_checked(make: Make) -> None:
    for field in ("workers", "queue_pages", "write_queue_pages"):
        with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
            make(4, MemoryStore(), **{field: 0})


def test_the_store_is_asked_once_in_a_while(make: Make) -> None:
    store, names = MemoryStore(), document(1, 5)
    stack = make(4, store)
    for _ in range(50):
        assert stack.known(names) == 0
        stack.poll()
    assert store.asked == 5
    store.pages = stored(names).pages  # another server wrote them
    for _ in range(100):
        stack.poll()
    assert stack.known(names) == 5


# --- random operations ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_storms_leave_everything_sound(make: Make, seed: int) -> None:
    """Random operations with threads at work: never a wrong byte, and all adds up in every step."""
    rng = random.Random(seed)
    digest = weak if seed % 3 == 1 else blake2b_256
    store = MemoryStore() if seed % 4 else None
    stack = make(7, store, queue_pages=5, write_queue_pages=2)
    texts = [document(number, 6, digest) for number in range(5)]
    tickets: list[Ticket] = []
    leases: list[tuple[Lease, list[PageName]]] = []

    def check_lease(lease: Lease, names: list[PageName]) -> None:
        views = lease.views()
        data = torch.cat(views) if views else torch.empty(0, PAGE_BYTES, dtype=torch.uint8)
        assert torch.equal(data, pages(names[: lease.pages]) if lease.pages else data)

    def enough() -> bool:
        """Whether all has happened that should; how soon hangs on the threads."""
        counters, host = stack.counters, stack.host
        read = store is None or min(counters.from_store - 20, counters.prefetches_refused) > 0
        collided = digest is not weak or host.collisions > 0
        seen = min(counters.loaded_back, host.evicted) > 20
        return seen and read and collided and host.damaged > 0

    for step in range(12_000):
        if step >= 600 and enough():
            break
        names = rng.choice(texts)
        names = names[: rng.randrange(1, 7)]
        action = rng.randrange(12)
        if action < 3:
            first = rng.randrange(len(names))
            stack.demote(
                names[first:][::-1], worths(names)[first:][::-1], pages(names[first:][::-1])
            )
        elif action < 5:
            ticket = stack.prefetch(names, f"r{step % 3}", shared=rng.random() < 0.5)
            tickets += [ticket] if ticket is not None else []
        elif action < 6 and tickets:
            tickets.pop(rng.randrange(len(tickets))).cancel()
        elif action < 8:
            lease = stack.lease(names, len(names))
            if lease is not None:
                check_lease(lease, names)
                leases.append((lease, names))
        elif action < 9 and leases:
            lease, read = leases.pop(rng.randrange(len(leases)))
            check_lease(lease, read)
            lease.release()
        elif action < 10 and step % 40 == 0:
            stack.cancel(f"r{rng.randrange(3)}")
        elif action < 11:
            loose = [e for e in stack.host.entries() if e.ready and not e.pins]
            if loose and rng.random() < 0.3:
                stack.host.buffer(rng.choice(loose).slot)[rng.randrange(PAGE_BYTES)] ^= 1
        elif rng.random() < 0.05:
            stack.clear()
        else:
            assert stack.held(names) <= stack.known(names)
        if rng.random() < 0.5:
            stack.poll()
            if stack.busy and rng.random() < 0.7:  # steps are shorter than a thread's turn
                assert stack._finished.wait(time.monotonic() + WAIT)
        if len(tickets) > 2:
            tickets.pop(0).cancel()
        if len(leases) > 2:
            leases.pop(0)[0].release()
        stack.check_invariants()
    for lease, _ in leases:
        lease.release()
    for ticket in tickets:
        ticket.cancel()
    settle(stack)
    assert all(not entry.pins for entry in stack.host.slots())
    if store is not None:
        assert all(raw == content(name) for name, raw in store.pages.values())
    for names in texts:
        read_back(stack, names)
    assert enough()
