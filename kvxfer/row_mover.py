"""Threads of an agent that move rows between its worker's host pool and its slots, and where all ends are reported."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvxfer.operations import CancelFlag, Move, Moved, PeerRows, SegmentSource, failed
from kvxfer.rows_copy import copy_part
from kvxfer.rows_host import ByteArray, gather_segment, scatter_segment


class RowMover:
    """Runs moves in `num_threads` threads; segments run beside each other, numpy releases the GIL for the bytes."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._moved: deque[Moved] = deque()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # guards the next
        self._is_told = False  # the event is set, or is just about to be

    def call(self, work: Callable[[], object]) -> Future[object]:
        """Call `work` as soon as a thread is free. Nothing is reported: that is left to the caller."""
        return self._pool.submit(work)

    def report(self, moved: Moved | None) -> None:
        """Hand out `moved` by `poll()`; None only wakes who waits for that. From any thread."""
        if moved is not None:
            self._moved.append(moved)
        with self._lock:
            must_tell = not self._is_told
            self._is_told = True
        if must_tell:
            os.eventfd_write(self._event_fd, 1)

    def submit(self, operation: int, segment: int, cancel: CancelFlag, move: Callable[[], object]) -> None:
        """Call `move` as soon as a thread is free, unless `cancel` is set by then; its one `Moved` comes out of
        `poll()`. What `move` raises becomes the error of that."""
        future = self._pool.submit(_run, cancel, move)
        future.add_done_callback(partial(self._ended, operation, segment))

    def submit_all(self, operation: int, cancel: CancelFlag, moves: list[Callable[[], object]]) -> None:
        """As `submit`, for `moves` that together are one operation: its `Moved` comes when the last of them has ended.
        There is at least one."""
        parts = _Parts(operation, len(moves))
        for move in moves:
            self._pool.submit(_run, cancel, move).add_done_callback(partial(self._part_ended, parts))

    def poll(self) -> list[Moved]:
        """Moves that have ended since the last call."""
        if not self._is_told:
            return []
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            return []  # who has reported is just about to set it
        with self._lock:
            self._is_told = False  # before the moves are taken: one that comes in between sets the event once more
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
            self.report(failed(operation, segment, problem))
            return
        ran = future.result()
        self.report(Moved(operation, 0.0, None, False) if ran is None else Moved(operation, ran[0], None, True, ran[1]))

    def _part_ended(self, parts: _Parts, future: Future[tuple[float, object] | None]) -> None:
        if future.cancelled():
            return  # the mover is being closed
        with self._lock:
            is_last = parts.end(future)
        if is_last:
            self.report(parts.moved())


class _Parts:
    """An operation that several threads perform."""

    def __init__(self, operation: int, num_parts: int) -> None:
        self._operation = operation
        self._num_open = num_parts
        self._problem: BaseException | None = None
        self._busy_s = 0.0
        self._was_begun = False

    def end(self, future: Future[tuple[float, object] | None]) -> bool:
        """A part has ended; whether it was the last."""
        self._num_open -= 1
        self._problem = self._problem or future.exception()
        ran = None if future.exception() is not None else future.result()
        if ran is not None:
            self._was_begun = True
            self._busy_s += ran[0]
        return self._num_open == 0

    def moved(self) -> Moved:
        """What has become of all."""
        if self._problem is not None:
            return failed(self._operation, 0, self._problem)
        return Moved(self._operation, self._busy_s, None, self._was_begun)


class HostExecutor:
    """Moves rows of a pool that is mapped here, by the threads of a `RowMover`. Owns nothing."""

    has_timeline = False
    timeline = 0
    fills_in_turn = False
    sums_gathers = checks_scatters = False  # `look` is called by the thread that moves the rows
    may_still_move = may_have_spoilt = False

    def __init__(self, mover: RowMover, pool: ByteArray, slot_view: Callable[[int], ByteArray]) -> None:
        """`pool` is `[pool_bytes]` uint8; `slot_view(slot)` gives `[slot_bytes]` uint8 of a slot as it is now."""
        self._mover = mover
        self._pool = pool
        self._slot_view = slot_view
        self.peers: dict[int, ByteArray] = {}
        """`[num_bytes]` uint8 of each peer's pool that is mapped here, by index."""

    def gather(self, move: Move, slot: int, look: Callable[[], object] | None) -> None:
        """`RowExecutor.gather`."""
        work = partial(_gather, self._pool, move.source, move.segment, self._slot_view(slot), look)
        self._mover.submit(move.operation, move.segment, move.cancel, work)

    def scatter(self, move: Move, slot: int, look: Callable[[], object] | None) -> None:
        """`RowExecutor.scatter`."""
        work = partial(_scatter, self._pool, move.source, move.segment, self._slot_view(slot), look)
        self._mover.submit(move.operation, move.segment, move.cancel, work)

    def prepare_pull(self, source: SegmentSource, src: PeerRows) -> None:
        """Threads need no orders."""

    def pull(self, move: Move, src: PeerRows, look: Callable[[], object]) -> None:
        """`RowExecutor.pull`, in as many parts as the chunk has segments."""
        src_pool, num_parts = self.peers[src.index], move.source.plan.num_segments
        pull_part = partial(_pull, src_pool, src, self._pool, move.source, num_parts, look)
        self._mover.submit_all(move.operation, move.cancel, [partial(pull_part, idx) for idx in range(num_parts)])

    def hold(self, is_held: bool) -> None:
        """Each move asks where its slot lies: nothing is held."""

    def look(self) -> list[Moved]:
        """All ends are reported by the `RowMover`."""
        return []

    def expect(self, num_moves: int, ready: int) -> None:
        """Threads need not be told."""

    def stop(self, error: str) -> None:
        """The mapping outlives the worker: what is under way may end."""

    def close(self) -> None:
        """Let go of the pool."""
        self._pool = self._pool[:0]


def _gather(
    pool: ByteArray, source: SegmentSource, segment: int, slot: ByteArray, look: Callable[[], object] | None
) -> object:
    gather_segment(pool, source.plan, source.addresses, segment, slot)
    return None if look is None else look()


def _scatter(
    pool: ByteArray, source: SegmentSource, segment: int, slot: ByteArray, look: Callable[[], object] | None
) -> object:
    result = None if look is None else look()
    scatter_segment(pool, source.plan, source.addresses, segment, slot)
    return result


def _pull(
    src_pool: ByteArray,
    src: PeerRows,
    pool: ByteArray,
    dst: SegmentSource,
    num_parts: int,
    look: Callable[[], object],
    part_idx: int,
) -> None:
    copy_part(src_pool, src.addresses, pool, dst.addresses, dst.plan, part_idx, num_parts)
    look()


def _run(cancel: CancelFlag, move: Callable[[], object]) -> tuple[float, object] | None:
    """Seconds that the move took, and what it returned; None where it was cancelled in time."""
    if cancel.is_set:
        return None
    began_s = time.perf_counter()
    result = move()
    return time.perf_counter() - began_s, result
