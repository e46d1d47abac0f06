"""The agent's part, in a process that has no CUDA: python -m tests.gpu.ordering_child, then what `main` takes."""

from __future__ import annotations

import sys
import time

from kvxfer.memory import HostMemory
from kvxfer.streams.ring import OrderCode, Ring
from tests.gpu.orders import (
    MEMORY_BYTES,
    NUM_LANES,
    SLOTS,
    apply,
    assert_same,
    contents,
    fill,
    make_segments,
    wait_done,
)


def main(ring_fd: int, ring_bytes: int, slots_fd: int, seed: int, num_segments: int, num_ordered: int) -> None:
    """Give the orders of the first `num_ordered` segments and check the slots after each gather. Then, where segments
    are left, say so and sleep until killed."""
    ring = Ring.attach(ring_fd, ring_bytes, NUM_LANES)
    slots = HostMemory.attach(slots_fd, MEMORY_BYTES)
    memories = contents(seed)
    slots.array[:] = memories[SLOTS]
    # The slots that this side sees are the ones that count.
    for number, segment in enumerate(make_segments(seed, num_segments)[:num_ordered]):
        lane = number % NUM_LANES
        fill(ring, lane, segment)
        while ring.num_enqueued <= number:
            time.sleep(1e-4)
        ring.order(number, OrderCode.RUN, lane)
        wait_done(ring, number)
        apply(segment, memories)
        assert_same(slots.array, memories[SLOTS], f"slots after entry {number}")
    assert not {"torch", "triton", "cuda"} & sys.modules.keys()
    sys.stdout.write("ordered\n")
    sys.stdout.flush()
    if num_ordered < num_segments:
        time.sleep(60)
    slots.close()
    ring.close()


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
