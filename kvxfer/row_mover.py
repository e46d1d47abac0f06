"""Threads of an agent that move rows between its worker's host pool and its slots."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvxfer.errors import IntegrityError
from kvxfer.operations import CancelFlag


@dataclass(frozen=True, slots=True)
class Moved:
    """A move has ended. `was_begun` is False where its cancel flag was set in time."""

    operation: int
    busy_s: float
    error: str | None
    was_begun: bool
    result: object = None  # what the move returned
    is_corrupt: bool = False  # the bytes to be moved were not those announced


class RowMover:
    """Runs moves in `num_threads` threads; segments run beside each other, numpy releases the GIL for the bytes."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._moved: deque[Moved] = deque()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def submit(self, operation: int, segment: int, cancel: CancelFlag, move: Callable[[], object]) -> None:
        """Call `move` as soon as a thread is free, unless `cancel` is set by then; its one `Moved` comes out of
        `poll()`. What `move` raises becomes the error of that."""
        future = self._pool.submit(_run, cancel, move)
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

    def _ended(self, operation: int, segment: int, future: Future[tuple[float, object] | None]) -> None:
        """Whatever a move raised ends it: one whose end is never reported would hold its transfer for ever."""
        if future.cancelled():
            return  # the mover is being closed
        problem = future.exception()
        if problem is not None:
            error = f"segment {segment}: {type(problem).__name__}: {problem}"
            moved = Moved(operation, 0.0, error, True, is_corrupt=isinstance(problem, IntegrityError))
        else:
            ran = future.result()
            moved = Moved(operation, 0.0, None, False) if ran is None else Moved(operation, ran[0], None, True, ran[1])
        self._moved.append(moved)
        os.eventfd_write(self._event_fd, 1)


def _run(cancel: CancelFlag, move: Callable[[], object]) -> tuple[float, object] | None:
    """Seconds that the move took, and what it returned; None where it was cancelled in time."""
    if cancel.is_set:
        return None
    began_s = time.perf_counter()
    result = move()
    return time.perf_counter() - began_s, result
