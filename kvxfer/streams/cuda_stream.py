"""A ring's entries on a GPU: CUDA streams wait for each order, move its rows and write the done word.

Nothing here blocks or polls, but making and closing a stream. Kernels are compiled, loaded and run before a stream is
ready. A kernel that is loaded later may make its process wait for everything on the GPU, also for a stream that waits
for an order: load what you can before.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvxfer.errors import ContractError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.ownership import Int64Array
from kvxfer.row_sums import row_sum
from kvxfer.streams.cuda_marks import CudaMarks
from kvxfer.streams.cuda_track import MAX_MEMORIES, Ctas, Track
from kvxfer.streams.device import DevicePool
from kvxfer.streams.driver import Gpu, PinnedMemories, gpu
from kvxfer.streams.ring import (
    LINEAR,
    NUM_ENTRIES,
    MemoryIndex,
    OrderCode,
    Ring,
    Span,
    SumKind,
    SumOrder,
    order_offset_bytes,
)
from kvxfer.streams.slot_binding import bind_entries

GATHER_CTAS: Final = 4
"""Programs that move rows into pinned slots, where writes over the bus wait for nothing. Like the others a value to
begin with, which `python -m benchmarks.gpu_stream` measures: as few as fill the bus, because each may keep a program of
the worker's from its multiprocessor. That is what a copy engine is there for instead, where entries are bound."""
SCATTER_CTAS: Final = 8
"""Programs that move rows out of pinned slots, where reads over the bus take 2 to 3 us."""
PULL_CTAS: Final = 96
"""Programs that move rows between memories of the GPU."""
STAGED_CTAS: Final = 48
"""Programs that move rows out of a segment that was staged and found right, or into one that a copy engine takes to its
slot: few microseconds."""
NUM_STREAMS: Final = 2
"""Streams that take turns at entries: the launch of one entry lies beside the copies of another. On an H200 gathers
into pinned slots reach 48.8 GB/s by two and 45.2 by one, scatters 47.7 and 43.7."""
STREAM_PRIORITY: Final = -4
"""Streams of different priorities do not share a queue of the GPU, where one that waits for an order holds up whatever
is behind it. So this is one that hardly anybody else asks for: engines use 0, torch's pools 0 to -3, some libraries the
greatest, -5 on most GPUs. That programs may begin before the worker's is its price, and another reason for few of them.
CUDA takes the nearest that the GPU has."""
_TABLE_BYTES: Final = MAX_MEMORIES * 16  # an address and a number of bytes each
_WARM_UP_BYTES: Final = 83
_WARM_UP_SRC, _WARM_UP_DST = order_offset_bytes(16), order_offset_bytes(32)
_WARM_UP_ROW = Span(_WARM_UP_BYTES, 1, 1, 1, _WARM_UP_SRC, LINEAR, 1, _WARM_UP_DST, LINEAR)


class CudaRowStream:
    """`RowStream` on a GPU. `ring`, `pool` and `slots` stay the caller's; they must outlive `close()`.

    To be used by one thread at a time. With `num_streams` above 1, entries whose orders have come overlap, and may be
    done in another order than that of their numbers. Where the ring has checked segments, each stream has memory of the
    GPU for one of them.
    """

    def __init__(
        self,
        ring: Ring,
        pool: DevicePool,
        slots: HostMemory | DevicePool,
        *,
        max_ctas: int = SCATTER_CTAS,
        num_streams: int = NUM_STREAMS,
        staged_ctas: int = STAGED_CTAS,
        pull_ctas: int = PULL_CTAS,
        priority: int = STREAM_PRIORITY,
        may_bind: bool = False,
    ) -> None:
        """Takes seconds where the kernels are not in Triton's cache. `max_ctas`: programs that move the rows of an
        entry, `GATHER_CTAS`, `SCATTER_CTAS` or `PULL_CTAS` by the way that rows go. Those copy a segment that is
        checked, and `staged_ctas` programs move its rows. While a peer's pool of a GPU is there to be pulled from,
        `pull_ctas` move the rows of every entry. `priority` of the streams, as CUDA counts: 0 is that of most,
        lower ones go first. With `may_bind`, and where the agent offers it, entries are bound to slots in host memory:
        `staged_ctas` programs pack a segment in memory of the GPU, which each stream has for one.

        Raises `EngineMissingError` where CUDA or its bindings are missing, `RegistrationError` where host memory
        cannot be locked, `TransportError` for what else the GPU refuses.
        """
        if min(max_ctas, num_streams, staged_ctas, pull_ctas) < 1:
            got = f"{max_ctas}, {num_streams}, {staged_ctas} and {pull_ctas}"
            raise ContractError(f"max_ctas, num_streams, staged_ctas, pull_ctas: got {got}, expected at least 1 each")
        self._gpu = gpu(pool.device_index)
        check_abilities(self._gpu)
        self._ring = ring
        self._pull_ctas = pull_ctas
        self._gpu_peers: set[int] = set()  # memories of GPUs that rows are pulled from
        self._num_enqueued = 0
        self._is_closed = False
        self._pinned = PinnedMemories(self._gpu)
        self._tracks: list[Track] = []
        self._bound = bind_entries(ring, slots.num_bytes) if may_bind and isinstance(slots, HostMemory) else None
        self._marks: CudaMarks | None = None
        self._table = HostMemory.create(num_streams * _TABLE_BYTES, "kvxfer-memories")  # one a stream
        try:
            self._make_tracks(num_streams, max_ctas, staged_ctas, priority)
            self._share(pool, slots, priority)
        except BaseException:
            self._release()
            raise

    def enqueue(self, number: int, num_entries: int = 1) -> None:
        """`RowStream.enqueue`. Raises `TransportError`; the entry that it is raised for needs an order all the same
        before `close()`."""
        tracks = self._tracks
        with self._gpu:
            for each in range(number, number + num_entries):
                self._num_enqueued = each + 1
                # All entries of a slot go by one stream, in their order.
                turn = each if self._bound is None else self._bound.slot_of(each)
                tracks[turn % len(tracks)].enqueue(each)

    def mark(self, stream: object | None = None) -> int:
        """`RowStream.mark`, as `CudaMarks.mark`."""
        assert self._marks is not None
        return self._marks.mark(stream)

    def set_memory(self, index: int, memory: HostMemory | DevicePool) -> None:
        """`RowStream.set_memory`. Host memory stays registered until `forget()` or `close()`. Raises
        `RegistrationError`."""
        if not 0 <= index < MemoryIndex.STAGING:
            raise ContractError(f"memory index: got {index}, expected 0 to {MemoryIndex.STAGING - 1}")
        if isinstance(memory, DevicePool) and memory.device_index != self._gpu.device_index:
            raise ContractError(
                f"memory {index}: got memory for GPU {memory.device_index}, expected it for GPU "
                f"{self._gpu.device_index}, whose stream this is: map it for that one"
            )
        if index == MemoryIndex.SLOTS and self._bound is not None:
            self._bind_to(memory)
        address = memory.address if isinstance(memory, DevicePool) else self._pinned.add(memory)
        self._tables()[:, index] = address, memory.num_bytes
        if index > MemoryIndex.SLOTS and isinstance(memory, DevicePool):
            self._gpu_peers.add(index)
            self._set_ctas()

    def _bind_to(self, slots: HostMemory | DevicePool) -> None:
        """Entries that are enqueued from now on fill slots of this memory, which is about to be registered."""
        assert self._bound is not None
        if not isinstance(slots, HostMemory) or not self._bound.fit(slots.num_bytes):
            raise ContractError(
                f"slots: got {slots}, expected host memory for {self._bound}, to which entries are bound"
            )
        for track in self._tracks:
            track.set_slots(slots.address)

    def _set_ctas(self) -> None:
        """Which order an entry gets is open when it is launched. As few programs as fill the bus have too few bytes on
        their way to fill a link between GPUs, or a GPU's memory; while there are peers, more than needed scatter."""
        for track in self._tracks:
            track.expect_pulls(self._pull_ctas if self._gpu_peers else None)

    def _tables(self) -> Int64Array:
        """`[num_streams, MAX_MEMORIES, 2]` int64: address and bytes of each memory as each stream sees it."""
        return self._table.array.view(np.int64).reshape(-1, MAX_MEMORIES, 2)

    def forget(self, memory: HostMemory | DevicePool) -> None:
        """`RowStream.forget`. CUDA may wait for the whole device here, which is why nothing may be enqueued that waits
        for an order. Raises `TransportError`."""
        if isinstance(memory, HostMemory):
            self._pinned.remove(memory)

    def clear_memory(self, index: int) -> None:
        """`RowStream.clear_memory`."""
        self._tables()[:, index] = 0
        self._gpu_peers.discard(index)
        self._set_ctas()

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
            for track in self._tracks:
                track.drain()
        finally:
            self._release()

    def _make_tracks(self, num_streams: int, max_ctas: int, staged_ctas: int, priority: int) -> None:
        """Make the streams, and run the kernels on each: on a ring of their own, told to skip, then to move a row, then
        to check it first."""
        table_address = self._pinned.add(self._table)
        ring = Ring.create(1, 16)
        try:
            max_lane_bytes, checked_bytes = max(ring.lane_bytes, self._ring.lane_bytes), self._ring.staging_bytes
            ctas = (
                Ctas(staged_ctas, max_ctas) if checked_bytes else Ctas(max_ctas if self._bound is None else staged_ctas)
            )
            staging_bytes = max(checked_bytes, self._bound.slot_bytes if self._bound is not None else 0)
            address = self._gpu.register(ring.memory)
            try:
                self._tables()[:, MemoryIndex.SLOTS] = address, ring.memory.num_bytes
                for idx in range(num_streams):
                    memories = table_address + idx * _TABLE_BYTES, MAX_MEMORIES
                    track = Track(self._gpu, priority, ctas, memories, max_lane_bytes, staging_bytes, self._bound)
                    self._tracks.append(track)
                    self._tables()[idx, MemoryIndex.STAGING] = track.staging, staging_bytes
                    track.set_ring(ring, address)
                    self._try(ring, track, OrderCode.SKIP, SumKind.MOVED)
                    self._try(ring, track, OrderCode.RUN, SumKind.MOVED)
                    if checked_bytes:
                        self._try(ring, track, OrderCode.RUN, SumKind.CHECKED)
            finally:
                self._tables()[:, MemoryIndex.SLOTS] = 0
                self._gpu.unregister(ring.memory)
        finally:
            ring.close()

    def _try(self, ring: Ring, track: Track, code: OrderCode, kind: SumKind) -> None:
        src = ring.memory.array[_WARM_UP_SRC:][:_WARM_UP_BYTES]
        dst = ring.memory.array[_WARM_UP_DST:][:_WARM_UP_BYTES]
        src[:] = np.arange(1, _WARM_UP_BYTES + 1)
        dst[:] = 0
        span, summed = _WARM_UP_ROW, SumOrder(kind, _WARM_UP_DST)
        if kind is SumKind.CHECKED:
            span = span._replace(src_memory=MemoryIndex.STAGING, src_first_byte=0)
            summed = SumOrder(kind, _WARM_UP_SRC, _WARM_UP_BYTES, row_sum(src))
        ring.fill_lane(0, [span], np.empty(0, dtype=np.int64), summed)
        ring.order(0, code)
        with self._gpu:
            track.launch(0)
        track.drain()
        if not np.array_equal(dst, src if code is OrderCode.RUN else np.zeros_like(src)):
            raise TransportError(f"move_rows: got wrong bytes for {code.name} on this GPU, first {dst[:8].tolist()}")
        if code is OrderCode.RUN and ring.sum_of(0) != row_sum(src):
            raise TransportError(f"move_rows: got a wrong sum of rows on this GPU, {ring.sum_of(0):#x}, {kind.name}")

    def _share(self, pool: DevicePool, slots: HostMemory | DevicePool, priority: int) -> None:
        """Give the GPU the ring, the pool and the slots."""
        address = self._pinned.add(self._ring.memory)
        self._marks = CudaMarks(self._gpu, self._ring, address, priority)
        for track in self._tracks:
            track.set_ring(self._ring, address)
        self.set_memory(MemoryIndex.POOL, pool)
        self.set_memory(MemoryIndex.SLOTS, slots)

    def _release(self) -> None:
        """Give back what was made."""
        for track in self._tracks:
            track.close()
        if self._marks is not None:
            self._marks.close()
        self._pinned.close()
        self._tracks, self._marks = [], None
        self._table.close()


def check_abilities(device: Gpu) -> None:
    """Raise `TransportError` for a GPU that row streams cannot use."""
    if not device.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS"):
        raise TransportError(
            f"GPU {device.device_index}: got no 64-bit stream memory operations, expected them for row streams: use a "
            "newer GPU or driver, or the path over host memory"
        )
