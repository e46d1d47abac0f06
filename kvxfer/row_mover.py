"""Threads of an agent that move rows between its worker's host pool and its slots."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvxfer.addresses import BlockAddresses
from kvxfer.operations import CancelFlag, SegmentSource
from kvxfer.rows_host import ByteArray
from kvxfer.segments import ChunkPlan

MoveSegment = Callable[[ByteArray, ChunkPlan, tuple[BlockAddresses, ...], int, ByteArray], int]
"""`rows_host.gather_segment` or `rows_host.scatter_segment`."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A move has ended. `was_begun` is False where its cancel flag was set in time."""

    operation: int
    busy_s: float
    error: str | None
    was_begun: bool


class RowMover:
    """Runs moves in `num_threads` threads; segments run beside each other, numpy releases the GIL for the bytes."""

    def __init__(self, move: MoveSegment, num_threads: int, name: str) -> None:
        self._move = move
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._moved: deque[Moved] = deque()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def submit(
        self, operation: int, pool: ByteArray, source: SegmentSource, segment: int, slot: ByteArray, cancel: CancelFlag
    ) -> None:
        """Begin a move as soon as a thread is free; its one `Moved` comes out of `poll()`."""
        future = self._pool.submit(self._run, pool, source, segment, slot, cancel)
        future.add_done_callback(partial(self._ended, operation, segment))

    def poll(self) -> list[Moved]:
        """Moves that have ended since the last call."""
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []
        return [self._moved.popleft() for _ in range(len(self._moved))]

    def fileno(self) -> int:
        """Readable while `poll()` has something to return."""
        return self._event_fd

    def close(self) -> None:
        """Wait for the moves under way, then end the threads. Calling it again does nothing."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1

    def _run(
        self, pool: ByteArray, source: SegmentSource, segment: int, slot: ByteArray, cancel: CancelFlag
    ) -> float | None:
        """Seconds that the move took; None where it was cancelled in time."""
        if cancel.is_set:
            return None
        began_s = time.perf_counter()
        self._move(pool, source.plan, source.addresses, segment, slot)
        return time.perf_counter() - began_s

    def _ended(self, operation: int, segment: int, future: Future[float | None]) -> None:
        """Whatever a move raised ends it: one whose end is never reported would hold its transfer for ever."""
        if future.cancelled():
            return  # the mover is being closed
        problem = future.exception()
        if problem is not None:
            moved = Moved(operation, 0.0, f"segment {segment}: {type(problem).__name__}: {problem}", True)
        else:
            busy_s = future.result()
            moved = Moved(operation, busy_s or 0.0, None, busy_s is not None)
        self._moved.append(moved)
        os.eventfd_write(self._event_fd, 1)
