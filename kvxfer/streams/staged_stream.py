"""An agent's own stream on a GPU: moves rows between a pool that a worker shares and the agent's slots.

Kernels of two processes never run at once on a GPU: the processes take turns, some milliseconds each while both have
work. Two things follow. A turn must not be wasted on waiting for the bus: kernels gather into memory of the GPU and
scatter out of it, and copy engines, which take no turns, move bytes between that and slots in host memory. And all
that is to be moved is given at once, so that one turn serves it. What is in flight divided by a turn is the rate.

An entry is enqueued when its order has been given, so nothing of this ever waits for a process:

| stream | a gather | a scatter |
|---|---|---|
| uploads | the lane | the lane, the slot's bytes |
| kernels | the rows, when the lane is there | the rows, when both are there; the end |
| downloads | the slot's bytes, when the rows are there; the end | |
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvxfer.errors import TransportError
from kvxfer.memory import HostMemory
from kvxfer.streams.cuda_track import MAX_MEMORIES, LaneLaunch
from kvxfer.streams.device import DevicePool
from kvxfer.streams.driver import PinnedMemories, check, cuda, gpu
from kvxfer.streams.lane_view import LaneView
from kvxfer.streams.ring import LINEAR, MemoryIndex, Ring, Span, SumKind
from kvxfer.streams.staged_lane import RunningEntry, StagedLane

NUM_KERNEL_STREAMS: Final = 2
"""What one kernel leaves of the GPU while it begins and ends is the other's."""
CTAS_PER_MULTIPROCESSOR: Final = 2
"""In its turn a process has the whole GPU."""
_NUM_TURNS: Final = 16
_SRC_MEMORY, _DST_MEMORY = 3, 6  # words of a span; the first byte comes next
_TABLE_BYTES: Final = MAX_MEMORIES * 16  # an address and a number of bytes each
_WARM_UP_MEMORY: Final = 2
_WARM_UP_ROW: Final = Span(80, 1, 16, _WARM_UP_MEMORY, 0, LINEAR, _WARM_UP_MEMORY, 128, LINEAR)
_WARM_UP_BYTES: Final = 256  # no more than sums take


class StagedRowStream:
    """`OwnStream` on a GPU. `ring`, `pool` and `slots` stay the caller's; they must outlive `close()`.

    All but `is_done` is for one thread at a time. Slots in host memory have a copy of their size on the GPU.
    """

    def __init__(self, ring: Ring, pool: DevicePool, slots: HostMemory | DevicePool) -> None:
        """Takes seconds where the kernels are not loaded yet; see `load_kernels`.

        Raises `EngineMissingError` where CUDA or its bindings are missing, `RegistrationError` where host memory
        cannot be locked, `TransportError` for what else the GPU refuses.
        """
        from kvxfer.kernels.moves import scratch_words

        self._gpu = gpu(pool.device_index)
        self._driver = cuda()
        self._ring = ring
        self._error: str | None = None
        self._is_closed = False
        self._running: dict[int, RunningEntry] = {}
        self._turns_s: deque[float] = deque(maxlen=_NUM_TURNS)
        self._pinned = PinnedMemories(self._gpu)
        self._streams: list[Any] = []  # uploads, downloads, kernels
        self._events: list[Any] = []
        self._blocks: dict[int, int] = {}  # memory of the GPU that was taken: address and bytes
        self._lanes: list[StagedLane] = []
        self._slots = slots
        self._mirror = 0  # of slots in host memory
        self._sum_bytes = 8 * scratch_words(0, 0)
        self._table = HostMemory.create(_TABLE_BYTES + self._sum_bytes, "kvxfer-memories")
        try:
            self._make_lanes()
            self._warm_up()
            self._make_staging()
            self._set_memory(MemoryIndex.POOL, pool.address, pool.num_bytes)
            self._use_slots(slots)
        except BaseException:
            self._release()
            raise

    @property
    def error(self) -> str | None:
        """`OwnStream.error`."""
        return self._error

    @property
    def turn_s(self) -> float | None:
        """How long an entry between pool and slots takes from its order to its end when none is before it: this
        process's turn on the GPU has to come, while the worker computes. The median of the last few; None while there
        are none."""
        turns_s = list(self._turns_s)
        return statistics.median(turns_s) if turns_s else None

    def enqueue(self, number: int, lane: int) -> None:
        """`OwnStream.enqueue`."""
        if self._error is not None:
            return
        own, order, summed = self._lanes[lane], LaneView.of(self._ring, lane), self._ring.summed_by(number)
        is_checked, fills_slot = summed.kind is SumKind.CHECKED, order.spans[0, _DST_MEMORY] == MemoryIndex.SLOTS
        reads_slot = is_checked or order.spans[0, _SRC_MEMORY] == MemoryIndex.SLOTS
        given_s, tells_turn = time.perf_counter(), bool(fills_slot or reads_slot) and not self._running
        try:
            with self._gpu:
                self._upload(own, order, has_sum=summed.kind is not SumKind.NONE)
                if is_checked:
                    self._copy_in(summed.first_byte, summed.num_bytes)
                elif reads_slot:
                    self._copy_in(*order.extent(_SRC_MEMORY + 1))
                self._run(own, number, is_checked=is_checked)
                ended = own.moved
                if self._mirror and fills_slot:
                    self._copy_out(own, *order.extent(_DST_MEMORY + 1))
                    ended = own.downloaded
        except TransportError as error:
            self._error = str(error)
            self.drain()  # of the entry, too, nothing is under way then
            return
        self._running[number] = RunningEntry(ended, given_s, tells_turn)

    def is_done(self, number: int) -> bool:
        """`OwnStream.is_done`. From any thread."""
        running = self._running.get(number)
        if running is None or self._error is not None:
            return True
        with self._gpu:
            result = self._driver.cuEventQuery(running.ended)
        if result[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        try:
            check("cuEventQuery", result)
        except TransportError as error:
            self._error = str(error)
            return True
        if self._running.pop(number, None) is not None and running.tells_turn:
            self._turns_s.append(time.perf_counter() - running.given_s)
        return True

    def replace_slots(self, slots: HostMemory | DevicePool) -> None:
        """`OwnStream.replace_slots`."""
        try:
            self._use_slots(slots)
        except TransportError as error:
            self._error = str(error)

    def set_peer(self, index: int, pool: DevicePool | None) -> None:
        """`OwnStream.set_peer`."""
        try:
            self._tell(index, *((0, 0) if pool is None else (pool.address, pool.num_bytes)), self._lanes)
        except TransportError as error:
            self._error = str(error)

    def _use_slots(self, slots: HostMemory | DevicePool) -> None:
        self.drain()
        if isinstance(slots, HostMemory):
            mirror = self._mirror if self._blocks.get(self._mirror) == slots.num_bytes else self._take(slots.num_bytes)
            if slots not in self._pinned:
                self._pinned.add(slots)
            address = mirror
        else:
            mirror, address = 0, slots.address
        self._set_memory(MemoryIndex.SLOTS, address, slots.num_bytes)
        self.drain()
        if self._mirror not in (0, mirror):
            self._free(self._mirror)
        if self._slots is not slots and isinstance(self._slots, HostMemory) and self._slots in self._pinned:
            self._pinned.remove(self._slots)
        self._slots, self._mirror = slots, mirror

    def drain(self) -> None:
        """`OwnStream.drain`. A context that is broken has nothing under way any more."""
        with self._gpu:
            for stream in self._streams:
                result = self._driver.cuStreamSynchronize(stream)
                if result[0] != 0 and self._error is None:
                    self._error = f"cuStreamSynchronize: got {result[0]}, expected CUDA_SUCCESS"

    def close(self) -> None:
        """Wait for what was given, then give everything back. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.drain()
        self._release()

    # ---- one entry, the context current ----

    def _upload(self, lane: StagedLane, order: LaneView, *, has_sum: bool) -> None:
        self._to_gpu(lane.address, self._ring.memory.address + order.offset_bytes, order.used_bytes)
        if has_sum:
            sums = lane.address + self._ring.lane_bytes + _TABLE_BYTES
            self._to_gpu(sums, self._table.address + _TABLE_BYTES, self._sum_bytes)

    def _copy_in(self, offset_bytes: int, num_bytes: int) -> None:
        if self._mirror:
            assert isinstance(self._slots, HostMemory)
            self._to_gpu(self._mirror + offset_bytes, self._slots.address + offset_bytes, num_bytes)

    def _to_gpu(self, dst: int, src: int, num_bytes: int) -> None:
        check("cuMemcpyHtoDAsync", self._driver.cuMemcpyHtoDAsync(dst, src, num_bytes, self._streams[0]))

    def _run(self, lane: StagedLane, number: int, *, is_checked: bool) -> None:
        driver = self._driver
        check("cuEventRecord", driver.cuEventRecord(lane.uploaded, self._streams[0]))
        check("cuStreamWaitEvent", driver.cuStreamWaitEvent(lane.stream, lane.uploaded, 0))
        lane.launch(number, is_checked=is_checked)
        check("cuEventRecord", driver.cuEventRecord(lane.moved, lane.stream))

    def _copy_out(self, lane: StagedLane, offset_bytes: int, num_bytes: int) -> None:
        assert isinstance(self._slots, HostMemory)
        driver, downloads = self._driver, self._streams[1]
        src, dst = self._mirror + offset_bytes, self._slots.address + offset_bytes
        check("cuStreamWaitEvent", driver.cuStreamWaitEvent(downloads, lane.moved, 0))
        check("cuMemcpyDtoHAsync", driver.cuMemcpyDtoHAsync(dst, src, num_bytes, downloads))
        check("cuEventRecord", driver.cuEventRecord(lane.downloaded, downloads))

    # ---- making and giving back ----

    def _make_lanes(self) -> None:
        self._pinned.add(self._table)
        ring_address = self._pinned.add(self._ring.memory)
        num_ctas = CTAS_PER_MULTIPROCESSOR * self._gpu.attribute("MULTIPROCESSOR_COUNT")
        self._streams += [self._gpu.create_stream(0) for _ in range(2 + NUM_KERNEL_STREAMS)]
        lane_bytes = self._ring.lane_bytes + _TABLE_BYTES + self._sum_bytes
        for idx in range(self._ring.num_lanes):
            stream = self._streams[2 + idx % NUM_KERNEL_STREAMS]
            address = self._take(lane_bytes)
            launch = LaneLaunch(self._gpu, num_ctas, stream, address, self._ring, ring_address)
            self._lanes.append(StagedLane(address, launch, stream, *(self._make_event() for _ in range(3))))
            with self._gpu:
                self._to_gpu(address + self._ring.lane_bytes, self._table.address, _TABLE_BYTES)

    def _make_staging(self) -> None:
        """Memory for segments that are checked: for one on each kernel stream, where one follows the other."""
        num_bytes = self._ring.staging_bytes
        for idx in range(NUM_KERNEL_STREAMS if num_bytes else 0):
            lanes = self._lanes[idx::NUM_KERNEL_STREAMS]
            self._set_memory(MemoryIndex.STAGING, self._take(num_bytes), num_bytes, lanes)

    def _make_event(self) -> Any:  # noqa: ANN401
        driver = self._driver
        with self._gpu:
            event = check("cuEventCreate", driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
        self._events.append(event)
        return event

    def _warm_up(self) -> None:
        """Move a row within memory of the GPU's own, with each kernel stream. Whatever CUDA does at a first launch is
        done then."""
        row_bytes, dst_first_byte = _WARM_UP_ROW.row_bytes, _WARM_UP_ROW.dst_first_byte
        row = self._table.array[_TABLE_BYTES : _TABLE_BYTES + _WARM_UP_BYTES]
        address = self._take(_WARM_UP_BYTES)
        self._set_memory(_WARM_UP_MEMORY, address, _WARM_UP_BYTES)
        for idx, lane in enumerate(self._lanes[:NUM_KERNEL_STREAMS]):
            row[:] = np.arange(idx, idx + row.size) % 251
            expected = row.copy()
            expected[dst_first_byte : dst_first_byte + row_bytes] = row[:row_bytes]
            self._ring.fill_lane(idx, [_WARM_UP_ROW], np.empty(0, dtype=np.int64))
            with self._gpu:
                self._to_gpu(address, self._table.address + _TABLE_BYTES, _WARM_UP_BYTES)
                self._upload(lane, LaneView.of(self._ring, idx), has_sum=False)
                self._run(lane, idx, is_checked=False)
                src = self._table.address + _TABLE_BYTES
                check("cuStreamWaitEvent", self._driver.cuStreamWaitEvent(self._streams[1], lane.moved, 0))
                copied = self._driver.cuMemcpyDtoHAsync(src, address, _WARM_UP_BYTES, self._streams[1])
                check("cuMemcpyDtoHAsync", copied)
            self.drain()
            if not np.array_equal(row, expected):
                raise TransportError(f"move_rows: got wrong bytes on this GPU, first {row[:8].tolist()}")
        row[:] = 0  # what sums are cleared with
        self._set_memory(_WARM_UP_MEMORY, 0, 0)
        self._free(address)

    def _set_memory(self, index: int, address: int, num_bytes: int, lanes: Sequence[StagedLane] = ()) -> None:
        """Tell `lanes`, or all, and wait for that; no order that names `index` is under way."""
        self._tell(index, address, num_bytes, lanes or self._lanes)
        self.drain()

    def _tell(self, index: int, address: int, num_bytes: int, lanes: Sequence[StagedLane]) -> None:
        """Lanes know it when they have what is uploaded to them next."""
        offset_bytes = 16 * index  # alone: lanes have staging memory of their own
        self._table.array[offset_bytes : offset_bytes + 16].view(np.int64)[:] = address, num_bytes
        with self._gpu:
            for lane in lanes:
                dst = lane.address + self._ring.lane_bytes + offset_bytes
                self._to_gpu(dst, self._table.address + offset_bytes, 16)

    def _take(self, num_bytes: int) -> int:
        with self._gpu:
            address = int(check("cuMemAlloc", self._driver.cuMemAlloc(num_bytes)))
        self._blocks[address] = num_bytes
        return address

    def _free(self, address: int) -> None:
        with self._gpu:
            self._driver.cuMemFree(address)
        del self._blocks[address]

    def _release(self) -> None:
        """Give back what was made. A context that is broken refuses, and has nothing left to give back."""
        driver = self._driver
        with self._gpu:
            for event in self._events:
                driver.cuEventDestroy(event)
            for stream in self._streams:
                driver.cuStreamDestroy(stream)
        self._pinned.close()
        for address in list(self._blocks):
            self._free(address)
        self._events.clear()
        self._streams.clear()
        self._running.clear()
        self._table.close()
