"""Entries that are bound to slots: a copy engine takes there what programs have packed in memory of the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.errors import ContractError
from kvxfer.memory import HostMemory
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Ring, Span
from kvxfer.streams.slot_binding import MAX_BOUND_BYTES, BoundSlots, bind_entries, bound_slots, offer_slots
from tests.streams.fake_cuda import FakeCuda
from tests.streams.test_cuda_stream import NUM_BYTES, Owner

SLOT_BYTES = 1024
PACKED = Span(64, 10, 16, MemoryIndex.POOL, 128, LINEAR, MemoryIndex.STAGING, 0, LINEAR)


def restored(slot: int) -> Span:
    """What keeps `slot` as it is when its entry has nothing else to do."""
    return Span(SLOT_BYTES, 1, 16, MemoryIndex.SLOTS, slot * SLOT_BYTES, LINEAR, MemoryIndex.STAGING, 0, LINEAR)


class BoundOwner(Owner):
    """Its agent has offered `num_slots` slots."""

    def __init__(self, num_streams: int, num_slots: int) -> None:
        self.num_slots = num_slots
        super().__init__(num_streams)

    def make_stream(self, num_streams: int) -> CudaRowStream:
        offer_slots(self.ring, self.num_slots, SLOT_BYTES)
        pool = DevicePool(self.pool.address, NUM_BYTES, 0)
        return CudaRowStream(self.ring, pool, self.slots, num_streams=num_streams, may_bind=True)

    def slot(self, slot: int, memory: HostMemory | None = None) -> np.ndarray:
        return (memory or self.slots).array[slot * SLOT_BYTES :][:SLOT_BYTES]


@pytest.fixture(params=[(1, 3), (2, 3), (2, 4)])
def owner(cuda: FakeCuda, request: pytest.FixtureRequest) -> Iterator[BoundOwner]:
    made = BoundOwner(*request.param)
    yield made
    made.end()
    assert cuda.registered == {}
    assert list(cuda.streams) == [0]
    assert cuda.scratch == {}


def test_each_entry_fills_its_slot(owner: BoundOwner) -> None:
    assert bound_slots(owner.ring) == BoundSlots(owner.num_slots, SLOT_BYTES)
    owner.enqueue(2 * owner.num_slots)
    for number in range(2 * owner.num_slots):
        owner.pool.array[128] = number + 1
        owner.run(number, PACKED)
        owner.wait_done(number)
        filled = owner.slot(number % owner.num_slots)
        assert np.array_equal(filled[:640], owner.pool.array[128:768])
    assert [owner.slot(slot)[0] for slot in range(owner.num_slots)] == [
        owner.num_slots + slot + 1 for slot in range(owner.num_slots)
    ]


def test_a_slot_whose_entry_has_nothing_to_do_can_keep_what_it_holds(owner: BoundOwner) -> None:
    owner.slots.array[:] = np.random.default_rng(3).integers(1, 256, NUM_BYTES)
    before = owner.slots.array.copy()
    owner.enqueue(3)
    owner.run(0, PACKED)
    owner.wait_done(0)
    owner.run(1, restored(1))
    owner.wait_done(1)
    assert np.array_equal(owner.slots.array[SLOT_BYTES:], before[SLOT_BYTES:])
    owner.ring.order(2, OrderCode.SKIP)
    owner.wait_done(2)
    assert not np.array_equal(owner.slot(2), before[2 * SLOT_BYTES :][:SLOT_BYTES]), "else nobody need restore a slot"


def test_slots_that_have_moved(owner: BoundOwner, cuda: FakeCuda) -> None:
    with HostMemory.create(NUM_BYTES, "slots") as moved, HostMemory.create(SLOT_BYTES, "few") as few:
        with pytest.raises(ContractError, match=r"^slots: got .*, expected host memory for BoundSlots"):
            owner.stream.set_memory(MemoryIndex.SLOTS, few)
        assert few.address not in cuda.registered
        owner.stream.set_memory(MemoryIndex.SLOTS, moved)
        owner.enqueue(1)
        owner.run(0, PACKED)
        owner.wait_done(0)
        assert np.array_equal(owner.slot(0, moved)[:640], owner.pool.array[128:768])
        assert not owner.slots.array.any()
        owner.stream.close()


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 1024), (2, 0), (65, 1024), (-1, -1024)])
def test_slots_that_do_not_fit_bind_nothing(num_slots: int, slot_bytes: int) -> None:
    ring = Ring.create(1, 1)
    offer_slots(ring, num_slots, slot_bytes)
    assert bind_entries(ring, NUM_BYTES) is None
    assert bound_slots(ring) is None
    ring.close()


def test_slots_as_large_as_a_chunk_bind_nothing() -> None:
    ring = Ring.create(1, 1)
    offer_slots(ring, 2, MAX_BOUND_BYTES + 16)
    assert bind_entries(ring, 1 << 40) is None
    offer_slots(ring, 2, MAX_BOUND_BYTES)
    assert bind_entries(ring, 1 << 40) == BoundSlots(2, MAX_BOUND_BYTES)
    ring.close()
