"""The agent's part of `benchmarks.gpu_turns`: python -m benchmarks.gpu_turns_agent SOCKET_DIR NUM_SLOTS SLOT_KIND.

Takes the one pool that is handed over, as an agent does, and then reads lines: seconds, for which it keeps a
gather in flight for every slot. It answers with a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu_stream_agent import ROW_BYTES, SEGMENT_BYTES, Task, fill_lane, make_table, segment_rows
from kvxfer.control.channel import WorkerListener
from kvxfer.control.handoff_listener import HandoffListener, ReceivedPool, RefusedHandoff
from kvxfer.control.shared_memory import as_device_pool
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.streams.device import MappedPool, allocate_pool
from kvxfer.streams.ring import OrderCode, Ring
from kvxfer.streams.staged_stream import StagedRowStream

_NAP_S = 50e-6
_WAIT_S = 120.0


def take_pool(socket_dir: str, num_slots: int, slots: HostMemory | MappedPool) -> tuple[HandoffListener, ReceivedPool]:
    """Wait for the worker's pool."""

    def share_stream(_layout: PoolLayout, _pid: int) -> tuple[Ring, HostMemory | MappedPool, int]:
        return Ring.create(num_slots, segment_rows(1)), slots, 0

    executor = ThreadPoolExecutor(1)
    listener = HandoffListener(socket_dir, share_stream, call=executor.submit)
    deadline_s = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline_s:
        for event in listener.poll(time.monotonic()):
            if isinstance(event, RefusedHandoff):
                raise SystemExit(event.detail)
            if isinstance(event, ReceivedPool):
                executor.shutdown()
                return listener, event
        time.sleep(0.01)
    raise SystemExit(f"no worker came within {_WAIT_S} s")


class Gathers:
    """Gathers of 8 MiB, each lane's into the slot of its number."""

    def __init__(self, pool: ReceivedPool, stream: StagedRowStream, num_slots: int) -> None:
        assert pool.ring is not None
        self._ring, self._stream, self._num_slots = pool.ring, stream, num_slots
        self._next_number = 0
        task = Task("gather", 1)
        for lane in range(num_slots):
            fill_lane(pool.ring, task, lane, make_table(lane))

    def run(self, duration_s: float) -> dict[str, float | None]:
        """Keep one in flight for every slot."""
        running: deque[int] = deque()
        first, began_s, cpu_s = self._next_number, time.perf_counter(), time.process_time()
        is_over = False
        while running or not is_over:
            while running and self._stream.is_done(running[0]):
                running.popleft()
            is_over = time.perf_counter() - began_s >= duration_s
            while len(running) < self._num_slots and not is_over:
                lane = self._next_number % self._num_slots
                self._ring.order(self._next_number, OrderCode.RUN, lane)
                self._stream.enqueue(self._next_number, lane)
                running.append(self._next_number)
                self._next_number += 1
            time.sleep(_NAP_S)
        if self._stream.error is not None:
            raise SystemExit(self._stream.error)
        num_gathers, taken_s = self._next_number - first, time.perf_counter() - began_s
        return {
            "gb_s": num_gathers * segment_rows(1) * ROW_BYTES / taken_s / 1e9,
            "cpu_us": (time.process_time() - cpu_s) / num_gathers * 1e6,
            "turn_ms": self._lone_turn_ms(),
        }

    def _lone_turn_ms(self) -> float | None:
        """What the stream makes of gathers that are alone in flight."""
        for _ in range(16):
            lane = self._next_number % self._num_slots
            self._ring.order(self._next_number, OrderCode.RUN, lane)
            self._stream.enqueue(self._next_number, lane)
            while not self._stream.is_done(self._next_number):
                time.sleep(_NAP_S)
            self._next_number += 1
        return None if self._stream.turn_s is None else self._stream.turn_s * 1e3


def main() -> None:
    """Serve until the other end closes its pipe."""
    socket_dir, num_slots, slot_kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    num_bytes = num_slots * SEGMENT_BYTES
    slots: HostMemory | MappedPool = (
        HostMemory.create(num_bytes, "slots") if slot_kind == "pinned_host" else allocate_pool(num_bytes, 0)
    )
    if isinstance(slots, HostMemory):
        slots.array[:] = 0
    workers = WorkerListener(socket_dir)
    listener, pool = take_pool(socket_dir, num_slots, slots)
    assert pool.ring is not None
    assert pool.device is not None
    stream = StagedRowStream(pool.ring, pool.device.pool, as_device_pool(slots))
    gathers = Gathers(pool, stream, num_slots)
    for line in sys.stdin:
        print(json.dumps(gathers.run(float(line))), flush=True)
    stream.close()
    pool.close()
    listener.close()
    workers.close()
    slots.close()


if __name__ == "__main__":
    main()
