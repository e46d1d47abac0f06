"""A thread that does to host pools what a GPU's stream does to its own: the whole protocol without a GPU."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from kvxfer.errors import ContractError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.ownership import Int64Array
from kvxfer.rows_host import ByteArray, row_windows
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Ring, Span

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
        self._changed = threading.Condition()
        self._numbers: deque[int] = deque()
        self._marked = ring.timeline
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvxfer-host-stream", daemon=True)
        self._thread.start()

    def enqueue(self, number: int) -> None:
        """`RowStream.enqueue`."""
        with self._changed:
            self._numbers.append(number)
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
        offsets = self._ring.offsets_of(number)
        for span in self._ring.spans_of(number):
            src, dst = self._memories.get(span.src_memory), self._memories.get(span.dst_memory)
            if src is not None and dst is not None:
                _copy(span, offsets, src, dst)


def _copy(span: Span, offsets: Int64Array, src: ByteArray, dst: ByteArray) -> None:
    """Copy a span's rows. Rows outside their memory are left out, as the kernel of a GPU does."""
    if span.row_bytes > min(src.size, dst.size):
        return
    src_rows = _row_offsets(span.num_rows, span.row_bytes, span.src_first_byte, span.src_table, offsets)
    dst_rows = _row_offsets(span.num_rows, span.row_bytes, span.dst_first_byte, span.dst_table, offsets)
    fits = (src_rows >= 0) & (src_rows <= src.size - span.row_bytes)
    fits &= (dst_rows >= 0) & (dst_rows <= dst.size - span.row_bytes)
    row_windows(dst, span.row_bytes)[dst_rows[fits]] = row_windows(src, span.row_bytes)[src_rows[fits]]


def _row_offsets(num_rows: int, row_bytes: int, first_byte: int, table: int, offsets: Int64Array) -> Int64Array:
    """`[num_rows]` int64: where the rows of one side begin in its memory."""
    if table == LINEAR:
        return np.arange(num_rows, dtype=np.int64) * row_bytes + first_byte
    return offsets[table : table + num_rows] + first_byte
