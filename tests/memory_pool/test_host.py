"""The host tier: found by name and verified, kept by worth, dropped when damaged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tier_helpers import PAGE, PAGE_BYTES, content, document, weak

from tessera_sglang.memory_pool.host import HostTier
from tessera_sglang.memory_pool.lower import PageName, Worth
from tessera_sglang.memory_pool.names import blake2b_256
from tessera_sglang.memory_pool.worth import CostModel, Entry, GreedyDual

PLAIN = Worth(0, False, 0)


def tier(pages: int, **options: object) -> HostTier:
    return HostTier(PAGE_BYTES, pages * PAGE_BYTES, **options)  # type: ignore[arg-type]


def fill(host: HostTier, name: PageName, worth: Worth = PLAIN, **options: bool) -> Entry | None:
    """Put a page in, ready and not pinned."""
    entry = host.reserve(name, worth, **options)
    if entry is not None:
        host.buffer(entry.slot)[:] = content(name)
        host.seal(entry, host.checksum(entry.slot))
        host.unpin(entry)
    host.check_invariants()
    return entry


def there(host: HostTier, names: list[PageName]) -> list[bool]:
    return [host.find(name) is not None for name in names]


def flip(host: HostTier, entry: Entry, bit: int) -> None:
    host.buffer(entry.slot)[bit // 8] ^= 1 << bit % 8


# --- room ----------------------------------------------------------------------------------------


def test_it_has_as_many_whole_pages_as_fit() -> None:
    host = HostTier(PAGE_BYTES, 3 * PAGE_BYTES + PAGE_BYTES - 1, pinned=True)
    assert host.page_count == 3
    assert host.data.shape == (3, PAGE_BYTES)
    assert host.data.is_contiguous()


@pytest.mark.parametrize("capacity", [0, PAGE_BYTES - 1])
def test_a_tier_without_a_page_is_refused(capacity: int) -> None:
    with pytest.raises(
        ValueError, match=rf"host_tier_bytes = {capacity} holds no page of 96 bytes"
    ):
        HostTier(PAGE_BYTES, capacity)


def test_memory_that_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="lower host_tier_bytes"):
        HostTier(1 << 20, 1 << 62)


def test_neighbours_in_a_chain_get_neighbouring_slots() -> None:
    host = tier(6)
    for name in document(1, 6):
        fill(host, name)
    assert [entry.slot for entry in host.leading(document(1, 6))] == list(range(6))
    for entry in list(host.leading(document(1, 6)))[:0:-1]:
        host.drop(entry)
    entries = [fill(host, name) for name in document(2, 5)]
    assert [entry.slot for entry in entries if entry] == list(range(1, 6))


# --- names ---------------------------------------------------------------------------------------


def test_a_page_is_found_as_it_was_filled() -> None:
    host, names = tier(4), document(1, 3)
    for name in names:
        fill(host, name)
    for name in names:
        entry = host.find(replace(name))
        assert entry is not None
        assert bytes(host.buffer(entry.slot)) == content(name)
        assert host.verify(entry)
    assert there(host, document(2, 1)) == [False]
    assert (len(host), host.collisions, host.damaged) == (3, 0, 0)


@pytest.mark.parametrize("field", ["namespace", "parent", "tokens", "mark"])
def test_a_page_with_the_key_of_another_is_a_miss(field: str) -> None:
    """Case 21: the first still hits, and its pins are what they were."""
    host = tier(4)
    name = document(1, 1)[0]
    first = fill(host, name)
    assert first is not None
    host.pin(first)
    other = replace(name, **{field: getattr(name, field)[:-1] + b"\7"})
    assert host.find(other) is None
    assert host.collisions == 1
    assert host.reserve(other, PLAIN) is None
    assert host.collisions == 2
    assert host.find(name) is first
    assert (first.pins, len(host)) == (1, 1)
    host.unpin(first)
    host.check_invariants()


def test_a_page_that_is_being_filled_is_not_found() -> None:
    host, name = tier(2), document(1, 1)[0]
    entry = host.reserve(name, PLAIN)
    assert entry is not None
    assert host.find(name) is None
    assert host.entry(name) is entry
    host.seal(entry, host.checksum(entry.slot))
    assert host.find(name) is entry


def test_leading_pages_end_at_the_first_that_lacks() -> None:
    host, names = tier(8), document(1, 5)
    for name in (*names[:2], *names[3:]):
        fill(host, name)
    assert [entry.name for entry in host.leading(names)] == names[:2]


# --- who goes ------------------------------------------------------------------------------------


def test_a_pinned_page_stays() -> None:
    host = tier(2)
    one, other, third = document(1, 1)[0], document(2, 1)[0], document(3, 1)[0]
    for name in (one, other):
        entry = fill(host, name)
        assert entry is not None
        host.pin(entry)
    assert fill(host, third) is None
    kept = host.find(other)
    assert kept is not None
    host.unpin(kept)
    assert fill(host, third) is not None
    assert there(host, [one, other, third]) == [True, False, True]


def test_the_end_of_a_chain_goes_before_what_it_hangs_on() -> None:
    """In whichever order they came: pages leave the device from the end of a chain on."""
    for names in (document(1, 4), document(1, 4)[::-1]):
        host = tier(4)
        for name in names:
            fill(host, name)
        for number in range(3):
            fill(host, document(2 + number, 1)[0])
            assert there(host, document(1, 4)) == [left < 3 - number for left in range(4)]


def test_a_pinned_end_keeps_the_whole_chain() -> None:
    host, names = tier(4), document(1, 3)
    entries = [fill(host, name) for name in names]
    assert entries[2] is not None
    host.pin(entries[2])
    for number in range(3):
        fill(host, document(2 + number, 1)[0])
    assert there(host, names) == [True] * 3
    assert len(host) == 4
    host.unpin(entries[2])
    for number in range(3):
        fill(host, document(12 + number, 1)[0])
    assert there(host, names)[2] is False


def test_pages_of_spans_stay_longest_and_not_for_ever() -> None:
    """Case 28, on the host: novel prompts pass by, and the spans are there until nobody wants them."""
    host = tier(8)
    span = document(1, 4)
    for name in span:
        fill(host, name, Worth(0, True, 0))
    plain = [document(number, 1)[0] for number in range(2, 60)]
    for name in plain[:12]:
        fill(host, name)
        assert there(host, span) == [True] * 4
    for name in plain:
        if host.find(name) is None:
            fill(host, name)
    assert not any(there(host, span))


def test_what_is_used_stays_and_what_is_dear_stays() -> None:
    host = tier(3)
    used, idle, deep = (document(number, 1)[0] for number in (1, 2, 3))
    fill(host, used)
    fill(host, idle)
    fill(host, deep, Worth(100_000, False, 0))
    entry = host.find(used)
    assert entry is not None
    host.use(entry)
    host.use(entry)
    fill(host, document(4, 1)[0])
    assert there(host, [used, idle, deep]) == [True, False, True]
    fill(host, document(5, 1)[0])
    assert there(host, [used, deep]) == [True, True]


def test_equal_pages_go_in_the_order_in_which_they_were_used() -> None:
    host = tier(3)
    names = [document(number, 1)[0] for number in range(6)]
    for name in names:
        fill(host, name)
    assert there(host, names) == [False] * 3 + [True] * 3


def test_what_is_known_of_a_page_adds_up() -> None:
    host = tier(1)
    entry = fill(host, document(1, 1)[0], Worth(8, True, 1))
    assert entry is not None
    host.use(entry, Worth(8, False, 5))
    assert entry.worth == Worth(8, True, 5)
    assert entry.uses == 1


def test_the_cost_of_a_page() -> None:
    costs = CostModel(linear=1.0, quadratic=0.5, shared=4.0)
    assert costs.recompute(Worth(0, False, 0), 4) == 4 * (1 + 0.5 * 2)
    assert costs.recompute(Worth(10, False, 0), 4) == 4 * (1 + 0.5 * 12)
    assert costs.recompute(Worth(10, True, 0), 4) == 4 * 4 * (1 + 0.5 * 12)


def test_priority_is_frequency_by_cost_by_bytes_from_the_clock_on() -> None:
    queue = GreedyDual(CostModel(1.0, 0.0, 4.0), page_bytes=8)

    def ranked(worth: Worth, uses: int = 0) -> float:
        entry = Entry(document(1, 1)[0], 0, worth, dirty=False)
        entry.uses = uses
        queue.rank(entry)
        return entry.priority

    assert ranked(PLAIN) == PAGE / 8
    assert ranked(Worth(0, False, 2), uses=3) == 6 * PAGE / 8
    assert ranked(Worth(0, True, 0)) == 4 * PAGE / 8
    assert ranked(Worth(0, False, 10**6)) == queue.MOST_USES * PAGE / 8
    gone = Entry(document(2, 1)[0], 0, PLAIN, dirty=False)
    gone.priority = 7.0
    queue.evicted(gone)
    assert ranked(PLAIN) == 7 + PAGE / 8
    gone.priority = 3.0
    queue.evicted(gone)
    assert queue.clock == 7.0


# --- dirty pages ---------------------------------------------------------------------------------


def test_a_dirty_page_is_offered_before_it_goes() -> None:
    host = tier(2)
    offered: list[Entry] = []

    def keep(entry: Entry) -> bool:
        offered.append(entry)
        host.pin(entry)
        return True

    names = [document(number, 1)[0] for number in range(4)]
    first = fill(host, names[0], dirty=True)
    fill(host, names[1])
    host.rescue = keep
    fill(host, names[2])
    assert offered == [first]
    assert there(host, names) == [True, False, True, False]
    assert (host.evicted, host.lost) == (1, 0)
    host.rescue = lambda entry: False
    assert first is not None
    host.unpin(first)
    fill(host, names[3])
    assert there(host, names) == [False, False, True, True]
    assert (host.evicted, host.lost) == (2, 1)


# --- damage --------------------------------------------------------------------------------------


def test_any_flipped_bit_is_found_and_the_page_is_gone() -> None:
    name = document(1, 1)[0]
    for bit in range(0, PAGE_BYTES * 8, 7):
        host = tier(1)
        entry = fill(host, name)
        assert entry is not None
        flip(host, entry, bit)
        assert not host.verify(entry)
        assert host.find(name) is None
        assert (host.damaged, host.free_slots) == (1, 1)
        fill(host, name)
        assert there(host, [name]) == [True]


def test_a_damaged_page_that_is_pinned_is_gone_and_its_slot_is_not() -> None:
    host, name = tier(1), document(1, 1)[0]
    entry = fill(host, name)
    assert entry is not None
    host.pin(entry)
    flip(host, entry, 5)
    assert not host.verify(entry)
    assert not host.verify(entry)
    assert host.damaged == 1
    assert host.find(name) is None
    assert host.reserve(name, PLAIN) is None, "somebody still reads the slot"
    host.unpin(entry)
    assert fill(host, name) is not None


def test_checksums_can_be_left_out() -> None:
    host = tier(1, checksums=False)
    entry = fill(host, document(1, 1)[0])
    assert entry is not None
    flip(host, entry, 5)
    assert host.verify(entry)
    assert entry.checksum is None


def test_a_cleared_tier_is_empty_and_goes_on() -> None:
    host, names = tier(3), document(1, 3)
    kept = fill(host, names[0])
    assert kept is not None
    host.pin(kept)
    fill(host, names[1])
    host.clear()
    host.check_invariants()
    assert (len(host), host.free_slots) == (0, 2)
    host.unpin(kept)
    for name in names:
        fill(host, name)
    assert there(host, names) == [True] * 3
    assert fill(host, document(2, 1)[0]) is not None


# --- random operations ---------------------------------------------------------------------------


@dataclass(eq=False)
class Known:
    """What the model says of a page."""

    entry: Entry
    pins: int
    ready: bool


class HostMachine(RuleBasedStateMachine):
    """Pages of some chains in a small tier, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.host = tier(5)
        self.host.rescue = self.rescue
        self.writing: list[Known] = []
        self.known: dict[PageName, Known] = {}
        self.dropped: list[Known] = []
        self.names = [
            name for number in range(3) for name in document(number, 4, digest=self.digest)
        ]

    digest = staticmethod(weak)

    def rescue(self, entry: Entry) -> bool:
        known = self.known[entry.name]
        if self.writing:
            return False
        self.host.pin(entry)
        known.pins += 1
        self.writing.append(known)
        return True

    def forget_evicted(self) -> None:
        for name, known in list(self.known.items()):
            if not known.entry.alive:
                assert known.ready, "a page went while it was filled"
                assert not known.pins, "a page went while it was pinned"
                del self.known[name]

    @rule(number=st.integers(0, 11), shared=st.booleans(), dirty=st.booleans())
    def reserve(self, number: int, shared: bool, dirty: bool) -> None:
        name = self.names[number]
        if name in self.known:
            return
        taken = any(other.key == name.key for other in self.known)
        before = self.host.collisions
        entry = self.host.reserve(name, Worth(number, shared, 0), dirty=dirty)
        self.forget_evicted()
        assert self.host.collisions == before + taken
        if entry is None:
            used = [*self.known.values(), *self.dropped]
            assert taken or (
                len(used) == 5
                and all(
                    known.pins or any(other.parent == known.entry.name.key for other in self.known)
                    for known in used
                )
            )
            return
        assert not taken
        self.known[name] = Known(entry, 1, False)
        self.host.buffer(entry.slot)[:] = content(name)

    def pick(self, number: int, ready: bool) -> Known | None:
        found = [known for known in self.known.values() if known.ready == ready]
        return found[number % len(found)] if found else None

    @rule(number=st.integers(0, 11))
    def seal(self, number: int) -> None:
        known = self.pick(number, ready=False)
        if known is not None:
            self.host.seal(known.entry, self.host.checksum(known.entry.slot))
            self.host.unpin(known.entry)
            known.ready, known.pins = True, known.pins - 1

    @rule(number=st.integers(0, 11), use=st.booleans())
    def pin(self, number: int, use: bool) -> None:
        known = self.pick(number, ready=True)
        if known is not None:
            self.host.pin(known.entry)
            known.pins += 1
            if use:
                self.host.use(known.entry)

    @rule(number=st.integers(0, 11))
    def unpin(self, number: int) -> None:
        found = [k for k in (*self.known.values(), *self.dropped) if k.pins > (not k.ready)]
        if found:
            known = found[number % len(found)]
            self.host.unpin(known.entry)
            known.pins -= 1
            if known in self.writing:
                self.writing.remove(known)
            self.dropped = [other for other in self.dropped if other.pins]

    @rule(number=st.integers(0, 11))
    def damage(self, number: int) -> None:
        known = self.pick(number, ready=True)
        if known is not None:
            flip(self.host, known.entry, number)
            assert not self.host.verify(known.entry)
            del self.known[known.entry.name]
            if known.pins:
                self.dropped.append(known)

    @precondition(lambda self: len(self.known) == 5)
    @rule()
    def clear(self) -> None:
        self.host.clear()
        self.dropped += [known for known in self.known.values() if known.pins]
        for known in self.dropped:  # whoever fills one finds it gone
            if not known.ready:
                known.ready = True
        self.known.clear()

    @invariant()
    def holds(self) -> None:
        self.host.check_invariants()
        assert len(self.host) == len(self.known)
        for name in self.names:
            known = self.known.get(name)
            found = self.host.find(name)
            assert found is (known.entry if known is not None and known.ready else None)
            if found is not None:
                assert bytes(self.host.buffer(found.slot)) == content(name)
                assert found.pins == self.known[name].pins


class StrongHostMachine(HostMachine):
    """Likewise with keys that do not collide."""

    digest = staticmethod(blake2b_256)


_machine = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
TestWeakKeys = HostMachine.TestCase
TestWeakKeys.settings = _machine
TestStrongKeys = StrongHostMachine.TestCase
TestStrongKeys.settings = _machine
