"""What `CudaRowStream` asks of CUDA, and in which order: against a driver whose streams are threads.

The kernel itself is tested in tests/kernels, the real driver in tests/gpu.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.errors import ContractError, RegistrationError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.row_sums import row_sum
from kvxfer.streams import cuda_stream, driver
from kvxfer.streams.cuda_stream import CudaRowStream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Ring, Span, SumKind, SumOrder
from tests.streams.fake_cuda import CUresult, FakeCuda

NUM_BYTES = 64 << 10
WHOLE = Span(64, 10, 16, 0, 128, LINEAR, 1, 0, LINEAR)
STAGED = Span(64, 10, 16, MemoryIndex.STAGING, 0, LINEAR, 0, 128, LINEAR)
NO_SUM = SumOrder(SumKind.NONE, 0)


class Owner:
    """A worker with a pool, which is host memory here, and its stream."""

    def __init__(self, num_streams: int = 1, staging_bytes: int = 0) -> None:
        self.ring = Ring.create(2, 100, staging_bytes)
        self.pool = HostMemory.create(NUM_BYTES, "pool")
        self.slots = HostMemory.create(NUM_BYTES, "slots")
        self.pool.array[:] = np.random.default_rng(0).integers(1, 256, NUM_BYTES)
        self.num_enqueued = 0
        self.stream = self.make_stream(num_streams)

    def make_stream(self, num_streams: int) -> CudaRowStream:
        return CudaRowStream(
            self.ring, DevicePool(self.pool.address, NUM_BYTES, 0), self.slots, num_streams=num_streams
        )

    def enqueue(self, num_entries: int) -> None:
        self.stream.enqueue(self.num_enqueued, num_entries)
        self.num_enqueued += num_entries

    def run(self, number: int, span: Span = WHOLE, summed: SumOrder = NO_SUM) -> None:
        self.ring.fill_lane(0, [span], np.empty(0, dtype=np.int64), summed)
        self.ring.order(number, OrderCode.RUN, 0)

    def wait_done(self, number: int) -> None:
        wait(lambda: self.ring.is_done(number))

    def end(self) -> None:
        for number in range(self.num_enqueued):
            if self.ring.order_of(number) is None:
                self.ring.order(number, OrderCode.SKIP)
        self.stream.close()
        for memory in (self.pool, self.slots, self.ring):
            memory.close()


def wait(condition: object) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


@pytest.fixture
def owner(cuda: FakeCuda) -> Iterator[Owner]:
    made = Owner()
    yield made
    made.end()
    assert cuda.registered == {}
    assert list(cuda.streams) == [0]
    assert cuda.scratch == {}
    assert cuda.num_events == 0


@pytest.mark.parametrize("num_streams", [1, 3])
def test_entries_run_skip_and_are_done(cuda: FakeCuda, num_streams: int) -> None:
    owner = Owner(num_streams)
    owner.enqueue(5)
    assert not owner.ring.is_done(0)
    owner.ring.order(0, OrderCode.SKIP)
    owner.wait_done(0)
    assert not owner.slots.array.any()
    for number in range(1, 5):
        owner.slots.array[:] = 0
        owner.run(number)
        owner.wait_done(number)
        assert np.array_equal(owner.slots.array[:640], owner.pool.array[128:768])
    owner.end()
    assert list(cuda.streams) == [0]


def test_entries_wait_for_their_turn_on_one_stream(owner: Owner) -> None:
    owner.enqueue(2)
    owner.run(1)
    time.sleep(0.02)
    assert not owner.ring.is_done(1)
    owner.ring.order(0, OrderCode.SKIP)
    owner.wait_done(1)
    assert owner.slots.array[0]


def test_slots_that_have_moved(owner: Owner, cuda: FakeCuda) -> None:
    with HostMemory.create(4096, "slots") as moved:
        owner.stream.set_memory(1, moved)
        owner.enqueue(1)
        owner.run(0)
        owner.wait_done(0)
        assert np.array_equal(moved.array[:640], owner.pool.array[128:768])
        assert not owner.slots.array.any()
        assert owner.slots.address in cuda.registered
        owner.stream.forget(owner.slots)
        assert owner.slots.address not in cuda.registered
        owner.stream.close()
        assert cuda.registered == {}


def test_no_stream_of_its_has_the_priority_of_others(owner: Owner, cuda: FakeCuda) -> None:
    assert owner.stream.mark(0) == 1
    assert set(cuda.priorities) == {cuda_stream.STREAM_PRIORITY}


def test_a_gather_tells_its_sum(owner: Owner, cuda: FakeCuda) -> None:
    owner.enqueue(1)
    owner.run(0, WHOLE, SumOrder(SumKind.MOVED, 0))
    owner.wait_done(0)
    assert owner.ring.sum_of(0) == row_sum(owner.pool.array[128:768])
    assert cuda.num_checks == 0, "a kernel for nothing"


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_segment_is_checked_in_memory_of_the_gpu(cuda: FakeCuda, num_streams: int) -> None:
    owner = Owner(num_streams, staging_bytes=4096)
    assert [len(block) for block in cuda.scratch.values()].count(4096) == num_streams
    owner.slots.array[:] = np.random.default_rng(1).integers(1, 256, NUM_BYTES)
    segment, pages = owner.slots.array[256:896], owner.pool.array[128:768]
    summed = SumOrder(SumKind.CHECKED, 256, 640, row_sum(segment))
    before = pages.copy()
    owner.enqueue(2)
    segment[639] ^= 64
    owner.run(0, STAGED, summed)
    owner.wait_done(0)
    assert owner.ring.sum_of(0) == row_sum(segment) != summed.expected
    assert np.array_equal(pages, before)
    segment[639] ^= 64
    owner.run(1, STAGED, summed)
    owner.wait_done(1)
    assert owner.ring.sum_of(1) == summed.expected
    assert np.array_equal(pages, segment)
    owner.end()
    assert cuda.scratch == {}


@pytest.mark.parametrize("index", [-1, 255, 256])
def test_memories_are_few(owner: Owner, index: int) -> None:
    with pytest.raises(ContractError, match=f"^memory index: got {index}, expected 0 to 254"):
        owner.stream.set_memory(index, owner.slots)


def test_marks_rise_behind_the_stream_that_was_given(owner: Owner, cuda: FakeCuda) -> None:
    assert owner.stream.mark(0) == 1
    wait(lambda: owner.ring.timeline == 1)
    held = [True]
    cuda.streams[0].push(lambda: not held[0])
    assert owner.stream.mark(0) == 2
    time.sleep(0.02)
    assert owner.ring.timeline == 1
    held.clear()
    held.append(False)
    wait(lambda: owner.ring.timeline == 2)


def test_a_mark_never_overtakes_one_of_another_stream(owner: Owner, cuda: FakeCuda) -> None:
    other = driver.gpu(0).create_stream(0)
    held = [True]
    cuda.streams[0].push(lambda: not held[0])
    first, second = owner.stream.mark(0), owner.stream.mark(other)
    cuda.streams[other].drain()  # the worker's own stream waits for nothing
    time.sleep(0.02)
    assert owner.ring.timeline < first
    third = owner.stream.mark(0)
    held[0] = False
    wait(lambda: owner.ring.timeline == third)
    assert (second, third) == (first + 1, first + 2)
    assert owner.stream.mark(other) == third + 1
    wait(lambda: owner.ring.timeline == third + 1)
    cuda.cuStreamDestroy(other)


@pytest.mark.parametrize("stream", ["default", 1.5])
def test_marks_are_for_streams(owner: Owner, stream: object) -> None:
    with pytest.raises(ContractError, match=r"^stream: got .*, expected a torch.cuda.Stream of cuda:0"):
        owner.stream.mark(stream)


def test_closing_refuses_to_wait_for_ever(owner: Owner) -> None:
    owner.enqueue(3)
    owner.ring.order(0, OrderCode.SKIP)
    with pytest.raises(ContractError, match="got none for 2 entries from 1 on"):
        owner.stream.close()


@pytest.mark.parametrize("call", ["cuStreamWaitValue64", "cuLaunchKernel", "cuStreamWriteValue64"])
def test_an_entry_that_cannot_be_enqueued_says_why(owner: Owner, cuda: FakeCuda, call: str) -> None:
    cuda.fail(call, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    owner.num_enqueued = 1
    with pytest.raises(TransportError, match=f"^{call}: got CUDA_ERROR_OUT_OF_MEMORY, expected CUDA_SUCCESS: the GPU"):
        owner.stream.enqueue(0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("cuMemHostRegister", RegistrationError, r"^cuMemHostRegister of 4096 bytes: got .*ulimit -l unlimited"),
        ("cuStreamCreateWithPriority", TransportError, "^cuStreamCreateWithPriority: got CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuModuleLoadData", TransportError, "^cuModuleLoadData: got CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemAlloc", TransportError, "^cuMemAlloc: got CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemHostGetDevicePointer", TransportError, "^cuMemHostGetDevicePointer: got CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_a_stream_that_cannot_be_made_leaves_nothing(
    cuda: FakeCuda, call: str, error: type[Exception], message: str
) -> None:
    cuda.fail(call, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(error, match=message):
        Owner()
    assert cuda.registered == {}
    assert list(cuda.streams) == [0]
    assert cuda.scratch == {}
    assert cuda.num_events == 0


def test_what_the_gpu_must_be_able_to_do(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS", 0)
    with pytest.raises(TransportError, match="got no 64-bit stream memory operations"):
        Owner()


def test_a_device_that_is_none(cuda: FakeCuda) -> None:  # noqa: ARG001 - installs the fake
    with pytest.raises(TransportError, match=r"^cuDeviceGet: got CUDA_ERROR_INVALID_DEVICE.*names no GPU"):
        driver.gpu(7)


@pytest.mark.parametrize(("address", "num_bytes", "device_index"), [(8, 1, 0), (0, 1, 0), (16, 0, 0), (16, 1, -1)])
def test_pools_that_cannot_be(address: int, num_bytes: int, device_index: int) -> None:
    with pytest.raises(ContractError, match=r"^pool.*: got .*expected"):
        DevicePool(address, num_bytes, device_index)


def test_many_programs_pull_as_long_as_there_are_peers(owner: Owner, cuda: FakeCuda) -> None:
    owner.enqueue(1)
    owner.run(0)
    owner.wait_done(0)
    assert cuda.num_ctas[b"move"] == cuda_stream.SCATTER_CTAS
    with HostMemory.create(NUM_BYTES, "peer") as peer:
        owner.stream.set_memory(2, DevicePool(peer.address, NUM_BYTES, 0))
        owner.stream.set_memory(3, DevicePool(peer.address, NUM_BYTES, 0))
        expected = {1: cuda_stream.PULL_CTAS, 2: cuda_stream.PULL_CTAS, 3: cuda_stream.SCATTER_CTAS}
        for number, num_ctas in expected.items():
            owner.enqueue(1)
            owner.run(number)
            owner.wait_done(number)
            assert cuda.num_ctas[b"move"] == num_ctas, number
            owner.stream.clear_memory(number + 1)
        owner.stream.close()


def test_memory_for_another_gpu_is_refused(cuda: FakeCuda) -> None:  # noqa: ARG001 - installs the fake
    owner = Owner()
    with pytest.raises(ContractError, match=r"^memory 2: got memory for GPU 1, expected it for GPU 0"):
        owner.stream.set_memory(2, DevicePool(owner.pool.address, NUM_BYTES, 1))
    owner.end()


WITHOUT_CUDA = """
import sys
import kvxfer.streams.cuda_stream, kvxfer.streams.device
assert not {"torch", "triton", "cuda"} & sys.modules.keys()
sys.modules["cuda"] = None
from kvxfer.errors import EngineMissingError
try:
    kvxfer.streams.device.allocate_pool(1, 0)
except EngineMissingError as error:
    assert "cuda-bindings" in str(error) and "kvxfer[gpu]" in str(error), error
else:
    raise AssertionError("no error")
"""


def test_the_modules_need_neither_cuda_nor_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_CUDA], check=True, timeout=60)
