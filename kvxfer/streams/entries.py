"""The entries of a ring as its agent uses them up, in the order of their numbers: which have orders, and of whom."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvxfer.streams.lanes import Lanes
from kvxfer.streams.ring import NO_SUM, OrderCode, Ring
from kvxfer.streams.slot_binding import BoundSlots, bound_slots
from kvxfer.streams.spans import AS_THEY_ARE, NO_OFFSETS, Order
from kvxfer.streams.stream_operation import Operation


class _Running(NamedTuple):
    """An entry with an order. Its lane is in use until the entry is done. Without an operation it lets its slot keep
    what that holds."""

    number: int
    lane: int
    operation: Operation | None


class Entries:
    """Over one ring, which stays the caller's."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._running: deque[_Running] = deque()  # in the order of their numbers
        self._lanes = Lanes(ring)
        self._bound: BoundSlots | None = None
        self._knows_bound = False
        self.next_number = 0
        """Of the entry that gets an order next."""

    @property
    def bound(self) -> BoundSlots | None:
        """What entries are bound to. The owner says so before it enqueues the first, but after the ring was made."""
        if not self._knows_bound:
            self._bound = bound_slots(self._ring)
            self._knows_bound = self._bound is not None or self._ring.num_enqueued > 0
        return self._bound

    @property
    def has_lane(self) -> bool:
        """Whether a lane is free for one more order."""
        return bool(self._lanes)

    @property
    def is_any_running(self) -> bool:
        """Whether an entry has an order and is not known to be done."""
        return bool(self._running)

    @property
    def first_running(self) -> int | None:
        """The number of the first of those."""
        return self._running[0].number if self._running else None

    def operations(self) -> list[Operation]:
        """Those whose orders entries have; one with several entries comes several times."""
        return [each.operation for each in self._running if each.operation is not None]

    def num_enqueued(self, num_wanted: int) -> int:
        """Entries that are enqueued, since the ring was made. More than were asked for would be the fault of the
        stream's owner, and must not lead the ring astray."""
        return min(self._ring.num_enqueued, num_wanted)

    def may_still_move(self, num_wanted: int) -> bool:
        """Whether the stream may still write something after this, though its owner is gone: what it was given has not
        ended, or it comes to entries that are bound, whose slots it writes whatever they are told."""
        unordered = range(self.next_number, self.num_enqueued(num_wanted) if self.bound is not None else 0)
        return self.is_any_running or not all(map(self._ring.is_done, unordered))

    # ---- orders; there must be an entry for each ----

    def suits_next(self, operation: Operation) -> bool:
        """Whether the next entry may carry out an order of `operation`."""
        return self.bound is None or self.bound.slot_of(self.next_number) == operation.slot

    def run_next(self, operation: Operation) -> None:
        """Give the next entry, which suits, the next order of `operation`. A lane is free."""
        order, added = operation.orders.pop(), operation.added
        operation.began_s = operation.began_s or time.perf_counter()
        if operation.num_given and operation.slot is not None and self.bound is not None:
            order, added = self.bound.go_on(operation.slot, order), AS_THEY_ARE
        operation.num_running += 1
        operation.num_given += 1
        self._run(self._lanes.take(order, operation.summed, added), operation)

    def pass_over(self) -> None:
        """Skip the next entry; or, where it is bound, let its slot, which may be in use, keep what it holds. That takes
        a lane."""
        bound = self.bound
        if bound is None:
            self._skip_next()
            return
        keep = Order(bound.keep(bound.slot_of(self.next_number), bound.slot_bytes), NO_OFFSETS)
        self._run(self._lanes.take(keep, NO_SUM, AS_THEY_ARE), None)

    def _run(self, lane: int, operation: Operation | None) -> None:
        self._ring.order(self.next_number, OrderCode.RUN, lane)
        self._running.append(_Running(self.next_number, lane, operation))
        self.next_number += 1

    def _skip_next(self) -> None:
        self._ring.order(self.next_number, OrderCode.SKIP)
        self.next_number += 1

    # ---- ends ----

    def take_done(self) -> Iterator[Operation]:
        """The operation of each entry that is done by now, up to the first that is not."""
        running, ring = self._running, self._ring
        while running and ring.is_done(running[0].number):
            number, lane, operation = running.popleft()
            self._lanes.give_back(lane)
            if operation is not None:
                operation.num_running -= 1
                operation.take_sum(ring, number)
                yield operation

    def cancel(self, operation: Operation) -> None:
        """Skip what was ordered for `operation`, unless it has begun."""
        for each in self._running:
            if each.operation is operation:
                self._ring.order(each.number, OrderCode.SKIP)

    def drop_all(self) -> None:
        """Skip what has orders, unless it has begun, and wait for none of it."""
        while self._running:
            self._ring.order(self._running.popleft().number, OrderCode.SKIP)

    def skip_all(self, num_wanted: int) -> None:
        """Skip all that have no order. No slot that they are bound to is in use."""
        while self.next_number < self.num_enqueued(num_wanted):
            self._skip_next()
