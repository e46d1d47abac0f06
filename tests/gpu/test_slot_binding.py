"""Entries that are bound to slots, on a GPU: a copy engine fills them, and those passed over keep their bytes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from kvxfer.memory import HostMemory
from kvxfer.row_sums import row_sum
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Ring, Span, SumKind, SumOrder
from kvxfer.streams.slot_binding import bound_slots, offer_slots
from kvxfer.streams.spans import NO_OFFSETS

pytestmark = pytest.mark.gpu
SLOT_BYTES, NUM_SLOTS, NUM_ENTRIES = 1 << 20, 4, 40
ROW_BYTES = 1152
NUM_ROWS = SLOT_BYTES // ROW_BYTES


def wait_done(ring: Ring, number: int) -> None:
    deadline_s = time.monotonic() + 20
    while not ring.is_done(number):
        assert time.monotonic() < deadline_s, f"entry {number} does not end"
        time.sleep(1e-4)


@pytest.mark.parametrize("num_streams", [1, 2])
def test_slots_are_filled_in_turn_and_kept(num_streams: int) -> None:
    pool = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8, device="cuda")
    rows = pool[: pool.numel() // ROW_BYTES * ROW_BYTES].view(-1, ROW_BYTES)
    ring, slots = Ring.create(NUM_SLOTS, NUM_ROWS), HostMemory.create(NUM_SLOTS * SLOT_BYTES, "slots")
    offer_slots(ring, NUM_SLOTS, SLOT_BYTES)
    stream = CudaRowStream(ring, DevicePool.of(pool), slots, num_streams=num_streams, may_bind=True)
    bound = bound_slots(ring)
    assert bound is not None
    rows[torch.zeros(NUM_ROWS, dtype=torch.int64).cuda()].cpu()  # no kernel is loaded beside a stream that waits
    stream.enqueue(0, NUM_ENTRIES)
    expected: dict[int, np.ndarray] = {}
    for number in range(NUM_ENTRIES):
        slot = bound.slot_of(number)
        if number % 7 == 5:
            kept = Span(*bound.keep(slot, SLOT_BYTES)[: len(Span._fields)].tolist())
            ring.fill_lane(slot, [kept], NO_OFFSETS)
        else:
            which = np.random.default_rng(number).permutation(len(rows))[:NUM_ROWS]
            span = Span(ROW_BYTES, NUM_ROWS, 16, MemoryIndex.POOL, 0, 0, MemoryIndex.STAGING, 0, LINEAR)
            ring.fill_lane(slot, [span], which.astype(np.int64) * ROW_BYTES, SumOrder(SumKind.MOVED, 0))
            expected[slot] = rows[torch.from_numpy(which).cuda()].cpu().numpy().reshape(-1)
        ring.order(number, OrderCode.RUN, slot)
        wait_done(ring, number)
        if number % 7 != 5:
            assert ring.sum_of(number) == row_sum(expected[slot])
        for filled, wanted in expected.items():
            got = slots.array[filled * SLOT_BYTES :][: wanted.size]
            assert np.array_equal(got, wanted), f"slot {filled} after entry {number}"
    stream.close()
    ring.close()
    slots.close()
