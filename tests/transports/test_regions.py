"""The check of a write's entries: what it finds is the same for one entry as for several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvxfer.errors import BoundsError, ContractError
from kvxfer.transports import ContiguousWrite, MemoryKind, Region, RegionDescriptor, WriteBatch
from kvxfer.transports._regions import RemoteRegion, checked_write

_LOCAL = {4: Region(1000, 100), 9: Region(5000, 100, kind=MemoryKind.DEVICE, device_index=3)}
_REMOTE = {7: RemoteRegion(50, 90_000), 8: RemoteRegion(50, 80_000, gpu_index=2)}


def _writes(region: int, entries: Sequence[tuple[int, int, int]]) -> list[WriteBatch | ContiguousWrite]:
    """The same write in each form in which it can be given."""
    src, dst, lengths = (np.array(column, dtype=np.uint64) for column in zip(*entries, strict=True))
    named = RegionDescriptor(region, 50)
    batch = WriteBatch(named, src, dst, lengths)
    return [batch, ContiguousWrite(named, *entries[0])] if len(entries) == 1 else [batch]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("src", "src_region", "src_gpu"), [(1000, 4, -1), (1060, 4, -1), (5060, 9, 3)])
@pytest.mark.parametrize(("region", "dst_address", "dst_gpu"), [(7, 90_000, -1), (8, 80_000, 2)])
def test_entries_are_absolute_and_name_the_memory_of_both_sides(
    count: int, src: int, src_region: int, src_gpu: int, region: int, dst_address: int, dst_gpu: int
) -> None:
    for write in _writes(region, [(src, 10, 40)] * count):
        found = checked_write(write, _LOCAL, _REMOTE)
        assert list(found.rows()) == [(src, dst_address + 10, 40)] * count
        assert found.table.tolist() == [[src, dst_address + 10, 40]] * count
        assert (found.num_entries, found.num_bytes, found.least_bytes) == (count, 40 * count, 40)
        assert (found.src_regions, found.src_gpu, found.dst_gpu) == ((src_region,), src_gpu, dst_gpu)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("entry", [(1061, 10, 40), (999, 10, 40), (1000, 11, 40), (1000, 51, 0), (1000, 2**64 - 1, 2)])
def test_an_entry_out_of_bounds_is_named(count: int, entry: tuple[int, int, int]) -> None:
    for write in _writes(7, [*[(1000, 0, 50)] * (count - 1), entry]):
        with pytest.raises(BoundsError, match=rf"^entry {count - 1}: got "):
            checked_write(write, _LOCAL, _REMOTE)


@pytest.mark.parametrize("named", [RegionDescriptor(5, 50), RegionDescriptor(7, 49)])
def test_a_region_that_the_peer_has_not_is_refused(named: RegionDescriptor) -> None:
    with pytest.raises(BoundsError, match=rf"^got region {named.region_id} of {named.num_bytes} bytes"):
        checked_write(ContiguousWrite(named, 1000, 0, 1), _LOCAL, _REMOTE)


def test_an_entry_of_no_length_is_left_out() -> None:
    for write in _writes(7, [(1000, 50, 0)]):
        found = checked_write(write, _LOCAL, _REMOTE)
        assert (found.num_entries, found.num_bytes, found.least_bytes) == (0, 0, 0)
    assert list(checked_write(_writes(7, [(1000, 0, 0), (1001, 1, 2)])[0], _LOCAL, _REMOTE).rows()) == [
        (1001, 90_001, 2)
    ]


def test_numbers_that_are_no_uint64_are_refused() -> None:
    for numbers in ((-1, 0, 1), (1000, -1, 1), (1000, 0, -1), (2**64, 0, 1)):
        with pytest.raises(ContractError, match=r"ContiguousWrite: got source .* expected numbers from 0"):
            checked_write(ContiguousWrite(RegionDescriptor(7, 50), *numbers), _LOCAL, _REMOTE)
    column = np.zeros(1, dtype=np.int64)
    with pytest.raises(ContractError, match=r"WriteBatch.src_addresses: got int64 \[1\], expected uint64 \[1\]"):
        checked_write(WriteBatch(RegionDescriptor(7, 50), column, column, column), _LOCAL, _REMOTE)  # type: ignore[arg-type]


def test_a_part_is_of_as_many_entries_as_there_are() -> None:
    batch, contiguous = (checked_write(write, _LOCAL, _REMOTE) for write in _writes(7, [(1000, 10, 40)]))
    for checked in (batch, contiguous):
        assert list(checked.part(0, 5).rows()) == list(checked.rows())
        assert checked.part(0, 0).num_entries == 0
        assert checked.part(1, 2).num_entries == 0
    pair = checked_write(_writes(7, [(1000, 10, 40), (1001, 10, 30)])[0], _LOCAL, _REMOTE)
    assert list(pair.part(1, 9).rows()) == [(1001, 90_010, 30)]
