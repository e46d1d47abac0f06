"""Sums of a GPU's row stream: those of numpy, for all rows; a segment that has changed in its slot reaches no page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.memory import HostMemory
from kvxfer.ownership import Int64Array
from kvxfer.row_sums import MODULUS, row_sum
from kvxfer.streams import cuda_stream
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Ring, Span, SumKind, SumOrder
from tests.gpu import limits
from tests.gpu.orders import MEMORY_BYTES, NUM_LANES, POOL, SEGMENT_BYTES, SLOTS, Bytes, make_segments, wait_done
from tests.gpu.test_cuda_stream import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
cuda: Any = torch.cuda  # not all of it has types


@pytest.fixture(params=[1, 2])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    made = Worker(num_streams=request.param, staging_bytes=SEGMENT_BYTES)
    yield made
    made.end()


def order(worker: Worker, number: int, spans: list[Span], offsets: list[int], summed: SumOrder) -> None:
    lane = number % NUM_LANES
    worker.ring.fill_lane(lane, spans, np.array(offsets, dtype=np.int64), summed)
    worker.ring.order(number, OrderCode.RUN, lane)


def test_gathers_tell_the_sums_of_what_they_have_moved(worker: Worker) -> None:
    """Rows of any size and alignment, in spans with gaps between them, which count as zeros."""
    segments = make_segments(11, 180)[::3]
    worker.enqueue(len(segments))
    for number, segment in enumerate(segments):
        begin = segment.spans[0].dst_first_byte
        order(worker, number, segment.spans, segment.offsets, SumOrder(SumKind.MOVED, begin))
        wait_done(worker.ring, number)
        expected = 0
        for span in segment.spans:
            rows = worker.slots.array[span.dst_first_byte :][: span.num_rows * span.row_bytes]
            expected += row_sum(rows, span.dst_first_byte - begin)
        assert worker.ring.sum_of(number) == expected % MODULUS, f"segment {number}: {segment.spans}"


def landed(worker: Worker, row_bytes: int, num_rows: int, first_byte: int) -> tuple[Bytes, Span, list[int], SumOrder]:
    """A segment in the slots, the span that puts it into pages, and the sum that it must have."""
    slot = worker.slots.array[first_byte:][: row_bytes * num_rows]
    slot[:] = np.random.default_rng(row_bytes).integers(0, 256, slot.size, dtype=np.uint8)
    bits = row_bytes | 16
    span = Span(row_bytes, num_rows, bits & -bits, MemoryIndex.STAGING, 0, LINEAR, POOL, 64, 0)
    stride = -(-row_bytes // 16) * 16
    offsets = (np.random.default_rng(1).permutation(num_rows) * stride).tolist()
    return slot, span, offsets, SumOrder(SumKind.CHECKED, first_byte, slot.size, row_sum(slot))


@pytest.mark.parametrize("row_bytes", [1152, 656, 576, 584, 132, 130, 577, 5, 1])
def test_segments_that_have_changed_reach_no_page(worker: Worker, row_bytes: int) -> None:
    num_rows = min(1500, (SEGMENT_BYTES - 16) // row_bytes)
    slot, span, offsets, summed = landed(worker, row_bytes, num_rows, 4096)
    last = slot.size - 1
    places = [0, 7, 8, 15, 16, last, last - 1, last - 16, last // 2, last // 3]
    worker.enqueue(len(places) + 1)
    for number, place in enumerate(places):
        slot[place] ^= 1 << number % 8
        order(worker, number, [span], offsets, summed)
        wait_done(worker.ring, number)
        assert worker.ring.sum_of(number) == row_sum(slot) != summed.expected, place
        slot[place] ^= 1 << number % 8
    number = len(places)
    order(worker, number, [span], offsets, summed)
    wait_done(worker.ring, number)
    assert worker.ring.sum_of(number) == summed.expected
    expected = worker.memories[POOL].copy()
    for row, offset in enumerate(offsets):
        expected[64 + offset :][:row_bytes] = slot[row * row_bytes :][:row_bytes]
    assert np.array_equal(worker.pool.cpu().numpy(), expected)


def test_pages_stay_as_they_were(worker: Worker) -> None:
    slot, span, offsets, summed = landed(worker, 1152, 50, 0)
    slot[31] ^= 4
    worker.enqueue(3)
    order(worker, 0, [span], offsets, summed)
    wait_done(worker.ring, 0)
    order(worker, 1, [span], offsets, SumOrder(SumKind.CHECKED, 16, SEGMENT_BYTES + 16, summed.expected))
    wait_done(worker.ring, 1)
    assert worker.ring.sum_of(1) == MODULUS - 1 - summed.expected
    order(worker, 2, [span], offsets, SumOrder(SumKind.CHECKED, MEMORY_BYTES - 64, 128, 0))
    wait_done(worker.ring, 2)
    assert worker.ring.sum_of(2) == MODULUS - 1
    assert np.array_equal(worker.pool.cpu().numpy(), worker.memories[POOL])


def test_orders_of_all_kinds_beside_each_other(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong segments and gathers, four open at a time; and nothing is compiled or loaded for any of it."""
    import triton
    from cuda.bindings import driver

    calls: list[str] = []
    monkeypatch.setattr(triton, "compile", lambda *_args, **_options: calls.append("compile"))
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda *_args: calls.append("load"))
    segments = [landed(worker, 1152, 56, lane * SEGMENT_BYTES) for lane in range(2)]
    out = 8 * SEGMENT_BYTES
    gather = Span(640, 100, 16, POOL, 512 << 10, LINEAR, SLOTS, out, LINEAR)
    for first in range(0, 240, 4):
        worker.enqueue(4)  # all at once they would fill a launch queue
        for lane, (_, span, offsets, summed) in enumerate(segments):
            order(worker, first + lane, [span], offsets, summed)
        _, span, offsets, summed = segments[0]
        wrong = SumOrder(SumKind.CHECKED, 0, summed.num_bytes, summed.expected ^ 1 << first % 64)
        order(worker, first + 2, [span], offsets, wrong)
        order(worker, first + 3, [gather], [], SumOrder(SumKind.MOVED, out))
        for number in range(first, first + 4):
            wait_done(worker.ring, number)
        assert worker.ring.sum_of(first) == worker.ring.sum_of(first + 2) == segments[0][3].expected
        assert worker.ring.sum_of(first + 1) == segments[1][3].expected
        assert worker.ring.sum_of(first + 3) == row_sum(worker.slots.array[out:][:64000])
    assert calls == []


ROW_BYTES, BIG_SEGMENT_BYTES, NUM_SLOTS = 1152, 8 << 20, 8


def test_rates_with_and_without_sums(stderr_fd: int) -> None:
    """8 MiB segments, all orders given at once. Prints GB/s, and the memory that checks take."""
    num_rows = BIG_SEGMENT_BYTES // ROW_BYTES
    pool = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, device="cuda")
    rows = np.random.default_rng(0).permutation(pool.numel() // ROW_BYTES)[:num_rows].astype(np.int64) * ROW_BYTES
    slots = HostMemory.create(NUM_SLOTS * BIG_SEGMENT_BYTES, "slots")
    cuda.synchronize()
    rates: dict[str, float] = {}
    for way, max_ctas in (("gather", cuda_stream.GATHER_CTAS), ("scatter", cuda_stream.SCATTER_CTAS)):
        for is_summed in (False, True):
            is_checked = is_summed and way == "scatter"
            free_bytes = cuda.mem_get_info()[0]
            ring = Ring.create(NUM_SLOTS, num_rows, BIG_SEGMENT_BYTES if is_checked else 0)
            stream = CudaRowStream(ring, DevicePool.of(pool), slots, max_ctas=max_ctas)
            used_bytes = free_bytes - cuda.mem_get_info()[0]
            name = f"{way} {'with' if is_summed else 'without'} sums"
            rates[name] = _rate(ring, stream, way, rows, slots.array, is_summed=is_summed)
            stream.close()
            ring.close()
            os.write(stderr_fd, f"\n{name}: {rates[name]:.1f} GB/s, {used_bytes >> 20} MiB of the GPU".encode())
    slots.close()
    for way in ("gather", "scatter"):
        assert rates[f"{way} with sums"] > 0.5 * rates[f"{way} without sums"], "sums cost half or more"


def _rate(ring: Ring, stream: CudaRowStream, way: str, rows: Int64Array, slots: Bytes, *, is_summed: bool) -> float:
    """GB/s of 96 orders; slots hold what a gather puts there, so that a scatter has the right sum."""
    num_bytes, num_orders = rows.size * ROW_BYTES, 96
    expected = row_sum(slots[:num_bytes])
    for lane in range(NUM_SLOTS):
        begin = lane * BIG_SEGMENT_BYTES
        if way == "gather":
            span = Span(ROW_BYTES, rows.size, 16, POOL, 0, 0, SLOTS, begin, LINEAR)
            summed = SumOrder(SumKind.MOVED if is_summed else SumKind.NONE, begin)
        else:
            src = (MemoryIndex.STAGING, 0) if is_summed else (MemoryIndex.SLOTS, begin)
            span = Span(ROW_BYTES, rows.size, 16, *src, LINEAR, POOL, 0, 0)
            summed = SumOrder(SumKind.CHECKED if is_summed else SumKind.NONE, begin, num_bytes, expected)
        ring.fill_lane(lane, [span], rows, summed)

    def skip() -> None:
        for number in range(num_orders):
            if not ring.is_done(number):
                ring.order(number, OrderCode.SKIP)

    limits.skippers.add(skip)
    for number in range(num_orders):
        stream.enqueue(number)
    began_s = time.perf_counter()
    for number in range(num_orders):
        ring.order(number, OrderCode.RUN, number % NUM_SLOTS)
    for number in range(num_orders):
        wait_done(ring, number)
    taken_s = time.perf_counter() - began_s
    limits.skippers.remove(skip)
    if is_summed:
        expected = row_sum(slots[:num_bytes])
        assert {ring.sum_of(number) for number in range(num_orders)} == {expected}
    return num_orders * num_bytes / taken_s / 1e9
