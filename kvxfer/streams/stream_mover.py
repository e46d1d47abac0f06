"""The agent's end of a ring: gives orders to the stream that moves rows and hears of their ends.

Orders go to entries that the stream's owner has enqueued, in the order of their numbers and at the last moment: which
segment an entry moves is open until then. The owner enqueues as many entries as it is asked to; more than turn out to
be needed are skipped at once, so that its stream is not left waiting.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvxfer.errors import LayoutError
from kvxfer.operations import Move, Moved, MoveReports, SegmentSource, failed
from kvxfer.streams.ring import MemoryIndex, OrderCode, Ring
from kvxfer.streams.spans import Order, PoolSide, SlotSide, segment_orders

_FIRST_NAP_S: Final = 50e-6
_MAX_NAP_S: Final = 1e-3
_MAX_LAZY_NAP_S: Final = 25e-3
_LOOKS_PER_NAP: Final = 20  # without news, before naps get longer
_MAX_DOUBLINGS: Final = 10  # of naps, however long there is no news

_Look = Callable[[], object]


@dataclass(slots=True, eq=False)
class _Operation:
    """A move between submit and end."""

    move: Move
    orders: deque[Order]  # that no entry has yet
    look_after: _Look | None
    num_running: int = 0  # orders that entries have
    began_s: float = 0.0
    is_cancelled: bool = False


@dataclass(slots=True)
class _Running:
    """An entry with an order. Its lane is in use until the entry is done."""

    number: int
    lane: int
    operation: _Operation


class StreamMover:
    """A `RowExecutor` for one worker's ring, with a thread that looks at its words while something is open.

    All but `close()` is called from the agent's loop. `ring` stays the caller's and must outlive `close()`.
    """

    has_timeline = True

    def __init__(
        self, ring: Ring, mover: MoveReports, *, pool_bytes: int, slot_bytes: int, want_entries: Callable[[int], None]
    ) -> None:
        """`want_entries(total)` asks the stream's owner, from within `expect`, for `total` entries since the ring was
        made."""
        self._ring = ring
        self._mover = mover
        self._pool_bytes = pool_bytes
        self._slot_bytes = slot_bytes
        self._want_entries = want_entries
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[_Operation] = deque()  # with orders that no entry has yet, the first one first
        self._running: deque[_Running] = deque()  # in the order of their numbers
        self._free_lanes = list(range(ring.num_lanes))
        self._next_number = 0  # of the entry that gets an order next
        self._num_checked = 0  # orders of operations whose slot is looked at first
        self._num_expected = 0
        self._num_wanted = 0
        self._ready = 0
        self._error: str | None = None
        self._is_held = False
        self._is_closed = False
        self._may_still_move = False
        self._thread = threading.Thread(target=self._watch, name="kvxfer-stream-mover", daemon=True)
        self._thread.start()

    @property
    def timeline(self) -> int:
        """`RowExecutor.timeline`."""
        return self._ring.timeline

    @property
    def may_still_move(self) -> bool:
        """`RowExecutor.may_still_move`."""
        return self._may_still_move

    def hold(self, is_held: bool) -> None:
        """`RowExecutor.hold`."""
        with self._changed:
            self._is_held = is_held
            self._look()
            self._changed.notify()

    # ---- moves ----

    def gather(self, move: Move, slot: int, look: _Look | None) -> None:
        """`RowExecutor.gather`."""
        self._submit(move, self._pool_side(move.source), self._slot_side(slot), look_after=look)

    def scatter(self, move: Move, slot: int, look: _Look | None) -> None:
        """`RowExecutor.scatter`."""
        self._submit(move, self._slot_side(slot), self._pool_side(move.source), look_before=look)

    def pull(self, move: Move, src: PoolSide, look: _Look | None) -> None:
        """Copy a segment straight out of a peer's pool, which the stream's owner has mapped, then call `look` in a
        thread: what it raises makes the rows worthless."""
        self._submit(move, src, self._pool_side(move.source), look_after=look)

    def _pool_side(self, source: SegmentSource) -> PoolSide:
        return PoolSide(MemoryIndex.POOL, self._pool_bytes, source.addresses)

    def _slot_side(self, slot: int) -> SlotSide:
        return SlotSide(MemoryIndex.SLOTS, self._slot_bytes, slot * self._slot_bytes)

    def _submit(
        self,
        move: Move,
        src: PoolSide | SlotSide,
        dst: PoolSide | SlotSide,
        *,
        look_before: _Look | None = None,
        look_after: _Look | None = None,
    ) -> None:
        try:
            orders = segment_orders(move.source.plan, move.segment, src, dst, self._ring.max_offsets)
        except LayoutError as error:
            self._mover.report(failed(move.operation, move.segment, error))
            return
        operation = _Operation(move, deque(orders), look_after)
        if look_before is None:
            self._add(operation)
            return
        with self._changed:
            self._num_checked += len(orders)
        self._mover.call(look_before).add_done_callback(partial(self._checked, operation))

    def _checked(self, operation: _Operation, future: Future[object]) -> None:
        """The slot of a scatter was looked at."""
        if future.cancelled():
            return  # the agent's threads are being closed
        problem = future.exception()
        with self._changed:
            self._num_checked -= len(operation.orders)
            if problem is None:
                self._add(operation)
            else:
                self._mover.report(failed(operation.move.operation, operation.move.segment, problem))
                self._changed.notify()

    def _add(self, operation: _Operation) -> None:
        with self._changed:
            if self._error is not None:
                self._mover.report(Moved(operation.move.operation, 0.0, self._error, was_begun=True))
                return
            self._waiting.append(operation)
            self._look()
            self._changed.notify()

    def expect(self, num_moves: int, ready: int) -> None:
        """`RowExecutor.expect`."""
        with self._changed:
            has_changed = (num_moves, ready) != (self._num_expected, self._ready)
            self._num_expected, self._ready = num_moves, ready
            num_needed = self._num_needed()
            is_short = num_needed > self._num_wanted and self._error is None
            if is_short:
                self._num_wanted = num_needed
            if has_changed:
                self._changed.notify()
        if is_short:
            self._want_entries(num_needed)

    # ---- ends ----

    def stop(self, error: str) -> None:
        """`RowExecutor.stop`. A stream that still runs is left nothing to wait for."""
        with self._changed:
            self._end_done()  # an owner that left in good order has ended them all
            self._may_still_move = bool(self._running)
            self._error = error
            self._num_expected = self._ready = 0
            operations = list(dict.fromkeys([*(each.operation for each in self._running), *self._waiting]))
            self._waiting.clear()
            self._skip_all()
            self._running.clear()
            for operation in operations:
                self._mover.report(Moved(operation.move.operation, 0.0, error, was_begun=True))

    def close(self) -> None:
        """Skip whatever is enqueued, so that no stream is left waiting, and end the thread. Nothing is reported any
        more. Calling it again does nothing."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._skip_all()
            self._running.clear()
            self._changed.notify()
        self._thread.join()

    def _skip_all(self) -> None:
        for running in self._running:
            self._ring.order(running.number, OrderCode.SKIP)
        while self._next_number < self._num_enqueued():
            self._skip_next()

    # ---- the thread, and what it does with the lock held ----

    def _watch(self) -> None:
        num_idle = 0
        with self._changed:
            while not self._is_closed:
                num_idle = 0 if self._look() else num_idle + 1
                if not self._is_open():
                    num_idle = 0
                    self._changed.wait()
                elif self._changed.wait(_nap_s(num_idle, is_urgent=self._is_urgent())):
                    num_idle = 0

    def _is_open(self) -> bool:
        """Whether a word may change that somebody waits for."""
        if self._error is not None:
            return False
        return self._is_urgent() or self._num_wanted > self._num_needed()

    def _is_urgent(self) -> bool:
        """Whether a transfer waits for a word."""
        return bool(self._running or self._waiting or self._ready)

    def _look(self) -> bool:
        """Do what has become possible; whether anything was."""
        has_ended = self._end_done()
        has_cancelled = self._cancel()
        has_given = self._give()
        if self._ready and self._ring.timeline >= self._ready:
            self._ready = 0
            self._mover.report(None)
        return has_ended or has_cancelled or has_given

    def _end_done(self) -> bool:
        num_before = len(self._running)
        while self._running and self._ring.is_done(self._running[0].number):
            running = self._running.popleft()
            self._free_lanes.append(running.lane)
            running.operation.num_running -= 1
            self._end_if_over(running.operation)
        return len(self._running) < num_before

    def _cancel(self) -> bool:
        """Orders whose flag is set: those that no entry has are dropped, the others skipped if they have not begun."""
        operations = dict.fromkeys([*self._waiting, *(running.operation for running in self._running)])
        cancelled = [each for each in operations if each.move.cancel.is_set and not each.is_cancelled]
        for operation in cancelled:
            operation.is_cancelled = True
            operation.orders.clear()
            if operation in self._waiting:
                self._waiting.remove(operation)
            for running in self._running:
                if running.operation is operation:
                    self._ring.order(running.number, OrderCode.SKIP)
            self._end_if_over(operation)
        return bool(cancelled)

    def _give(self) -> bool:
        """Give orders to entries that have none, and skip those that nothing will follow for."""
        first_number, num_enqueued = self._next_number, self._num_enqueued()
        while self._waiting and self._free_lanes and self._next_number < num_enqueued and not self._is_held:
            operation = self._waiting[0]
            order = operation.orders.popleft()
            if not operation.orders:
                self._waiting.popleft()
            operation.began_s = operation.began_s or time.perf_counter()
            lane = self._free_lanes.pop()
            self._ring.fill_lane_words(lane, order.span_words, order.offsets)
            self._ring.order(self._next_number, OrderCode.RUN, lane)
            self._running.append(_Running(self._next_number, lane, operation))
            operation.num_running += 1
            self._next_number += 1
        while self._next_number < num_enqueued and self._num_wanted > self._num_needed():
            self._skip_next()
        return self._next_number > first_number

    def _skip_next(self) -> None:
        self._ring.order(self._next_number, OrderCode.SKIP)
        self._next_number += 1

    def _num_needed(self) -> int:
        """Entries, since the ring was made, for what was given, waits and is expected."""
        num_waiting = sum(len(operation.orders) for operation in self._waiting)
        return self._next_number + num_waiting + self._num_checked + self._num_expected

    def _num_enqueued(self) -> int:
        """More than were asked for would be the fault of the stream's owner, and must not lead the ring astray."""
        return min(self._ring.num_enqueued, self._num_wanted)

    def _end_if_over(self, operation: _Operation) -> None:
        if operation.num_running or operation.orders:
            return
        number = operation.move.operation
        if self._ring.has_ended:
            # Its owner may have skipped it before the order was there.
            self._mover.report(Moved(number, 0.0, "the worker's stream has ended", was_begun=True))
            return
        if operation.is_cancelled:
            self._mover.report(Moved(number, 0.0, None, was_begun=False))
            return
        busy_s = time.perf_counter() - operation.began_s
        if operation.look_after is None:
            self._mover.report(Moved(number, busy_s, None, was_begun=True))
            return
        self._mover.call(operation.look_after).add_done_callback(partial(self._looked, operation.move, busy_s))

    def _looked(self, move: Move, busy_s: float, future: Future[object]) -> None:
        """The rows of a gather or a pull were looked at."""
        if future.cancelled():
            return  # the agent's threads are being closed
        problem = future.exception()
        if problem is not None:
            self._mover.report(failed(move.operation, move.segment, problem))
        else:
            self._mover.report(Moved(move.operation, busy_s, None, was_begun=True, result=future.result()))


def _nap_s(num_idle: int, *, is_urgent: bool) -> float:
    """How long to sleep after so many looks without news. Not urgent are entries that a worker was asked for in vain
    and has not enqueued yet: it may be silent for hours, and only its stream would wait for them."""
    nap_s: float = _FIRST_NAP_S * 2 ** min(num_idle // _LOOKS_PER_NAP, _MAX_DOUBLINGS)
    return min(nap_s, _MAX_NAP_S if is_urgent else _MAX_LAZY_NAP_S)
