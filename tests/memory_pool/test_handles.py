"""Handles: checked where they are made, dead when what they named is gone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_sglang.memory_pool.handles import Handle, RegionTable, StaleHandle
from tessera_sglang.memory_pool.units import Ownership

UNIT = 8


def table_of(units: int = 16) -> tuple[RegionTable, int, torch.Tensor]:
    table = RegionTable()
    buffer = torch.arange(units * UNIT, dtype=torch.uint8)
    return table, table.register("rows", buffer, UNIT), buffer


def test_a_handle_resolves_to_a_view_of_its_bytes() -> None:
    table, region, buffer = table_of()
    handle = table.claim(region, 2 * UNIT, 3 * UNIT)
    found = table.resolve(handle)
    assert torch.equal(found, buffer[16:40])
    assert found.dtype == torch.uint8
    found[0] = 99
    assert buffer[16] == 99, "a copy was made"


@pytest.mark.parametrize(
    ("offset", "length", "complaint"),
    [
        (0, 17 * UNIT, "not inside"),
        (16 * UNIT, UNIT, "not inside"),
        (-UNIT, UNIT, "not inside"),
        (0, 0, "not inside"),
        (1, UNIT, "begin and end on units of 8"),
        (0, UNIT + 1, "begin and end on units of 8"),
    ],
)
def test_bounds_are_checked_where_a_handle_is_made(
    offset: int, length: int, complaint: str
) -> None:
    table, region, _ = table_of()
    with pytest.raises(ValueError, match=complaint):
        table.claim(region, offset, length)
    table.check_invariants()


def test_overlap_is_refused_naming_both() -> None:
    table, region, _ = table_of()
    table.claim(region, 2 * UNIT, 3 * UNIT)
    with pytest.raises(ValueError, match=r"\[32, 64\) overlap the live claim of bytes \[16, 40\)"):
        table.claim(region, 4 * UNIT, 4 * UNIT)
    assert table.claim(region, 5 * UNIT, UNIT), "a neighbour is no overlap"


def test_a_released_handle_is_stale_and_stays_so_when_its_bytes_are_claimed_again() -> None:
    table, region, _ = table_of()
    old = table.claim(region, 0, UNIT)
    table.release(old)
    new = table.claim(region, 0, UNIT)
    assert new.generation != old.generation
    for use in (table.resolve, table.release):
        with pytest.raises(StaleHandle):
            use(old)
    assert table.resolve(new).nbytes == UNIT


def test_a_retired_region_has_no_live_handles() -> None:
    table, region, _ = table_of()
    handles = [table.claim(region, n * UNIT, UNIT) for n in range(16)]
    table.retire(region)
    for handle in handles:
        with pytest.raises(StaleHandle):
            table.resolve(handle)
    assert table.claim(region, 0, 16 * UNIT)
    table.check_invariants()


@pytest.mark.parametrize("change", ["longer", "shorter", "shifted", "split unit", "region", "free"])
def test_an_invented_handle_does_not_resolve(change: str) -> None:
    table, region, _ = table_of()
    true = table.claim(region, 4 * UNIT, 4 * UNIT)
    table.claim(region, 8 * UNIT, 4 * UNIT)
    forged = {
        "longer": Handle(region, 4 * UNIT, 5 * UNIT, true.generation),
        "shorter": Handle(region, 4 * UNIT, 3 * UNIT, true.generation),
        "shifted": Handle(region, 5 * UNIT, 3 * UNIT, true.generation),
        "split unit": Handle(region, 4 * UNIT + 1, 4 * UNIT - 1, true.generation),
        "free": Handle(region, 0, 4 * UNIT, 0),
        "region": Handle(region + 1, 4 * UNIT, 4 * UNIT, true.generation),
    }[change]
    for use in (table.resolve, table.release):
        with pytest.raises(StaleHandle):
            use(forged)


def test_a_handle_of_another_table_does_not_resolve() -> None:
    (table, region, _), (other, other_region, _) = table_of(), table_of()
    theirs = other.claim(other_region, 0, UNIT)
    table.claim(region, 0, UNIT)
    assert other_region == region
    with pytest.raises(StaleHandle):
        table.resolve(theirs)


def test_offsets_are_64_bit() -> None:
    """Bytes past 4 GiB are the right ones. The buffer is never touched but for a page of it."""
    size = (1 << 32) + (1 << 20)
    table = RegionTable()
    buffer = torch.empty(size, dtype=torch.uint8)
    region = table.register("large", buffer, 1 << 12)
    offset = (1 << 32) + (1 << 12)
    handle = table.claim(region, offset, 1 << 12)
    low = table.claim(region, 1 << 12, 1 << 12)
    table.resolve(low).fill_(1)
    table.resolve(handle).fill_(2)
    assert buffer[offset] == 2
    assert buffer[1 << 12] == 1
    assert table.resolve(handle).data_ptr() - buffer.data_ptr() == offset


def test_terabytes_are_addressed_on_a_device_without_memory() -> None:
    table = RegionTable()
    region = table.register("huge", torch.empty(1 << 45, dtype=torch.uint8, device="meta"), 1 << 30)
    handle = table.claim(region, (1 << 45) - (1 << 30), 1 << 30)
    assert table.resolve(handle).storage_offset() == handle.offset
    table.check_invariants()


@pytest.mark.parametrize("field", ["region", "offset", "length", "generation"])
@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_fields_are_unsigned_64_bit(field: str, value: int) -> None:
    fields = {"region": 0, "offset": 0, "length": 0, "generation": 0} | {field: value}
    with pytest.raises(ValueError, match=f"{field} {value} is not"):
        Handle(**fields)


def test_the_end_is_64_bit_too() -> None:
    top = (1 << 64) - 1
    assert Handle(0, top, 1, 1).end == 1 << 64
    with pytest.raises(ValueError, match="exceed 64 bits"):
        Handle(0, top, 2, 1)


def test_a_buffer_is_whole_units_without_gaps() -> None:
    table = RegionTable()
    with pytest.raises(ValueError, match="has gaps"):
        table.register("strided", torch.zeros(4, 4)[:, :2], 8)
    with pytest.raises(ValueError, match="100 bytes are no whole number of units of 8"):
        table.register("odd", torch.zeros(100, dtype=torch.uint8), 8)
    with pytest.raises(ValueError, match="2 units, but its ownership has 3"):
        table.register("other", torch.zeros(16, dtype=torch.uint8), 8, Ownership(3))
    assert len(table) == 0


def test_any_dtype_and_shape_is_bytes() -> None:
    table = RegionTable()
    region = table.register("typed", torch.ones(2, 3, dtype=torch.float32), 12)
    handle = table.claim(region, 12, 12)
    assert torch.equal(table.resolve(handle).view(torch.float32), torch.ones(3))


def test_shared_units_are_claimed_by_their_tier() -> None:
    table, ownership = RegionTable(), Ownership(4)
    keys = table.register("keys", torch.zeros(32, dtype=torch.uint8), 8, ownership)
    values = table.register("values", torch.ones(64, dtype=torch.uint8), 16, ownership)
    with pytest.raises(ValueError, match="claimed and released by its tier"):
        table.claim(keys, 0, 8)
    with pytest.raises(StaleHandle, match="nobody owns unit 3"):
        table.handle(keys, 3)
    with pytest.raises(ValueError, match="no unit 4 in 4"):
        table.handle(keys, 4)
    ownership.take_run(3, 4)
    key, value = table.handle(keys, 3), table.handle(values, 3)
    assert (key.offset, key.length) == (24, 8)
    assert (value.offset, value.length) == (48, 16)
    with pytest.raises(ValueError, match="claimed and released by its tier"):
        table.release(key)
    ownership.clear()
    for handle in (key, value):
        with pytest.raises(StaleHandle):
            table.resolve(handle)


def test_regions_that_share_bytes_are_found() -> None:
    table, buffer = RegionTable(), torch.zeros(64, dtype=torch.uint8)
    table.register("low", buffer[:40], 8)
    table.register("high", buffer[32:], 8)
    with pytest.raises(AssertionError, match="share bytes"):
        table.check_invariants()


operations = st.lists(
    st.tuples(
        st.sampled_from(["claim", "release", "retire"]), st.integers(0, 15), st.integers(1, 6)
    ),
    max_size=40,
)


@given(operations)
@settings(max_examples=200, deadline=None)
def test_live_handles_never_overlap(steps: list[tuple[str, int, int]]) -> None:
    """Against a model that is a set of units; every dead handle stays dead."""
    table, region, buffer = table_of()
    live: dict[Handle, set[int]] = {}
    dead: list[Handle] = []
    for action, unit, count in steps:
        units = set(range(unit, unit + count))
        if action == "claim":
            if unit + count <= 16 and not any(units & taken for taken in live.values()):
                live[table.claim(region, unit * UNIT, count * UNIT)] = units
            else:
                with pytest.raises(ValueError, match=r"overlap|not inside"):
                    table.claim(region, unit * UNIT, count * UNIT)
        elif action == "release" and live:
            handle = list(live)[unit % len(live)]
            table.release(handle)
            dead.append(handle)
            del live[handle]
        elif action == "retire" and unit == 0:
            table.retire(region)
            dead += live
            live.clear()
        table.check_invariants()
        for handle in live:
            assert torch.equal(table.resolve(handle), buffer[handle.offset : handle.end])
        for handle in dead:
            with pytest.raises(StaleHandle):
                table.resolve(handle)
