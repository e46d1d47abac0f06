"""A CUDA stream that carries out entries of a ring one after another, with the kernels and the memory that this takes.

An entry waits for its order, copies it into memory of the GPU (one program), moves its rows (several) and writes its
done word. Where segments are checked first, programs that stage and sum one come before those that move rows. Where
entries are bound to slots, a copy engine takes the segment from memory of the GPU to the entry's slot. A copy in place
of the first kernel would stand, waiting, at the head of a queue that the worker's own copies share.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.streams.driver import Gpu, check, cuda, gpu
from kvxfer.streams.ring import (
    LANES_OFFSET_BYTES,
    OrderCode,
    Ring,
    done_offset_bytes,
    done_value,
    order_offset_bytes,
    order_value,
    wait_value,
)
from kvxfer.streams.slot_binding import BoundSlots

if TYPE_CHECKING:
    from kvxfer.kernels._compiled import CompiledKernel

MAX_MEMORIES: Final = 256
WAIT_GEQ: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ"""
WRITE_DEFAULT: Final = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT: behind a memory barrier."""
# Parameters of the kernels, in the order of their launches.
_WORDS, _MEMORIES, _SCRATCH, _ENTRY, _RUN, _LANES, _LANE_WORDS, _NUM_LANES, _NUM_MEMORIES = range(9)
_CHECK_SCRATCH, _CHECK_LANE_WORDS, _CHECK_NUM_MEMORIES = range(3)
_MOVE_SCRATCH, _MOVE_WORDS, _MOVE_ENTRY, _MOVE_LANE_WORDS, _MOVE_NUM_MEMORIES = range(5)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A loaded kernel of one GPU; it stays loaded as long as the process lives."""

    function: Any
    num_params: int
    num_threads: int
    shared_bytes: int


@functools.cache
def load_kernels(device_index: int) -> tuple[_Kernel, _Kernel, _Kernel]:
    """The kernels that stage an order, check its segment and move its rows. The first call takes seconds where they
    are not in Triton's cache. Raises `EngineMissingError`, `KernelContractError` and `TransportError`."""
    from kvxfer.kernels.moves import compile_move_rows

    compiled = compile_move_rows(gpu(device_index).capability)
    stage, check_segment, move = (_load(each, device_index) for each in (compiled.stage, compiled.check, compiled.move))
    return stage, check_segment, move


def _load(compiled: CompiledKernel, device_index: int) -> _Kernel:
    driver = cuda()
    with gpu(device_index):
        module = check("cuModuleLoadData", driver.cuModuleLoadData(compiled.cubin))
        function = check("cuModuleGetFunction", driver.cuModuleGetFunction(module, compiled.name.encode()))
    return _Kernel(function, compiled.num_params, compiled.num_threads, compiled.shared_bytes)


class Launch:
    """A kernel and its parameters as CUDA wants them, pointers to values. A launch copies the values at once."""

    def __init__(self, kernel: _Kernel, num_ctas: int, stream: Any) -> None:  # noqa: ANN401
        self.values = (ctypes.c_int64 * kernel.num_params)()
        first = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * kernel.num_params)(*range(first, first + 8 * kernel.num_params, 8))
        self._kernel = kernel
        self._stream = stream
        self._driver = cuda()
        self.set_ctas(num_ctas)

    def set_ctas(self, num_ctas: int) -> None:
        """Later launches are of so many programs."""
        kernel = self._kernel
        self._arguments = (
            *(kernel.function, num_ctas, 1, 1, kernel.num_threads, 1, 1, kernel.shared_bytes),
            *(self._stream, ctypes.addressof(self._pointers), 0),
        )

    def __call__(self) -> None:
        result = self._driver.cuLaunchKernel(*self._arguments)
        if result[0] != 0:
            check("cuLaunchKernel", result)


class LaneLaunch:
    """Moves the rows of one lane, which was copied to the GPU: what `Track` does, without a program that stages it.

    The lane lies at `address`; `MAX_MEMORIES` memories are behind it, and then sums, which whoever copies the lane
    clears where the order asks for a sum.
    """

    def __init__(self, device: Gpu, num_ctas: int, stream: Any, address: int, ring: Ring, ring_address: int) -> None:  # noqa: ANN401
        """`ring_address`: where the GPU sees the ring. Raises as `load_kernels`."""
        _, check_segment, move = load_kernels(device.device_index)
        self._check, self._move = Launch(check_segment, num_ctas, stream), Launch(move, num_ctas, stream)
        lane_words = ring.lane_bytes // 8
        self._check.values[_CHECK_SCRATCH] = self._move.values[_MOVE_SCRATCH] = address
        self._check.values[_CHECK_LANE_WORDS] = self._move.values[_MOVE_LANE_WORDS] = lane_words
        self._check.values[_CHECK_NUM_MEMORIES] = self._move.values[_MOVE_NUM_MEMORIES] = MAX_MEMORIES
        self._move.values[_MOVE_WORDS] = ring_address

    def __call__(self, number: int, *, is_checked: bool) -> None:
        """Carry out the order of entry `number`. The context is current. Raises `TransportError`."""
        self._move.values[_MOVE_ENTRY] = order_offset_bytes(number) // 8
        if is_checked:
            self._check()
        self._move()


@dataclass(frozen=True, slots=True)
class Ctas:
    """How many programs move rows, and how many check a segment before that; 0 where none is checked."""

    move: int
    check: int = 0


class Track:
    """One stream. Its entries use one scratch memory, which each leaves before the next begins."""

    def __init__(
        self,
        device: Gpu,
        priority: int,
        ctas: Ctas,
        memories: tuple[int, int],
        max_lane_bytes: int,
        staging_bytes: int,
        bound: BoundSlots | None = None,
    ) -> None:
        """`memories`: address and length of the table of memories, as the GPU sees it. `staging` has `staging_bytes`:
        for a segment that is checked, or one that goes to the slot that its entry is bound to. Raises
        `TransportError`."""
        from kvxfer.kernels.moves import scratch_words

        self._gpu = device
        self._driver = cuda()
        self._address = 0  # of the ring
        self._bound = bound
        self._slots_address = 0  # of the host
        stage, check_segment, move = load_kernels(device.device_index)
        self._stream = device.create_stream(priority)
        self._allocated: list[int] = []
        self.staging = 0
        """Address of the memory for a segment; 0 without."""
        try:
            self._scratch = self._allocate(8 * scratch_words(max_lane_bytes // 8, memories[1]))
            if staging_bytes:
                self.staging = self._allocate(staging_bytes)
        except BaseException:
            self.close()
            raise
        self._stage = Launch(stage, 1, self._stream)
        self._check = Launch(check_segment, ctas.check, self._stream) if ctas.check else None
        self._num_ctas = ctas.move
        self._move = Launch(move, self._num_ctas, self._stream)
        self._stage.values[_MEMORIES], self._stage.values[_NUM_MEMORIES] = memories
        self._stage.values[_SCRATCH] = self._move.values[_MOVE_SCRATCH] = self._scratch
        self._move.values[_MOVE_NUM_MEMORIES] = memories[1]
        if self._check is not None:
            self._check.values[_CHECK_SCRATCH], self._check.values[_CHECK_NUM_MEMORIES] = self._scratch, memories[1]

    def set_ring(self, ring: Ring, address: int) -> None:
        """Entries are those of `ring`, which the GPU sees at `address`."""
        self._address = address
        values = self._stage.values
        values[_WORDS] = self._move.values[_MOVE_WORDS] = address
        values[_LANES] = LANES_OFFSET_BYTES // 8
        values[_LANE_WORDS] = self._move.values[_MOVE_LANE_WORDS] = ring.lane_bytes // 8
        values[_NUM_LANES] = ring.num_lanes
        if self._check is not None:
            self._check.values[_CHECK_LANE_WORDS] = ring.lane_bytes // 8

    def set_slots(self, address: int) -> None:
        """Slots to which entries are bound begin at `address` of the host, which is registered."""
        self._slots_address = address

    def enqueue(self, number: int) -> None:
        """Wait for the order of entry `number`, carry it out, write its done word. The context is current.

        Raises `TransportError`.
        """
        driver, stream = self._driver, self._stream  # a worker's thread pays for all of this: errors alone cost a call
        order_address = self._address + order_offset_bytes(number)
        result = driver.cuStreamWaitValue64(stream, order_address, wait_value(number), WAIT_GEQ)
        if result[0] != 0:
            check("cuStreamWaitValue64", result)
        self.launch(number)
        if self._bound is not None:
            slot_bytes = self._bound.slot_bytes
            slot_address = self._slots_address + self._bound.slot_of(number) * slot_bytes
            result = driver.cuMemcpyDtoHAsync(slot_address, self.staging, slot_bytes, stream)
            if result[0] != 0:
                check("cuMemcpyDtoHAsync", result)
        done_address = self._address + done_offset_bytes(number)
        result = driver.cuStreamWriteValue64(stream, done_address, done_value(number), WRITE_DEFAULT)
        if result[0] != 0:
            check("cuStreamWriteValue64", result)

    def expect_pulls(self, num_ctas: int | None) -> None:
        """Rows of entries that are enqueued later are moved by so many programs; None: by as many as at first."""
        self._move.set_ctas(self._num_ctas if num_ctas is None else num_ctas)

    def launch(self, number: int) -> None:
        """Carry out the order that entry `number` has. The context is current. Raises `TransportError`."""
        self._stage.values[_ENTRY] = self._move.values[_MOVE_ENTRY] = order_offset_bytes(number) // 8
        self._stage.values[_RUN] = order_value(number, OrderCode.RUN)
        self._stage()
        if self._check is not None:
            self._check()
        self._move()

    def drain(self) -> None:
        """Wait until all that was enqueued has ended. Raises `TransportError`."""
        with self._gpu:
            check("cuStreamSynchronize", self._driver.cuStreamSynchronize(self._stream))

    def close(self) -> None:
        """Give back what was made. A context that is broken refuses, and has nothing left to give back."""
        with self._gpu:
            self._driver.cuStreamDestroy(self._stream)
            for address in self._allocated:
                self._driver.cuMemFree(address)

    def _allocate(self, num_bytes: int) -> int:
        with self._gpu:
            address = int(check("cuMemAlloc", self._driver.cuMemAlloc(num_bytes)))
        self._allocated.append(address)
        return address
