"""The check of a write's entries: what it finds is the same for one entry as for several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvxfer.errors import BoundsError
from kvxfer.transports import MemoryKind, Region, RegionDescriptor, WriteBatch
from kvxfer.transports._regions import RemoteRegion, checked_entries

_LOCAL = [Region(1000, 100), Region(5000, 100, kind=MemoryKind.DEVICE, device_index=3)]
_REMOTE = {7: RemoteRegion(50, 90_000), 8: RemoteRegion(50, 80_000, gpu_index=2)}


def _batch(region: int, entries: Sequence[tuple[int, int, int]]) -> WriteBatch:
    src, dst, lengths = (np.array(column, dtype=np.uint64) for column in zip(*entries, strict=True))
    return WriteBatch(RegionDescriptor(region, 50), src, dst, lengths)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("src", "src_gpu"), [(1000, -1), (1060, -1), (5060, 3)])
@pytest.mark.parametrize(("region", "dst_address", "dst_gpu"), [(7, 90_000, -1), (8, 80_000, 2)])
def test_entries_are_absolute_and_name_the_memory_of_both_sides(
    count: int, src: int, src_gpu: int, region: int, dst_address: int, dst_gpu: int
) -> None:
    found = checked_entries(_batch(region, [(src, 10, 40)] * count), _LOCAL, _REMOTE)
    assert found.src.tolist() == [src] * count
    assert found.dst.tolist() == [dst_address + 10] * count
    assert found.lengths.tolist() == [40] * count
    assert (found.src_gpu, found.dst_gpu) == (src_gpu, dst_gpu)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("entry", [(1061, 10, 40), (999, 10, 40), (1000, 11, 40), (1000, 51, 0), (1000, 2**64 - 1, 2)])
def test_an_entry_out_of_bounds_is_named(count: int, entry: tuple[int, int, int]) -> None:
    entries = [*[(1000, 0, 50)] * (count - 1), entry]
    with pytest.raises(BoundsError, match=rf"^entry {count - 1}: got "):
        checked_entries(_batch(7, entries), _LOCAL, _REMOTE)


def test_an_entry_of_no_length_is_left_out() -> None:
    assert checked_entries(_batch(7, [(1000, 50, 0)]), _LOCAL, _REMOTE).num_entries == 0
