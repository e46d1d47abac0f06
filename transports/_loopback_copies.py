"""The thread that moves the bytes of loopback writes."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvxfer.transports._regions import CheckedWrite

# Copies shorter than this keep the interpreter's lock: handing it over costs more than the copy.
_HELD_COPY_BYTES = 1 << 16
_held_memmove = ctypes.PyDLL(None).memmove
_held_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_held_memmove.restype = None


@dataclass(frozen=True, slots=True)
class _Job:
    entries: CheckedWrite
    is_wanted: Callable[[], bool]
    on_end: Callable[[bool, float], None]


class CopyThread:
    """One thread, which copies one job after another, in the order in which they came."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._moving = threading.Lock()  # held while bytes move: whoever holds it can end writes for good
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, entries: CheckedWrite, is_wanted: Callable[[], bool], on_end: Callable[[bool, float], None]
    ) -> None:
        """Move `entries`, unless `is_wanted` says no when they are next; then call `on_end(has_moved, busy_s)`.

        Both are called by the thread, never while `paused()`.
        """
        self._jobs.put(_Job(entries, is_wanted, on_end))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, no bytes move. A job that is not wanted any more afterwards moves none either."""
        with self._moving:
            yield

    def close(self) -> None:
        """End the thread; jobs that have not begun are looked at first."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._moving:
                _move(job)


def _move(job: _Job) -> None:
    started_s = time.perf_counter()
    is_wanted = job.is_wanted()
    if is_wanted:
        for src, dst, length in job.entries.rows():
            (_held_memmove if length < _HELD_COPY_BYTES else ctypes.memmove)(dst, src, length)
    job.on_end(is_wanted, time.perf_counter() - started_s)
