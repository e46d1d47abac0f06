"""An agent that moves rows of a shared pool by a stream of its own, against a driver whose streams are threads."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.errors import RegistrationError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.operations import CancelFlag, Move, Moved, SegmentSource
from kvxfer.row_mover import RowMover
from kvxfer.row_sums import row_sum
from kvxfer.rows_host import gather_segment
from kvxfer.streams.device import DevicePool
from kvxfer.streams.own_mover import OwnStreamMover
from kvxfer.streams.ring import LINEAR, NO_SUM, MemoryIndex, OrderCode, Ring, Span, SumKind, SumOrder
from kvxfer.streams.staged_stream import StagedRowStream
from tests.streams.fake_cuda import CUresult, FakeCuda
from tests.streams.owner import NUM_SLOTS, POOL_BYTES, SLOT_BYTES, chunk_of

WAIT_S = 10.0


class Agent:
    """An agent with a pool, which is host memory here, mapped; `device_slots` as if they lay on the GPU."""

    def __init__(self, *, device_slots: bool = False) -> None:
        self.ring = Ring.create(4, 1000, staging_bytes=SLOT_BYTES)
        self.pool = HostMemory.create(POOL_BYTES, "pool")
        self.slots = HostMemory.create(NUM_SLOTS * SLOT_BYTES, "slots")
        self.pool.array[:] = np.random.default_rng(0).integers(0, 256, POOL_BYTES)
        self.threads = RowMover(1, "test-mover")
        slots = DevicePool(self.slots.address, self.slots.num_bytes, 0) if device_slots else self.slots
        try:
            stream = StagedRowStream(self.ring, DevicePool(self.pool.address, POOL_BYTES, 0), slots)
        except BaseException:
            self.free()
            raise
        self.mover = OwnStreamMover(self.ring, stream, self.threads, pool_bytes=POOL_BYTES, slot_bytes=SLOT_BYTES)
        self.stream = stream

    def wait(self, num_moves: int) -> list[Moved]:
        """The next ends, found as the agent's loop does."""
        moved: list[Moved] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(moved) < num_moves:
            assert time.monotonic() < deadline_s, f"only {moved} of {num_moves} moves have ended"
            self.mover.expect(0, 0)
            moved += self.mover.look() + self.threads.poll()
            time.sleep(1e-4)
        return moved

    def gather(self, operation: int, source: SegmentSource, slot: int, cancel: CancelFlag | None = None) -> None:
        self.mover.gather(Move(operation, source, operation % 3, cancel or CancelFlag()), slot, None)

    def slot(self, slot: int, slots: HostMemory | None = None) -> np.ndarray:
        return (slots or self.slots).array[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def packed(self, source: SegmentSource, segment: int) -> np.ndarray:
        slot = np.zeros(SLOT_BYTES, dtype=np.uint8)
        gather_segment(self.pool.array, source.plan, source.addresses, segment, slot)
        return slot

    def free(self) -> None:
        self.threads.close()
        for memory in (self.pool, self.slots, self.ring):
            memory.close()

    def end(self) -> None:
        self.mover.close()
        self.mover.close()
        self.free()


def run(agent: Agent, number: int, lane: int, span: Span, summed: SumOrder) -> None:
    agent.ring.fill_lane(lane, [span], np.empty(0, dtype=np.int64), summed)
    agent.ring.order(number, OrderCode.RUN, lane)
    agent.stream.enqueue(number, lane)


def wait_done(agent: Agent, number: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not agent.stream.is_done(number):
        assert time.monotonic() < deadline_s
        time.sleep(1e-4)


def assert_nothing_left(cuda: FakeCuda) -> None:
    assert cuda.registered == {}
    assert list(cuda.streams) == [0]
    assert cuda.scratch == {}
    assert cuda.num_events == 0


@pytest.fixture
def agent(cuda: FakeCuda) -> Iterator[Agent]:
    made = Agent()
    yield made
    made.end()
    assert_nothing_left(cuda)


@pytest.mark.parametrize("device_slots", [False, True])
def test_rows_go_both_ways_whoever_expects_them(cuda: FakeCuda, device_slots: bool) -> None:
    agent = Agent(device_slots=device_slots)
    source, target = chunk_of(40), chunk_of(40, first_page=101)
    for segment in range(3):
        agent.gather(segment, source, segment)
    assert sorted(each.operation for each in agent.wait(3)) == [0, 1, 2]
    for segment in range(3):
        np.testing.assert_array_equal(agent.slot(segment), agent.packed(source, segment))
        agent.mover.scatter(Move(10 + segment, target, segment, CancelFlag()), segment, None)
    assert {(each.error, each.was_begun) for each in agent.wait(3)} == {(None, True)}
    for segment in range(3):
        np.testing.assert_array_equal(agent.packed(target, segment), agent.slot(segment))
    assert agent.mover.turn_s is not None
    assert 0 < agent.mover.turn_s < WAIT_S
    agent.end()
    assert_nothing_left(cuda)


def test_a_pull_tells_nothing_of_turns(agent: Agent) -> None:
    """It may last as long as a chunk does."""
    agent.mover.set_peer(MemoryIndex.FIRST_PEER, DevicePool(agent.pool.address, POOL_BYTES, 0))
    run(agent, 0, 0, Span(16, 4, 16, MemoryIndex.FIRST_PEER, 0, LINEAR, MemoryIndex.POOL, 4096, LINEAR), NO_SUM)
    wait_done(agent, 0)
    assert agent.mover.turn_s is None
    run(agent, 1, 1, Span(16, 4, 16, MemoryIndex.POOL, 0, LINEAR, MemoryIndex.SLOTS, 0, LINEAR), NO_SUM)
    wait_done(agent, 1)
    assert agent.mover.turn_s is not None


def test_only_the_part_of_a_segment_is_copied_beside_others(agent: Agent) -> None:
    agent.slots.array[:] = 7
    agent.gather(2, chunk_of(40), 1)  # a segment that does not fill its slot
    agent.wait(1)
    np.testing.assert_array_equal(agent.slot(1)[:128], agent.packed(chunk_of(40), 2)[:128])
    assert (agent.slot(1)[128:] == 7).all()
    assert (agent.slot(0) == 7).all()
    assert (agent.slot(2) == 7).all()


def test_more_moves_than_lanes_all_end(agent: Agent) -> None:
    source = chunk_of(40)
    for operation in range(30):
        agent.gather(operation, source, operation % NUM_SLOTS)
    assert {each.error for each in agent.wait(30)} == {None}


def test_a_move_that_is_cancelled_before_it_is_given_is_not_begun(agent: Agent) -> None:
    cancel = CancelFlag(is_set=True)
    agent.gather(0, chunk_of(40), 0, cancel)
    (moved,) = agent.wait(1)
    assert (moved.error, moved.was_begun) == (None, False)
    assert not agent.slots.array.any()


def test_a_worker_that_is_lost_leaves_nothing_under_way(agent: Agent, cuda: FakeCuda) -> None:
    """What was given ends, and only then is the stop over: the pool may be unmapped."""
    held = [True]
    kernels = max(cuda.streams)
    for stream in (kernels, kernels - 1):
        cuda.streams[stream].push(lambda: not held[0])
    source = chunk_of(40)
    for operation in range(6):
        agent.gather(operation, source, operation % NUM_SLOTS)
    agent.mover.expect(0, 0)
    assert agent.mover.look() == []
    cuda.streams[0].push(lambda: held.__setitem__(0, False) or True)
    agent.mover.stop("the worker is gone")
    moved = agent.wait(6)
    assert [each.error for each in moved] == [None] * 4 + ["the worker is gone"] * 2
    assert not agent.mover.may_still_move
    agent.gather(7, source, 0)
    assert [each.error for each in agent.wait(1)] == ["the worker is gone"]


def test_slots_that_have_moved(agent: Agent, cuda: FakeCuda) -> None:
    source = chunk_of(40)
    with HostMemory.create(agent.slots.num_bytes, "moved") as moved, HostMemory.create(1 << 14, "more") as more:
        for slots in (moved, more):
            agent.mover.slots_moved(slots)
            assert {*cuda.registered} & {each.address for each in (agent.slots, moved, more)} == {slots.address}
            agent.gather(1, source, 2)
            agent.wait(1)
            np.testing.assert_array_equal(agent.slot(2, slots), agent.packed(source, 1))
        agent.mover.slots_moved(agent.slots)
        assert sum(len(block) for block in cuda.scratch.values()) < 4 * (agent.ring.lane_bytes + 8192)
    assert not agent.slots.array.any()


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord"])
def test_a_gpu_that_refuses_ends_what_is_open_and_says_why(agent: Agent, cuda: FakeCuda, call: str) -> None:
    source = chunk_of(40)
    agent.gather(0, source, 0)
    agent.wait(1)
    cuda.fail(call, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    for operation in range(2):
        agent.gather(operation, source, operation)
    moved = agent.wait(2)
    assert all(str(each.error).startswith(f"{call}: got CUDA_ERROR_OUT_OF_MEMORY") for each in moved)


def test_a_context_that_breaks_later_ends_what_is_open(agent: Agent, cuda: FakeCuda) -> None:
    cuda.fail("cuEventQuery", CUresult.CUDA_ERROR_INVALID_CONTEXT)
    agent.gather(0, chunk_of(40), 0)
    (moved,) = agent.wait(1)
    assert "cuEventQuery: got CUDA_ERROR_INVALID_CONTEXT" in str(moved.error)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("cuMemHostRegister", RegistrationError),
        ("cuStreamCreateWithPriority", TransportError),
        ("cuMemAlloc", TransportError),
        ("cuEventCreate", TransportError),
        ("cuMemcpyHtoDAsync", TransportError),
    ],
)
def test_a_stream_that_cannot_be_made_leaves_nothing(cuda: FakeCuda, call: str, error: type[Exception]) -> None:
    cuda.fail(call, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(error, match=call):
        Agent()
    assert_nothing_left(cuda)


def test_sums_of_what_is_gathered(agent: Agent) -> None:
    span = Span(64, 3, 16, MemoryIndex.POOL, 1024, LINEAR, MemoryIndex.SLOTS, SLOT_BYTES, LINEAR)
    for number in range(6):
        run(agent, number, number % 4, span, SumOrder(SumKind.MOVED, SLOT_BYTES))
        wait_done(agent, number)
        assert agent.ring.sum_of(number) == row_sum(agent.pool.array[1024 : 1024 + 192])
    np.testing.assert_array_equal(agent.slot(1)[:192], agent.pool.array[1024 : 1024 + 192])


def test_rows_of_a_segment_with_another_sum_stay_away(agent: Agent) -> None:
    """On each kernel stream, which have memory of their own to stage a segment in."""
    agent.slots.array[:] = np.random.default_rng(3).integers(0, 256, agent.slots.num_bytes)
    before = agent.pool.array.copy()
    right = [row_sum(agent.slot(slot)[:192]) for slot in range(4)]
    for number in range(4):
        span = Span(64, 3, 16, MemoryIndex.STAGING, 0, LINEAR, MemoryIndex.POOL, 4096 * number, LINEAR)
        expected = right[number] + (number < 2)
        run(agent, number, number, span, SumOrder(SumKind.CHECKED, number * SLOT_BYTES, 192, expected))
    for number in range(4):
        wait_done(agent, number)
        assert agent.ring.sum_of(number) == right[number]
        if number >= 2:
            before[4096 * number : 4096 * number + 192] = agent.slot(number)[:192]
    np.testing.assert_array_equal(agent.pool.array, before)
