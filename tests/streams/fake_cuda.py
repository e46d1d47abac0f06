"""CUDA's driver, as far as row streams and shared pools use it, on host memory: streams are threads.

It stands in for `cuda.bindings.driver` and is as strict about contexts, registered addresses and flags.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Final

import numpy as np
import torch

from kvxfer.kernels import reference
from kvxfer.kernels.moves import scratch_words

OK = (0,)
CONTEXT = 11
KERNELS = {b"stage cubin": b"stage", b"check cubin": b"check", b"move cubin": b"move"}


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712


class Stream(threading.Thread):
    """Does one thing after the other. Daemons: one that waits for ever must not hold up the end of the tests."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._jobs: deque[Callable[[], bool] | None] = deque()
        self._changed = threading.Condition()
        self.start()

    def push(self, job: Callable[[], bool] | None) -> None:
        """`job` is called until it returns True; None ends the stream."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs)
                job = self._jobs[0]
            while job is not None and not job():
                time.sleep(1e-4)
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
            if job is None:
                return

    def drain(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._jobs, 10.0), "the stream waits for ever"


class Event:
    """`reached` belongs to the latest record; who waits keeps that one."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.is_recorded = False


def _word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def _tensor(address: int, num_words: int) -> torch.Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_int64 * num_words).from_address(address)))


class FakeCuda:
    """The module. `fail(call, error)` makes a call return that error from now on."""

    CUresult: Final = CUresult
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
        CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=1,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=3,
    )

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.streams: dict[int, Stream] = {0: Stream()}
        self.all_streams = [self.streams[0]]
        self.num_events = 0
        self.num_checks = 0
        self.num_ctas: dict[bytes, int] = {}
        """Of the last launch of each kernel."""
        self.priorities: list[int] = []
        self.scratch: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._staged: dict[int, tuple[int, ...]] = {}
        self._pushed = threading.local()
        self._handles = itertools.count(1)
        self._failing: dict[str, int] = {}

    @property
    def _depth(self) -> int:
        """How often the context was pushed in this thread."""
        return int(getattr(self._pushed, "depth", 0))

    def fail(self, call: str, error: int) -> None:
        self._failing[call] = error

    def __getattribute__(self, name: str) -> object:
        if name.startswith("cu") and (error := object.__getattribute__(self, "_failing").get(name)):
            return lambda *_arguments: (error,)
        return object.__getattribute__(self, name)

    def cuInit(self, flags: int) -> tuple[int, ...]:
        assert flags == 0
        return OK

    def cuDeviceGet(self, device_index: int) -> tuple[int, ...]:
        return (0, 0) if device_index == 0 else (CUresult.CUDA_ERROR_INVALID_DEVICE,)

    def cuDeviceGetAttribute(self, attribute: int, _device: int) -> tuple[int, int]:
        return 0, attribute

    def cuDevicePrimaryCtxRetain(self, _device: int) -> tuple[int, int]:
        return 0, CONTEXT

    def cuCtxPushCurrent(self, context: int) -> tuple[int, ...]:
        assert context == CONTEXT
        self._pushed.depth = self._depth + 1
        return OK

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        assert self._depth
        self._pushed.depth = self._depth - 1
        return 0, CONTEXT

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[int, ...]:
        assert self._depth
        assert flags == 3
        if address in self.registered:
            return (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self.registered[address] = num_bytes
        return OK

    def cuMemHostGetDevicePointer(self, address: int, _flags: int) -> tuple[int, int]:
        return 0, address

    def cuMemHostUnregister(self, address: int) -> tuple[int, ...]:
        assert self._depth
        for stream in list(self.streams.values()):
            stream.drain()  # the real one, too, waits for the whole device
        del self.registered[address]
        return OK

    def cuMemAlloc(self, num_bytes: int) -> tuple[int, int]:
        assert self._depth
        block = ctypes.create_string_buffer(num_bytes)
        self.scratch[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cuMemFree(self, address: int) -> tuple[int, ...]:
        assert self._depth
        del self.scratch[address]
        return OK

    def cuModuleLoadData(self, image: bytes) -> tuple[int, bytes]:
        assert self._depth
        return 0, KERNELS[image]

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, bytes]:
        assert module == name
        return 0, name

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> tuple[int, int]:
        assert (self._depth > 0, flags) == (True, 1)
        self.priorities.append(priority)
        handle = next(self._handles)
        self.streams[handle] = Stream()
        self.all_streams.append(self.streams[handle])
        return 0, handle

    def cuStreamDestroy(self, stream: int) -> tuple[int, ...]:
        self.streams.pop(stream).push(None)
        return OK

    def cuStreamSynchronize(self, stream: int) -> tuple[int, ...]:
        self.streams[stream].drain()
        return OK

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[int, ...]:
        self._check_word(address, flags)
        self.streams[stream].push(lambda: _word(address).value >= value)
        return OK

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[int, ...]:
        self._check_word(address, flags)

        def write() -> bool:
            _word(address).value = value
            return True

        self.streams[stream].push(write)
        return OK

    def cuEventCreate(self, flags: int) -> tuple[int, Event]:
        assert flags == 2
        self.num_events += 1
        return 0, Event()

    def cuEventDestroy(self, _event: Event) -> tuple[int, ...]:
        self.num_events -= 1
        return OK

    def cuEventRecord(self, event: Event, stream: int) -> tuple[int, ...]:
        event.reached, event.is_recorded = (reached := threading.Event()), True

        def record() -> bool:
            reached.set()
            return True

        self.streams[stream].push(record)
        return OK

    def cuEventQuery(self, event: Event) -> tuple[int, ...]:
        assert self._depth
        assert event.is_recorded, "one that was never recorded counts as reached"
        return OK if event.reached.is_set() else (CUresult.CUDA_ERROR_NOT_READY,)

    def cuMemcpyHtoDAsync(self, dst: int, src: int, num_bytes: int, stream: int) -> tuple[int, ...]:
        self._check_block(dst, num_bytes)
        return self._copy(dst, src, num_bytes, stream)

    def cuMemcpyDtoHAsync(self, dst: int, src: int, num_bytes: int, stream: int) -> tuple[int, ...]:
        self._check_block(src, num_bytes)
        self._check_registered(dst, num_bytes)
        return self._copy(dst, src, num_bytes, stream)

    def _copy(self, dst: int, src: int, num_bytes: int, stream: int) -> tuple[int, ...]:
        def copy() -> bool:
            ctypes.memmove(dst, src, num_bytes)
            return True

        assert self._depth
        self.streams[stream].push(copy)
        return OK

    def cuStreamWaitEvent(self, stream: int, event: Event, _flags: int) -> tuple[int, ...]:
        reached = event.reached
        self.streams[stream].push(reached.is_set)
        return OK

    def cuLaunchKernel(self, function: bytes, *rest: int) -> tuple[int, ...]:
        assert self._depth
        *grid, _shared, stream, pointers, extra = rest
        assert (grid[1:], extra) == ([1, 1, 64, 1, 1], 0)
        addresses = (ctypes.c_void_p * {b"stage": 11, b"check": 5, b"move": 7}[function]).from_address(pointers)
        *values, first_null, second_null = (_word(address or 0).value for address in addresses)
        assert first_null == second_null == 0
        self.num_ctas[function] = grid[0]
        kernels: dict[bytes, Callable[..., bool]] = {b"stage": self._stage, b"check": self._check, b"move": self._move}
        self.streams[stream].push(partial(kernels[function], grid[0], *values))
        return OK

    def _stage(self, num_ctas: int, words: int, memories: int, scratch: int, *numbers: int) -> bool:
        """Only remembered: nothing is to change what it reads until the rows are moved."""
        _, _, _, lane_words, _, num_memories = numbers
        assert num_ctas == 1
        assert len(self.scratch[scratch]) >= 8 * scratch_words(lane_words, num_memories)
        self._staged[scratch] = (words, memories, *numbers)
        return True

    def _check(self, num_ctas: int, scratch: int, *sizes: int) -> bool:
        """Left to what moves the rows, which must not run without it."""
        assert num_ctas > 1
        if scratch in self._staged:
            _, _, _, _, _, lane_words, _, num_memories = self._staged[scratch]
            assert sizes == (lane_words, num_memories)
        self.num_checks += 1
        return True

    def _move(self, num_ctas: int, scratch: int, *numbers: int) -> bool:
        assert num_ctas > 1
        if scratch not in self._staged:
            return self._move_lane(scratch, *numbers)
        words, memories, entry, run, lanes, lane_words, num_lanes, num_memories = self._staged.pop(scratch)
        assert numbers == (words, entry, lane_words, num_memories)
        reference.move_rows(
            _tensor(words, lanes + num_lanes * lane_words),
            _tensor(memories, 2 * num_memories).view(-1, 2),
            entry,
            run,
            lanes,
            lane_words,
        )
        return True

    def _move_lane(self, scratch: int, words: int, entry: int, lane_words: int, num_memories: int) -> bool:
        """Of a lane that was copied there, with the table of memories and the sums behind it."""
        self._check_block(scratch, 8 * scratch_words(lane_words, num_memories))
        lane, table = _tensor(scratch, lane_words), _tensor(scratch + 8 * lane_words, 2 * num_memories)
        is_summed = int(lane[2]) != 0
        sums = _tensor(scratch + 8 * (lane_words + 2 * num_memories), scratch_words(0, 0))
        assert not (is_summed and sums.any()), "sums that were not cleared"
        order = torch.cat([torch.tensor([1, 0, 0, lane_words, 0, 0, 0, 0]), lane])
        reference.move_rows(order, table.view(-1, 2), 0, 1, 8, lane_words)
        if is_summed:
            sums += 1  # something
            _tensor(words, entry + 5)[entry + 4] = order[4]
        return True

    def _check_word(self, address: int, flags: int) -> None:
        assert self._depth
        assert flags == 0
        self._check_registered(address, 8)

    def _check_registered(self, address: int, num_bytes: int) -> None:
        assert any(
            first <= address <= address + num_bytes <= first + size for first, size in self.registered.items()
        ), "host memory that is not registered"

    def _check_block(self, address: int, num_bytes: int) -> None:
        assert any(
            first <= address <= address + num_bytes <= first + len(block) for first, block in self.scratch.items()
        ), "memory of the GPU that was not allocated"
