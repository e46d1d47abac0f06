"""Threads that move the bytes of loopback writes."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvxfer.transports._regions import Entries

_PART_BYTES = 1 << 20
"""Entries are cut into parts of at least this size: what moves in less than 0.1 ms is not worth another thread."""
# Copies shorter than this keep the interpreter's lock: handing it over costs more than the copy.
_HELD_COPY_BYTES = 1 << 16
_held_memmove = ctypes.PyDLL(None).memmove
_held_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_held_memmove.restype = None

_Part = list[tuple[int, int, int]]  # (source, target, length in bytes) of each copy


@dataclass(slots=True)
class _Job:
    is_wanted: Callable[[], bool]
    on_end: Callable[[bool, float], None]
    num_parts_left: int
    all_moved: bool = True
    busy_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class CopyThreads:
    """`num_threads` threads; large entries are cut up among them. Jobs begin in the order in which they came."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._parts: queue.SimpleQueue[tuple[_Job, _Part] | None] = queue.SimpleQueue()
        # Each is held while its thread moves bytes: whoever holds them all can end writes for good.
        self._moving = [threading.Lock() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(moving,), name=f"{name}-{idx}", daemon=True)
            for idx, moving in enumerate(self._moving)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, entries: Entries, is_wanted: Callable[[], bool], on_end: Callable[[bool, float], None]) -> None:
        """Move `entries`. `is_wanted` is asked before each part; `on_end(all_moved, busy_s)` follows the last one.

        Both are called by the threads, never while `paused()`.
        """
        parts = _cut(entries, len(self._threads))
        job = _Job(is_wanted, on_end, len(parts))
        for part in parts:
            self._parts.put((job, part))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, no bytes move. A job that is not wanted any more afterwards moves none either."""
        with contextlib.ExitStack() as stack:
            for moving in self._moving:
                stack.enter_context(moving)
            yield

    def close(self) -> None:
        """End the threads; jobs that have not begun are looked at first. Calling it again does nothing."""
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self, moving: threading.Lock) -> None:
        while (task := self._parts.get()) is not None:
            with moving:
                _move(*task)


def _move(job: _Job, part: _Part) -> None:
    started_s = time.perf_counter()
    is_wanted = job.all_moved and job.is_wanted()
    if is_wanted:
        for src, dst, length in part:
            (_held_memmove if length < _HELD_COPY_BYTES else ctypes.memmove)(dst, src, length)
    with job.lock:
        job.busy_s += time.perf_counter() - started_s
        job.all_moved &= is_wanted
        job.num_parts_left -= 1
        is_last = job.num_parts_left == 0
    if is_last:
        job.on_end(job.all_moved, job.busy_s)


def _cut(entries: Entries, num_threads: int) -> list[_Part]:
    """At least one part: all small entries are one, a large one is cut into up to `num_threads`."""
    small: _Part = []
    parts: list[_Part] = []
    for src, dst, length in zip(entries.src.tolist(), entries.dst.tolist(), entries.lengths.tolist(), strict=True):
        num_parts = min(num_threads, length // _PART_BYTES)
        if num_parts < 2:
            small.append((src, dst, length))
            continue
        piece_bytes = -(-length // num_parts)
        for first in range(0, length, piece_bytes):
            parts.append([(src + first, dst + first, min(piece_bytes, length - first))])
    return [*parts, small] if small or not parts else parts
