"""A row stream on a GPU, steered through the ring: byte-exact, never in the way, never left waiting."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import ContractError
from kvxfer.memory import HostMemory
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import LINEAR, OrderCode, Ring, Span
from tests.gpu import limits
from tests.gpu.orders import (
    MEMORY_BYTES,
    NUM_LANES,
    NUM_OFFSETS,
    PEER,
    POOL,
    SLOTS,
    Segment,
    apply,
    assert_same,
    contents,
    fill,
    make_segments,
    wait_done,
)

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
WHOLE = Segment([Span(1024, 64, 16, POOL, 0, LINEAR, SLOTS, 0, LINEAR)], [])
HALF_A_SECOND = 900_000_000  # cycles, at 1.8 GHz
cuda: Any = torch.cuda  # not all of it has types


class Worker:
    """A worker's pool on the GPU, its stream, and what the agent shares with it."""

    def __init__(self, seed: int = 1, *, num_streams: int = 1, staging_bytes: int = 0) -> None:
        self.ring = Ring.create(NUM_LANES, NUM_OFFSETS, staging_bytes)
        self.slots = HostMemory.create(MEMORY_BYTES, "slots")
        self.memories = contents(seed)
        self.pool = torch.from_numpy(self.memories[POOL]).cuda()
        self.peer = torch.from_numpy(self.memories[PEER]).cuda()
        cuda.synchronize()
        self.stream = CudaRowStream(self.ring, DevicePool.of(self.pool), self.slots, num_streams=num_streams)
        self.stream.set_memory(PEER, DevicePool.of(self.peer))
        self.num_enqueued = 0
        self.more: list[HostMemory] = []
        limits.skippers.add(self.skip)

    def move_slots(self, num_bytes: int) -> HostMemory:
        memory = HostMemory.create(num_bytes, "slots")
        self.more.append(memory)
        self.stream.set_memory(SLOTS, memory)
        return memory

    def enqueue(self, num_entries: int) -> None:
        for _ in range(num_entries):
            self.stream.enqueue(self.num_enqueued)
            self.num_enqueued += 1
        self.ring.set_num_enqueued(self.num_enqueued)

    def run(self, number: int, segment: Segment) -> None:
        fill(self.ring, number % NUM_LANES, segment)
        self.ring.order(number, OrderCode.RUN, number % NUM_LANES)

    def skip(self) -> None:
        """Leave the stream nothing to wait for."""
        for number in range(self.num_enqueued):
            if not self.ring.is_done(number):
                self.ring.order(number, OrderCode.SKIP)

    def end(self) -> None:
        """What a client does that lost its agent: skip everything, wait, give back."""
        limits.skippers.remove(self.skip)
        self.ring.set_ended()
        self.skip()
        self.stream.close()
        for memory in (self.slots, *self.more):
            memory.close()
        self.ring.close()

    def start_child(self, seed: int, num_segments: int, num_ordered: int) -> subprocess.Popen[str]:
        ring_fd, slots_fd = self.ring.memory.fd, self.slots.fd
        numbers = [ring_fd, self.ring.memory.num_bytes, slots_fd, seed, num_segments, num_ordered]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.ordering_child", *(str(number) for number in numbers)],
            cwd=ROOT,
            pass_fds=(ring_fd, slots_fd),
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


@pytest.mark.parametrize("num_streams", [1, 2])
def test_an_agent_without_cuda_moves_rows(num_streams: int) -> None:
    seed, num_segments = 5, 48
    worker = Worker(seed, num_streams=num_streams)
    try:
        worker.enqueue(num_segments)
        with worker.start_child(seed, num_segments, num_segments) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ordered\n"
            assert child.wait(20) == 0
        for segment in make_segments(seed, num_segments):
            apply(segment, worker.memories)
        assert_same(worker.pool.cpu().numpy(), worker.memories[POOL], "pool")
        assert_same(worker.peer.cpu().numpy(), worker.memories[PEER], "the peer's pool")
    finally:
        worker.end()


def test_a_skipped_and_a_cancelled_entry_move_nothing(worker: Worker) -> None:
    worker.enqueue(4)
    worker.ring.order(0, OrderCode.SKIP)
    worker.run(2, WHOLE)  # its turn has not come: entry 1 has no order
    worker.ring.order(2, OrderCode.SKIP)
    wait_done(worker.ring, 0)
    assert not worker.ring.is_done(1)
    worker.ring.order(1, OrderCode.SKIP)
    wait_done(worker.ring, 2)
    assert not worker.slots.array.any()
    worker.run(3, WHOLE)
    wait_done(worker.ring, 3)
    apply(WHOLE, [worker.memories[POOL], expected := np.zeros(MEMORY_BYTES, dtype=np.uint8)])
    assert_same(worker.slots.array, expected, "slots")


def test_slots_may_move_and_rows_out_of_bounds_stay(worker: Worker) -> None:
    worker.enqueue(2)
    other = worker.move_slots(32 << 10)  # half of what the segment wants
    worker.run(0, WHOLE)
    worker.run(1, Segment([Span(64, 1, 16, POOL, 0, LINEAR, 77, 0, LINEAR)], []))
    wait_done(worker.ring, 1)
    assert_same(other.array, worker.memories[POOL][: 32 << 10], "slots")
    assert not worker.slots.array.any()


def test_entries_go_round_the_ring(worker: Worker) -> None:
    for first in range(0, 1200, 200):
        worker.enqueue(200)
        for number in range(first, first + 199):
            worker.ring.order(number, OrderCode.SKIP)
        worker.run(first + 199, WHOLE)
        wait_done(worker.ring, first + 199)
        assert worker.slots.array[: 64 << 10].any()
        worker.slots.array[:] = 0


def wait_timeline(ring: Ring, value: int) -> None:
    deadline_s = time.monotonic() + 10
    while ring.timeline < value:
        assert time.monotonic() < deadline_s, f"the timeline stands at {ring.timeline}, not {value}"
        time.sleep(1e-4)
    assert ring.timeline == value


def test_the_timeline_rises_behind_what_the_stream_was_given(worker: Worker) -> None:
    for stream in (cuda.default_stream(), cuda.Stream()):
        with cuda.stream(stream):
            cuda._sleep(HALF_A_SECOND)
            value = worker.stream.mark(stream)
            time.sleep(0.05)
            assert worker.ring.timeline < value, "the mark came before the kernel ended"
            wait_timeline(worker.ring, value)
    with cuda.stream(stream):
        wait_timeline(worker.ring, worker.stream.mark(None))
    wait_timeline(worker.ring, worker.stream.mark(stream.cuda_stream))


def test_a_mark_never_overtakes_one_of_another_stream(worker: Worker) -> None:
    busy, idle = cuda.Stream(), cuda.Stream()
    with cuda.stream(busy):
        cuda._sleep(HALF_A_SECOND)
    first = worker.stream.mark(busy)
    second = worker.stream.mark(idle)
    idle.synchronize()  # the streams of the worker themselves wait for nothing
    assert worker.ring.timeline < first
    third = worker.stream.mark(busy)
    wait_timeline(worker.ring, third)
    assert (first, second, third) == (third - 2, third - 1, third)


def test_rows_written_before_a_mark_arrive(worker: Worker) -> None:
    """The order is given when the timeline says so; the rows that the worker's stream wrote must be in the slots."""

    def write(number: int) -> None:
        worker.pool.fill_(number + 1)
        cuda._sleep(2_000_000)
        worker.pool[: 32 << 10].fill_(number + 101)

    write(0)  # loads kernels, which waits for the whole GPU: later it would wait for an entry without an order
    cuda.synchronize()
    worker.enqueue(20)
    for number in range(20):
        write(number)
        wait_timeline(worker.ring, worker.stream.mark(None))
        worker.run(number, WHOLE)
        wait_done(worker.ring, number)
        assert (worker.slots.array[: 32 << 10] == number + 101).all()
        assert (worker.slots.array[32 << 10 : 64 << 10] == number + 1).all()


def test_nothing_is_compiled_or_loaded_once_a_stream_is_ready(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from cuda.bindings import driver

    calls: list[str] = []
    monkeypatch.setattr(triton, "compile", lambda *_args, **_options: calls.append("compile"))
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda *_args: calls.append("load"))
    sizes = [*range(1, 34), 50, 132, 576, 656, 1152, 1999, 2000, 20000]
    worker.enqueue(len(sizes) * 2)
    expected = worker.memories[SLOTS]
    expected[:] = 0
    for idx, row_bytes in enumerate(sizes):
        for way, num_rows in enumerate((1, 16)):
            bits = row_bytes | 16
            segment = Segment([Span(row_bytes, num_rows, bits & -bits, POOL, 0, LINEAR, SLOTS, 0, LINEAR)], [])
            number = idx * 2 + way
            worker.run(number, segment)
            wait_done(worker.ring, number)
            apply(segment, worker.memories)
            assert_same(worker.slots.array, expected, f"rows of {row_bytes} bytes")
    assert calls == []


def test_the_stream_drains_when_its_agent_is_killed() -> None:
    seed, num_segments = 6, 8
    worker = Worker(seed)
    worker.enqueue(num_segments)
    with worker.start_child(seed, num_segments, 3) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ordered\n"
        child.kill()
        child.wait()
    with pytest.raises(ContractError, match="got none for 5 entries from 3 on"):
        worker.stream.close()
    began_s = time.monotonic()
    worker.end()
    assert time.monotonic() - began_s < 5
    for segment in make_segments(seed, num_segments)[:3]:
        apply(segment, worker.memories)
    assert_same(worker.pool.cpu().numpy(), worker.memories[POOL], "pool")


def test_a_stream_that_waits_holds_up_none_of_the_worker(worker: Worker) -> None:
    """Streams share queues of the GPU: one that waits for an order must not block what lies behind it in its queue."""
    values = torch.ones(1 << 16, device="cuda")
    streams = [
        cuda.default_stream(),
        *(cuda.Stream(priority=priority) for priority in (0, -1, -2, -3) for _ in range(20)),
    ]
    events = [cuda.Event() for _ in streams]
    for is_waiting in (False, True):
        if is_waiting:
            cuda.synchronize()
            worker.enqueue(4)
        for stream, event in zip(streams, events, strict=True):
            with cuda.stream(stream):
                values.mul_(2)
                event.record()
    deadline_s = time.monotonic() + 3
    while held := [idx for idx, event in enumerate(events) if not event.query()]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(1e-3)
    assert held == [], f"{len(held)} of {len(events)} streams wait behind the row stream"
    assert not worker.ring.is_done(0)


def test_marks_take_streams_of_the_pool_alone(worker: Worker) -> None:
    with pytest.raises(ContractError, match=r"^stream: got 'default', expected a torch.cuda.Stream of cuda:0"):
        worker.stream.mark("default")
    with pytest.raises(ContractError, match="memory index: got 256"):
        worker.stream.set_memory(256, worker.slots)
