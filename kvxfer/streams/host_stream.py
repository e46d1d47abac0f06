"""A thread that does to host pools what a GPU's stream does to its own: the whole protocol without a GPU."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from kvxfer.errors import ContractError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.ownership import Int64Array
from kvxfer.row_sums import row_sum
from kvxfer.rows_host import ByteArray, row_windows
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Ring, Span, SumKind, SumOrder

_NAP_S = 50e-6
_LONG_NAP_S = 1e-3
_NUM_SHORT_NAPS = 40  # an order that has not come by then may take long


class HostRowStream:
    """Executes the entries of a ring in a thread of its own. `ring`, `pool` and `slots` stay the caller's; they must
    outlive `close()`."""

    def __init__(self, ring: Ring, pool: HostMemory, slots: HostMemory | DevicePool) -> None:
        """Raises `TransportError` for slots of a GPU."""
        self._ring = ring
        self._memories: dict[int, ByteArray] = {MemoryIndex.POOL: pool.array}
        self.set_memory(MemoryIndex.SLOTS, slots)
        self._memories[MemoryIndex.STAGING] = np.zeros(ring.staging_bytes, dtype=np.uint8)
        self._changed = threading.Condition()
        self._numbers: deque[int] = deque()
        self._marked = ring.timeline
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-host-stream", daemon=True)
        self._thread.start()

    def enqueue(self, number: int, num_entries: int = 1) -> None:
        """`RowStream.enqueue`."""
        with self._changed:
            self._numbers.extend(range(number, number + num_entries))
            self._changed.notify()

    def mark(self, stream: object | None = None) -> int:
        """`RowStream.mark`. What the caller has written is there when it calls: the timeline rises at once."""
        if stream is not None:
            raise ContractError(f"stream: got {type(stream).__name__}, expected None: a host pool has no streams")
        self._marked += 1
        self._ring.set_timeline(self._marked)
        return self._marked

    def set_memory(self, index: int, memory: HostMemory | DevicePool) -> None:
        """`RowStream.set_memory`. Raises `TransportError` for memory of a GPU."""
        if isinstance(memory, DevicePool):
            raise TransportError("memory: got one of a GPU, expected host memory for a pool in host memory")
        self._memories[index] = memory.array

    def forget(self, memory: HostMemory | DevicePool) -> None:
        """`RowStream.forget`. Nothing was made for it."""

    def clear_memory(self, index: int) -> None:
        """`RowStream.clear_memory`."""
        self._memories.pop(index, None)

    def close(self) -> None:
        """`RowStream.close`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        self._memories.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._numbers and not self._is_closing:
                    self._changed.wait()
                if not self._numbers:
                    return
                number = self._numbers.popleft()
            self._execute(number)
            self._ring.set_done(number)

    def _execute(self, number: int) -> None:
        num_naps = 0
        while (code := self._ring.order_of(number)) is None:
            time.sleep(_NAP_S if num_naps < _NUM_SHORT_NAPS else _LONG_NAP_S)
            num_naps += 1
        if code is not OrderCode.RUN:
            return
        summed = self._ring.summed_by(number)
        total = self._stage(summed) if summed.kind is SumKind.CHECKED else 0
        if summed.kind is not SumKind.CHECKED or total == summed.expected:
            offsets = self._ring.offsets_of(number)
            for span in self._ring.spans_of(number):
                src, dst = self._memories.get(span.src_memory), self._memories.get(span.dst_memory)
                if src is None or dst is None:
                    continue
                moved = _copy(span, offsets, src, dst)
                if summed.kind is SumKind.MOVED:
                    total += _sum_rows(dst, moved, span.row_bytes, summed.first_byte)
        if summed.kind is not SumKind.NONE:
            self._ring.set_sum(number, total)

    def _stage(self, summed: SumOrder) -> int:
        """Copy a segment that is to be checked; its sum, or a wrong one where it cannot be copied."""
        slots, staging = self._memories[MemoryIndex.SLOTS], self._memories[MemoryIndex.STAGING]
        num_bytes, end_byte = summed.num_bytes, summed.first_byte + summed.num_bytes
        if not (0 < num_bytes <= staging.size and summed.first_byte >= 0 and end_byte <= slots.size):
            return ~summed.expected
        staging[:num_bytes] = slots[summed.first_byte : end_byte]
        return row_sum(staging[:num_bytes])


def _copy(span: Span, offsets: Int64Array, src: ByteArray, dst: ByteArray) -> Int64Array:
    """Copy a span's rows; where in `dst` those are. Rows outside their memory are left out, as the kernel of a GPU
    does."""
    if span.row_bytes > min(src.size, dst.size):
        return np.empty(0, dtype=np.int64)
    src_rows = _row_offsets(span.num_rows, span.row_bytes, span.src_first_byte, span.src_table, offsets)
    dst_rows = _row_offsets(span.num_rows, span.row_bytes, span.dst_first_byte, span.dst_table, offsets)
    fits = (src_rows >= 0) & (src_rows <= src.size - span.row_bytes)
    fits &= (dst_rows >= 0) & (dst_rows <= dst.size - span.row_bytes)
    moved = dst_rows[fits]
    row_windows(dst, span.row_bytes)[moved] = row_windows(src, span.row_bytes)[src_rows[fits]]
    return moved


def _sum_rows(dst: ByteArray, rows: Int64Array, row_bytes: int, segment_begin: int) -> int:
    """The share in the sum of their segment of rows that were moved to `rows`, at once where they touch."""
    touch = np.flatnonzero(np.diff(rows) != row_bytes) + 1
    return sum(
        row_sum(dst[run[0] : run[-1] + row_bytes], int(run[0]) - segment_begin)
        for run in np.split(rows, touch)
        if run.size
    )


def _row_offsets(num_rows: int, row_bytes: int, first_byte: int, table: int, offsets: Int64Array) -> Int64Array:
    """`[num_rows]` int64: where the rows of one side begin in its memory."""
    if table == LINEAR:
        return np.arange(num_rows, dtype=np.int64) * row_bytes + first_byte
    return offsets[table : table + num_rows] + first_byte
