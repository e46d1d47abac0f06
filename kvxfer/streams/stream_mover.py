"""The agent's end of a ring: gives orders to the stream that moves rows and hears of their ends.

Orders go to entries that the stream's owner has enqueued, in the order of their numbers and at the last moment: which
segment an entry moves is open until then. The owner enqueues as many entries as it is asked to; more than turn out to
be needed are skipped at once, so that its stream is not left waiting. Entries that are bound to slots
(`streams.slot_binding`) get orders for these alone.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvxfer.errors import LayoutError
from kvxfer.operations import Move, Moved, MoveReports, PeerRows, SegmentSource, failed
from kvxfer.row_sums import BLOCK_BYTES
from kvxfer.streams.entries import Entries
from kvxfer.streams.order_book import OrderBook
from kvxfer.streams.ring import Ring
from kvxfer.streams.ring_watch import Awaited, RingWatch
from kvxfer.streams.stream_operation import Look, Operation


class StreamMover:
    """A `RowExecutor` for one worker's ring. All of it is called from the agent's loop; `RingWatch` wakes that.

    `ring` stays the caller's and must outlive `close()`.
    """

    has_timeline = True

    def __init__(
        self, ring: Ring, mover: MoveReports, *, pool_bytes: int, slot_bytes: int, want_entries: Callable[[int], None]
    ) -> None:
        """`want_entries(total)` asks the stream's owner, from within `expect`, for `total` entries since the ring was
        made."""
        self._ring = ring
        self._mover = mover
        self._slot_bytes = slot_bytes
        self._want_entries = want_entries
        self._orders = OrderBook(pool_bytes, slot_bytes, ring)
        self._waiting: deque[Operation] = deque()  # with orders that no entry has yet, the first one first
        self._entries = Entries(ring)
        self._ended: list[Moved] = []  # and handed out by the next `look`
        self._checked: deque[tuple[Operation, BaseException | None]] = deque()  # whose slot was looked at, by threads
        self._num_waiting = 0  # orders of what waits
        self._num_checked = 0  # orders of operations whose slot is looked at first
        self._num_expected = 0
        self._num_wanted = 0
        self._ready = 0
        self._error: str | None = None
        self._is_held = False
        self._must_rest = False
        self._may_still_move = False
        self._watch = RingWatch(ring, lambda: mover.report(None))

    @property
    def timeline(self) -> int:
        """`RowExecutor.timeline`."""
        return self._ring.timeline

    @property
    def fills_in_turn(self) -> bool:
        """`RowExecutor.fills_in_turn`."""
        return self._entries.bound is not None

    @property
    def sums_gathers(self) -> bool:
        """`RowExecutor.sums_gathers`. Slots begin where blocks of a sum may."""
        return self._slot_bytes % BLOCK_BYTES == 0

    @property
    def checks_scatters(self) -> bool:
        """`RowExecutor.checks_scatters`."""
        return self.sums_gathers and self._ring.staging_bytes >= self._slot_bytes

    @property
    def may_still_move(self) -> bool:
        """`RowExecutor.may_still_move`."""
        return self._may_still_move

    @property
    def may_have_spoilt(self) -> bool:
        """`RowExecutor.may_have_spoilt`. An owner that ends skips what it has enqueued, and entries that are bound
        write their slots all the same."""
        return self._entries.bound is not None and self._ring.has_ended

    def hold(self, is_held: bool) -> None:
        """`RowExecutor.hold`. Entries that were enqueued until then may be bound to slots that have moved away."""
        was_held, self._is_held = self._is_held, is_held
        if was_held and not is_held and self._entries.bound is not None:
            self._entries.skip_all(self._num_wanted)
            self._ask()
        self._advance()

    # ---- moves ----

    def gather(self, move: Move, slot: int, look: Look | None) -> None:
        """`RowExecutor.gather`."""
        try:
            operation = self._orders.gather(move, slot, look, is_bound=self._entries.bound is not None)
        except LayoutError as error:
            self._mover.report(failed(move.operation, move.segment, error))
            return
        self._add(operation)

    def scatter(self, move: Move, slot: int, look: Look | None) -> None:
        """`RowExecutor.scatter`. A stream that checks the segment takes the place of `look`."""
        try:
            operation = self._orders.scatter(move, slot)
        except LayoutError as error:
            self._mover.report(failed(move.operation, move.segment, error))
            return
        if look is None or move.row_sum is not None:
            self._add(operation)
            return
        self._num_checked += len(operation.orders)
        self._mover.call(look).add_done_callback(partial(self._slot_checked, operation))

    def prepare_pull(self, source: SegmentSource, src: PeerRows) -> None:
        """`RowExecutor.prepare_pull`. What is wrong with it is for the pull to say."""
        with contextlib.suppress(LayoutError):
            self._orders.pull_orders(source, src)

    def pull(self, move: Move, src: PeerRows, look: Look) -> None:
        """`RowExecutor.pull`."""
        try:
            operation = self._orders.pull(move, src, look)
        except LayoutError as error:
            self._mover.report(failed(move.operation, move.segment, error))
            return
        self._add(operation)

    def uses_peer(self, index: int) -> bool:
        """Whether an order that was given, or is to be given, names the memory of that index."""
        return any(operation.peer == index for operation in self._operations())

    def _operations(self) -> list[Operation]:
        """All with orders that entries have, and then all with others; some twice."""
        return [*self._entries.operations(), *self._waiting]

    def let_rest(self, must_rest: bool) -> None:
        """Leave no entry waiting for what may come: the stream is to come to rest, so that its owner can unmap
        something. Until this is said otherwise; what is given goes on."""
        self._must_rest = must_rest
        self._advance()

    def _slot_checked(self, operation: Operation, future: Future[object]) -> None:
        """The slot of a scatter was looked at. Called by the thread that did."""
        if future.cancelled():
            return  # the agent's threads are being closed
        self._checked.append((operation, future.exception()))
        self._mover.report(None)

    def _add(self, operation: Operation) -> None:
        """Its orders go to entries with the next `expect`."""
        if self._error is not None:
            self._mover.report(Moved(operation.move.operation, 0.0, self._error, was_begun=True))
            return
        self._waiting.append(operation)
        self._num_waiting += len(operation.orders)

    def expect(self, num_moves: int, ready: int) -> None:
        """`RowExecutor.expect`."""
        self._num_expected, self._ready = num_moves, ready
        self._ask()
        self._advance()
        if self._ended:
            self._mover.report(None)

    def _ask(self) -> None:
        num_needed = self._num_needed()
        if num_needed > self._num_wanted and self._error is None:
            self._num_wanted = num_needed
            self._want_entries(num_needed)

    def look(self) -> list[Moved]:
        """`RowExecutor.look`."""
        self._watch.rest()
        if self._checked:
            self._take_checked()
        self._end_done()
        ended, self._ended = self._ended, []
        return ended

    # ---- ends ----

    def stop(self, error: str) -> None:
        """`RowExecutor.stop`. A stream that still runs is left nothing to wait for."""
        self._end_done()  # an owner that left in good order has ended them all
        self._may_still_move = self._entries.may_still_move(self._num_wanted)
        self._error = error
        self._num_expected = self._ready = 0
        operations = list(dict.fromkeys(self._operations()))
        self._skip_all()
        self._watch.rest()
        self._ended += [Moved(each.move.operation, 0.0, error, was_begun=True) for each in operations]
        self._mover.report(None)

    def close(self) -> None:
        """Skip whatever is enqueued, so that no stream is left waiting, and end the thread. Nothing is reported any
        more. Calling it again does nothing."""
        self._skip_all()
        self._watch.close()

    def _skip_all(self) -> None:
        self._waiting.clear()
        self._num_waiting = 0
        self._entries.drop_all()
        self._entries.skip_all(self._num_wanted)

    # ---- a turn of the loop ----

    def _advance(self) -> None:
        """Drop what is cancelled, give the orders for which there are entries, and let the loop be woken for what comes
        next."""
        if self._error is not None:
            return
        self._cancel()
        self._give()
        entries, ready = self._entries, self._ready
        is_short = bool(self._waiting and entries.has_lane and not self._is_held)
        wants_entries = is_short or self._has_surplus()
        if not (entries.is_any_running or wants_entries or ready):
            self._watch.rest()
            return
        self._watch.wait_for(
            Awaited(
                entries.first_running,
                entries.next_number + 1 if wants_entries else None,
                ready or None,
                bool(entries.is_any_running or self._waiting or ready),
            )
        )

    def _take_checked(self) -> None:
        """Scatters whose slots were looked at meanwhile."""
        while self._checked:
            operation, problem = self._checked.popleft()
            self._num_checked -= len(operation.orders)
            if problem is None:
                self._add(operation)
            else:
                self._ended.append(failed(operation.move.operation, operation.move.segment, problem))

    def _end_done(self) -> None:
        over = [each for each in self._entries.take_done() if not each.num_running and not each.orders]
        if over:
            self._end(over)

    def _cancel(self) -> None:
        """Orders whose flag is set: those that no entry has are dropped, the others skipped if they have not begun."""
        for operation in [each for each in self._operations() if each.move.cancel.is_set and not each.is_cancelled]:
            if operation.is_cancelled:  # it has several entries
                continue
            operation.is_cancelled = True
            if operation.orders:
                self._waiting.remove(operation)
                self._num_waiting -= len(operation.orders)
                operation.orders.clear()
            self._entries.cancel(operation)
            if not operation.num_running:
                self._end([operation])

    def _give(self) -> None:
        """Give orders to entries that have none, and skip those that nothing will follow for."""
        entries, end, has_passed = self._entries, self._entries.num_enqueued(self._num_wanted), False
        while self._waiting and entries.has_lane and entries.next_number < end and not self._is_held:
            operation = self._waiting[0]
            if not entries.suits_next(operation):
                entries.pass_over()
                has_passed = True
                continue
            entries.run_next(operation)
            self._num_waiting -= 1
            if not operation.orders:
                self._waiting.popleft()
        can_pass = entries.bound is None or not self._is_held  # slots that are about to move are not kept
        while can_pass and entries.next_number < end and self._has_surplus():
            if entries.bound is not None and not entries.has_lane:
                break
            entries.pass_over()
        if has_passed:
            self._ask()  # for others in their place

    def _has_surplus(self) -> bool:
        """Whether an entry for which there is no order now is to be skipped."""
        return self._must_rest or self._num_wanted > self._num_needed()

    def _num_needed(self) -> int:
        """Entries, since the ring was made, for what was given, waits and is expected."""
        return self._entries.next_number + self._num_waiting + self._num_checked + self._num_expected

    def _end(self, operations: list[Operation]) -> None:
        """They have no order any more that was not given or has not ended."""
        end, now_s = self._ring.end, time.perf_counter()
        for operation in operations:
            move = operation.move
            if end is not None:
                # Its owner may have skipped it before the order was there.
                self._ended.append(Moved(move.operation, 0.0, end, was_begun=True))
            elif operation.is_cancelled:
                self._ended.append(Moved(move.operation, 0.0, None, was_begun=False))
            elif operation.look_after is None:
                self._ended.append(operation.done(now_s - operation.began_s))
            else:
                looked = partial(self._looked, move, now_s - operation.began_s)
                self._mover.call(operation.look_after).add_done_callback(looked)

    def _looked(self, move: Move, busy_s: float, future: Future[object]) -> None:
        """The rows of a gather were looked at."""
        if future.cancelled():
            return  # the agent's threads are being closed
        problem = future.exception()
        if problem is not None:
            self._mover.report(failed(move.operation, move.segment, problem))
        else:
            self._mover.report(Moved(move.operation, busy_s, None, was_begun=True, result=future.result()))
