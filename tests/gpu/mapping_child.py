"""A second process, which maps the pools of the first: python -m tests.gpu.mapping_child REQUEST FD DEVICE_INDEX.

It pulls rows out of both pools into one of its own, on its GPU, by a row stream, and says "pulled" when they are right,
and whether CUDA would have kept it from writing into the first.
"""

from __future__ import annotations

import base64
import sys

import msgspec
import numpy as np
import torch

from kvxfer.memory import HostMemory
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import PoolHandle, allocate_pool, map_pool
from kvxfer.streams.ring import LINEAR, OrderCode, Ring, Span
from tests.gpu.orders import (
    MEMORY_BYTES,
    NUM_LANES,
    NUM_OFFSETS,
    Segment,
    apply,
    assert_same,
    contents,
    fill,
    wait_done,
)

SEED = 11
ROWS = list(range(0, 400 * 1152, 1152))


def pull(src_memory: int, dst_first: int) -> Segment:
    """Every row of the first 400, last one first, into a dense run."""
    return Segment([Span(1152, 400, 16, src_memory, 0, 0, 0, dst_first, LINEAR)], ROWS[::-1])


def main(request: str, fd: int, device_index: int) -> None:
    torch.cuda.set_device(device_index)
    handles = msgspec.json.decode(base64.b64decode(request), type=list[PoolHandle])
    mapped = [
        map_pool(handle, each, is_read_only=True, device_index=device_index)
        for handle, each in zip(handles, (fd, None), strict=True)
    ]
    assert not mapped[1].is_read_only, "legacy handles have no such mappings"
    own = allocate_pool(MEMORY_BYTES, device_index)
    memories = contents(SEED)
    tensor = own.tensor()
    tensor.copy_(torch.from_numpy(memories[0]))
    torch.cuda.synchronize()
    ring, slots = Ring.create(NUM_LANES, NUM_OFFSETS), HostMemory.create(MEMORY_BYTES, "slots")
    stream = CudaRowStream(ring, own.pool, slots)
    for number, (index, each) in enumerate(zip((2, 3), mapped, strict=True)):
        stream.set_memory(index, each.pool)
        stream.enqueue(number)
        segment = pull(index, number * 400 * 1152)
        fill(ring, number, segment)
        ring.order(number, OrderCode.RUN, number)
        wait_done(ring, number)
        apply(segment, [memories[0], memories[1], memories[2], memories[2]])
    assert_same(tensor.cpu().numpy(), memories[0], "own pool")
    stream.close()
    del tensor
    is_read_only = mapped[0].is_read_only
    for pool in (*mapped, own):
        pool.close()
    slots.close()
    ring.close()
    sys.stdout.write(f"pulled, {is_read_only=}\n")


if __name__ == "__main__":
    assert np.asarray(ROWS).max() + 1152 <= MEMORY_BYTES
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
