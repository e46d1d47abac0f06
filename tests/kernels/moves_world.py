"""A ring and memories for tests of `move_rows`, spans of all kinds, and what must come of them."""

import random
from types import ModuleType

import numpy as np
import pytest
import torch

import kvxfer.kernels
from kvxfer.kernels import reference
from kvxfer.memory import HostMemory
from kvxfer.streams.ring import (
    LANES_OFFSET_BYTES,
    LINEAR,
    MemoryIndex,
    OrderCode,
    Ring,
    Span,
    SumKind,
    SumOrder,
    order_offset_bytes,
    order_value,
)
from tests.kernels.conftest import DEVICE

MEMORY_BYTES = 96 << 10
NUM_LANES, NUM_OFFSETS = 3, 900
NO_SUM = SumOrder(SumKind.NONE, 0)
# The reference works on addresses of host memory only, which is all these tests have.
all_ops = pytest.mark.parametrize("ops", [kvxfer.kernels, reference], ids=lambda module: module.__name__)


class World:
    """A ring and three memories of random bytes, which the device can reach; the last one is `STAGING`, too."""

    def __init__(self) -> None:
        self.ring = Ring.create(NUM_LANES, NUM_OFFSETS)
        self.memories = [HostMemory.create(MEMORY_BYTES, "test-rows") for _ in range(3)]
        for idx, memory in enumerate(self.memories):
            memory.array[:] = np.random.default_rng(idx).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self._shared = [self.ring.memory, *self.memories]
        if DEVICE == "cuda":
            for memory in self._shared:
                assert int(torch.cuda.cudart().cudaHostRegister(memory.address, memory.num_bytes, 2)) == 0  # type: ignore[no-untyped-call]
        table = torch.zeros(MemoryIndex.STAGING + 1, 2, dtype=torch.int64)
        for idx in (0, 1, 2, MemoryIndex.STAGING):
            table[idx] = torch.tensor([self.memories[min(idx, 2)].address, MEMORY_BYTES])
        self.table = table.to(DEVICE)

    def move(self, ops: ModuleType, number: int, max_ctas: int = 2) -> None:
        """What a stream does for an entry whose order has come."""
        words = torch.from_numpy(self.ring.memory.array.view(np.int64))
        options = {} if ops is reference else {"max_ctas": max_ctas}
        ops.move_rows(
            words,
            self.table,
            order_offset_bytes(number) // 8,
            order_value(number, OrderCode.RUN),
            LANES_OFFSET_BYTES // 8,
            self.ring.lane_bytes // 8,
            **options,
        )
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def order(
        self,
        number: int,
        spans: list[Span],
        offsets: list[int],
        lane: int = 0,
        summed: SumOrder = NO_SUM,
    ) -> None:
        self.ring.fill_lane(lane, spans, np.array(offsets, dtype=np.int64), summed)
        self.ring.order(number, OrderCode.RUN, lane)

    def bytes(self) -> list[bytes]:
        return [memory.array.tobytes() for memory in self.memories]

    def close(self) -> None:
        for memory in self._shared:
            if DEVICE == "cuda":
                assert int(torch.cuda.cudart().cudaHostUnregister(memory.address)) == 0  # type: ignore[no-untyped-call]
        self.ring.close()
        for memory in self.memories:
            memory.close()


def naive(before: list[bytes], spans: list[Span], offsets: list[int]) -> list[bytes]:
    """What the memories hold afterwards, by slices of bytes."""
    after = [bytearray(memory) for memory in before]
    for span in spans:
        for row in range(span.num_rows):
            src, dst = (
                first + (row * span.row_bytes if table == LINEAR else offsets[table + row])
                for first, table in ((span.src_first_byte, span.src_table), (span.dst_first_byte, span.dst_table))
            )
            taken = before[span.src_memory][src : src + span.row_bytes]
            after[span.dst_memory][dst : dst + span.row_bytes] = taken
    return [bytes(memory) for memory in after]


def random_spans(rng: random.Random, word_bytes: int, num_spans: int) -> tuple[list[Span], list[int]]:
    """Spans from memory 0 and 1 into 1 and 2, no place written twice and none read that is written."""
    spans: list[Span] = []
    offsets: list[int] = []
    free = {(memory, half): half * MEMORY_BYTES // 2 for memory in range(3) for half in range(2)}
    for _ in range(num_spans):
        row_bytes = word_bytes * rng.randint(1, max(1, min(2000, 6000 // num_spans) // word_bytes))
        num_rows = rng.randint(1, max(1, MEMORY_BYTES // 2 // num_spans // (row_bytes + 2 * word_bytes) // 2))
        # Upper halves are read, lower ones written.
        src_memory, dst_memory = rng.choice([(0, 1), (1, 2), (0, 2), (2, 0), (1, 1)])
        sides = []
        for memory, half in ((src_memory, 1), (dst_memory, 0)):
            stride = row_bytes + word_bytes * rng.randint(0, 2)
            first = free[memory, half] + word_bytes * rng.randint(0, 3)
            free[memory, half] = first + num_rows * stride
            assert free[memory, half] <= (half + 1) * MEMORY_BYTES // 2
            if rng.random() < 0.3:
                sides.append((first, LINEAR))
                continue
            places = [row * stride for row in range(num_rows)]
            rng.shuffle(places)
            sides.append((first, len(offsets)))
            offsets += places
        (src_first, src_table), (dst_first, dst_table) = sides
        spans.append(
            Span(row_bytes, num_rows, word_bytes, src_memory, src_first, src_table, dst_memory, dst_first, dst_table)
        )
    return spans, offsets
