"""A worker whose agent is killed: python -m tests.gpu.orphaned_child HANDLE.

Its stream gathers into slots on the GPU, which another process allocated, over and over. It says "ready", goes on until
a line comes in, by which time that process is dead, and a while longer; then it scatters out of the slots. It says
"survived" if all of that was carried out and every byte of its own pool is right.
"""

from __future__ import annotations

import base64
import select
import sys

import msgspec
import torch

from kvxfer.errors import TransportError
from kvxfer.streams.cuda_stream import PULL_CTAS, CudaRowStream
from kvxfer.streams.device import DevicePool, PoolHandle, map_pool
from kvxfer.streams.ring import LINEAR, OrderCode, Ring, Span
from tests.gpu.orders import MEMORY_BYTES, NUM_LANES, NUM_OFFSETS, POOL, SLOTS, Segment, contents, fill, wait_done

GATHER = Segment([Span(1024, 512, 16, POOL, 0, LINEAR, SLOTS, 0, LINEAR)], [])
SCATTER = Segment([Span(1024, 512, 16, SLOTS, 0, LINEAR, POOL, MEMORY_BYTES // 2, LINEAR)], [])
NUM_LATE = 50


def main(handle: str) -> None:
    slots = map_pool(msgspec.json.decode(base64.b64decode(handle), type=PoolHandle))
    before = torch.from_numpy(contents(3)[POOL])
    pool = before.cuda()
    ring = Ring.create(NUM_LANES, NUM_OFFSETS)
    torch.cuda.synchronize()
    stream = CudaRowStream(ring, DevicePool.of(pool), slots.pool, max_ctas=PULL_CTAS)
    number = num_late = 0

    def run(segment: Segment) -> None:
        nonlocal number
        stream.enqueue(number)
        fill(ring, number % NUM_LANES, segment)
        ring.order(number, OrderCode.RUN, number % NUM_LANES)
        wait_done(ring, number)
        number += 1

    run(GATHER)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while num_late < NUM_LATE:
        run(GATHER)
        num_late += bool(num_late or select.select([sys.stdin], [], [], 0)[0])
    run(SCATTER)
    stream.close()
    after = pool.cpu()
    half = MEMORY_BYTES // 2
    assert torch.equal(after[:half], before[:half])
    assert torch.equal(after[half:], before[:half]), "the rows that came back out of the slots differ"
    try:
        slots.close()
        closing = "closed"
    except TransportError as error:
        closing = str(error)
    ring.close()
    sys.stdout.write(f"survived, {number} entries, mapping of the dead process: {closing}\n")


if __name__ == "__main__":
    main(sys.argv[1])
