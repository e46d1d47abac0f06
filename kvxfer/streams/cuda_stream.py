"""A ring's entries on a GPU: CUDA streams wait for each order, run one kernel and write the done word.

Nothing here blocks or polls, but making and closing a stream. The kernel is compiled, loaded and run before a stream is
ready. A kernel that is loaded later may make its process wait for everything on the GPU, also for a stream that waits
for an order: load what you can before.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvxfer.errors import ContractError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool
from kvxfer.streams.driver import Gpu, check, cuda, gpu
from kvxfer.streams.ring import (
    LANES_OFFSET_BYTES,
    LINEAR,
    NUM_ENTRIES,
    TIMELINE_OFFSET_BYTES,
    MemoryIndex,
    OrderCode,
    Ring,
    Span,
    done_offset_bytes,
    done_value,
    order_offset_bytes,
    order_value,
    wait_value,
)

MAX_MEMORIES: Final = 256
DEFAULT_MAX_CTAS: Final = 32
_TABLE_BYTES: Final = MAX_MEMORIES * 16  # an address and a number of bytes each
_WAIT_GEQ, _WRITE_DEFAULT = 0, 0  # CU_STREAM_WAIT_VALUE_GEQ; CU_STREAM_WRITE_VALUE_DEFAULT: behind a memory barrier
_WORDS, _MEMORIES, _ENTRY, _RUN, _LANES, _LANE_WORDS, _NUM_LANES, _NUM_MEMORIES = range(8)  # kernel parameters
_WARM_UP_ROW = Span(80, 1, 16, 2, order_offset_bytes(16), LINEAR, 2, order_offset_bytes(32), LINEAR)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The loaded kernel of one GPU; it stays loaded as long as the process lives."""

    function: Any
    num_threads: int
    shared_bytes: int
    num_params: int


@functools.cache
def _load_kernel(device_index: int) -> _Kernel:
    from kvxfer.kernels.moves import NUM_PARAMS, compile_move_rows

    driver, device = cuda(), gpu(device_index)
    compiled = compile_move_rows(device.capability)
    with device:
        module = check("cuModuleLoadData", driver.cuModuleLoadData(compiled.cubin))
        function = check("cuModuleGetFunction", driver.cuModuleGetFunction(module, compiled.name.encode()))
    return _Kernel(function, compiled.num_threads, compiled.shared_bytes, NUM_PARAMS)


class _Parameters:
    """Parameters of the kernel as CUDA wants them: pointers to values. A launch copies the values at once."""

    def __init__(self, num_params: int, memories_address: int) -> None:
        self._values = (ctypes.c_int64 * num_params)()
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * num_params)(*range(first, first + 8 * num_params, 8))
        self.address = ctypes.addressof(self._pointers)
        self._values[_MEMORIES] = memories_address
        self._values[_NUM_MEMORIES] = MAX_MEMORIES

    def set_ring(self, ring: Ring, device_address: int) -> None:
        self._values[_WORDS] = device_address
        self._values[_LANES] = LANES_OFFSET_BYTES // 8
        self._values[_LANE_WORDS] = ring.lane_bytes // 8
        self._values[_NUM_LANES] = ring.num_lanes

    def set_entry(self, number: int) -> None:
        self._values[_ENTRY] = order_offset_bytes(number) // 8
        self._values[_RUN] = order_value(number, OrderCode.RUN)


class CudaRowStream:
    """`RowStream` on a GPU. `ring`, `pool` and `slots` stay the caller's; they must outlive `close()`.

    To be used by one thread at a time. With `num_streams` above 1, entries whose orders have come overlap, and may be
    done in another order than that of their numbers.
    """

    def __init__(
        self,
        ring: Ring,
        pool: DevicePool,
        slots: HostMemory,
        *,
        max_ctas: int = DEFAULT_MAX_CTAS,
        num_streams: int = 1,
    ) -> None:
        """Takes seconds where the kernel is not in Triton's cache. `max_ctas` bounds the programs of one entry's
        kernel, so that it leaves multiprocessors to the worker.

        Raises `EngineMissingError` where CUDA or its bindings are missing, `RegistrationError` where host memory
        cannot be locked, `TransportError` for what else the GPU refuses.
        """
        if max_ctas < 1 or num_streams < 1:
            raise ContractError(f"max_ctas, num_streams: got {max_ctas} and {num_streams}, expected at least 1 each")
        self._gpu = gpu(pool.device_index)
        _check_abilities(self._gpu)
        self._driver = cuda()
        self._kernel = _load_kernel(pool.device_index)
        self._ring = ring
        self._max_ctas = max_ctas
        self._num_enqueued = 0
        self._last_mark = ring.timeline
        self._marked_on = 0  # the stream of the last mark
        self._is_closed = False
        self._registered: list[HostMemory] = []
        self._event: Any = None
        self._streams: list[Any] = []
        self._marks: Any = None
        self._table = HostMemory.create(_TABLE_BYTES, "kvxfer-memories")
        try:
            self._prepare(pool, slots, num_streams)
        except BaseException:
            self._release()
            raise

    def enqueue(self, number: int) -> None:
        """`RowStream.enqueue`. Raises `TransportError`; the entry needs an order all the same before `close()`."""
        order_address, done_address = self._entries[number % NUM_ENTRIES]
        stream = self._streams[number % len(self._streams)]
        driver = self._driver
        self._num_enqueued = number + 1
        with self._gpu:
            check(
                "cuStreamWaitValue64", driver.cuStreamWaitValue64(stream, order_address, wait_value(number), _WAIT_GEQ)
            )
            self._launch(number, stream)
            check(
                "cuStreamWriteValue64",
                driver.cuStreamWriteValue64(stream, done_address, done_value(number), _WRITE_DEFAULT),
            )

    def mark(self, stream: object | None = None) -> int:
        """`RowStream.mark`. `stream`: of torch, or a raw handle; None is torch's current stream.

        Raises `ContractError` for what is no stream of this GPU, and `TransportError`.
        """
        handle = _stream_handle(stream, self._gpu.device_index)
        value = self._last_mark + 1
        with self._gpu:
            if handle != self._marked_on and self._ring.timeline < self._last_mark:
                handle = self._behind_last_mark(handle)
            check(
                "cuStreamWriteValue64",
                self._driver.cuStreamWriteValue64(handle, self._timeline_address, value, _WRITE_DEFAULT),
            )
        self._marked_on, self._last_mark = handle, value
        return value

    def set_memory(self, index: int, memory: HostMemory | DevicePool) -> None:
        """`RowStream.set_memory`. Host memory stays registered until `close()`. Raises `RegistrationError`."""
        if not 0 <= index < MAX_MEMORIES:
            raise ContractError(f"memory index: got {index}, expected 0 to {MAX_MEMORIES - 1}")
        address = memory.address if isinstance(memory, DevicePool) else self._register(memory)
        words = self._table.array.view(np.int64)
        words[2 * index] = address
        words[2 * index + 1] = memory.num_bytes

    def close(self) -> None:
        """`RowStream.close`. Raises `ContractError` instead of waiting for ever for an entry that has no order."""
        if self._is_closed:
            return
        first = max(0, self._num_enqueued - NUM_ENTRIES)
        missing = [number for number in range(first, self._num_enqueued) if self._ring.order_of(number) is None]
        if missing:
            raise ContractError(
                f"orders: got none for {len(missing)} entries from {missing[0]} on, expected one for each that is "
                "enqueued: skip them first"
            )
        self._is_closed = True
        try:
            with self._gpu:
                for stream in self._streams:
                    check("cuStreamSynchronize", self._driver.cuStreamSynchronize(stream))
        finally:
            self._release()

    def _prepare(self, pool: DevicePool, slots: HostMemory, num_streams: int) -> None:
        driver = self._driver
        for _ in range(num_streams):
            self._streams.append(self._gpu.create_stream())
        self._marks = self._gpu.create_stream()
        with self._gpu:
            flags = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            self._event = check("cuEventCreate", driver.cuEventCreate(flags))
        self._parameters = _Parameters(self._kernel.num_params, self._register(self._table))
        self._warm_up()
        address = self._register(self._ring.memory)
        self._parameters.set_ring(self._ring, address)
        self._timeline_address = address + TIMELINE_OFFSET_BYTES
        self._entries = [
            (address + order_offset_bytes(number), address + done_offset_bytes(number)) for number in range(NUM_ENTRIES)
        ]
        self.set_memory(MemoryIndex.POOL, pool)
        self.set_memory(MemoryIndex.SLOTS, slots)

    def _warm_up(self) -> None:
        """Run the kernel on every stream, on a ring of its own: first told to skip, then to move a row."""
        ring = Ring.create(1, 16)
        ring.fill_lane(0, [_WARM_UP_ROW], np.empty(0, dtype=np.int64))
        try:
            address = self._gpu.register(ring.memory)
            try:
                self._parameters.set_ring(ring, address)
                self._table.array.view(np.int64)[4:6] = address, ring.memory.num_bytes  # memory 2
                for stream in self._streams:
                    for code in OrderCode.SKIP, OrderCode.RUN:
                        self._try(ring, code, stream)
            finally:
                self._table.array[:] = 0
                self._gpu.unregister(ring.memory)
        finally:
            ring.close()

    def _try(self, ring: Ring, code: OrderCode, stream: Any) -> None:  # noqa: ANN401
        row_bytes = _WARM_UP_ROW.row_bytes
        src = ring.memory.array[_WARM_UP_ROW.src_first_byte :][:row_bytes]
        dst = ring.memory.array[_WARM_UP_ROW.dst_first_byte :][:row_bytes]
        src[:] = np.arange(1, row_bytes + 1)
        dst[:] = 0
        ring.order(0, code)
        with self._gpu:
            self._launch(0, stream)
            check("cuStreamSynchronize", self._driver.cuStreamSynchronize(stream))
        if not np.array_equal(dst, src if code is OrderCode.RUN else np.zeros_like(src)):
            raise TransportError(f"move_rows: got wrong bytes for {code.name} on this GPU, first {dst[:8].tolist()}")

    def _launch(self, number: int, stream: Any) -> None:  # noqa: ANN401
        self._parameters.set_entry(number)
        kernel = self._kernel
        result = self._driver.cuLaunchKernel(
            kernel.function, self._max_ctas, 1, 1, kernel.num_threads, 1, 1, kernel.shared_bytes, stream,
            self._parameters.address, 0,
        )  # fmt: skip
        check("cuLaunchKernel", result)

    def _behind_last_mark(self, handle: int) -> int:
        """The stream for a mark that must not overtake one that is pending on another: it waits in the worker's place
        until both streams have come there."""
        driver = self._driver
        check("cuEventRecord", driver.cuEventRecord(self._event, handle))
        check("cuStreamWaitEvent", driver.cuStreamWaitEvent(self._marks, self._event, 0))
        result = driver.cuStreamWaitValue64(self._marks, self._timeline_address, self._last_mark, _WAIT_GEQ)
        check("cuStreamWaitValue64", result)
        return int(self._marks)

    def _register(self, memory: HostMemory) -> int:
        address = self._gpu.register(memory)
        self._registered.append(memory)
        return address

    def _release(self) -> None:
        """Give back what was made. A context that is broken refuses, and has nothing left to give back."""
        driver = self._driver
        with self._gpu:
            for stream in (*self._streams, self._marks):
                if stream is not None:
                    driver.cuStreamDestroy(stream)
            if self._event is not None:
                driver.cuEventDestroy(self._event)
            for memory in self._registered:
                driver.cuMemHostUnregister(memory.address)
        self._streams, self._marks, self._event = [], None, None
        self._registered.clear()
        self._table.close()


def _check_abilities(device: Gpu) -> None:
    if not device.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS"):
        raise TransportError(
            f"GPU {device.device_index}: got no 64-bit stream memory operations, expected them for row streams: use a "
            "newer GPU or driver, or the path over host memory"
        )


def _stream_handle(stream: object | None, device_index: int) -> int:
    """The raw handle of a stream, as `CudaRowStream.mark` takes it."""
    if isinstance(stream, int):
        return stream
    if stream is None:
        import torch

        return int(torch.cuda.current_stream(device_index).cuda_stream)
    handle, device = getattr(stream, "cuda_stream", None), getattr(stream, "device_index", device_index)
    if not isinstance(handle, int) or device != device_index:
        raise ContractError(
            f"stream: got {stream!r}, expected a torch.cuda.Stream of cuda:{device_index}, a raw handle, or None"
        )
    return handle
