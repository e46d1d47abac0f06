"""A move that a stream carries out: its orders, what has become of them, and the sum that they have found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.errors import IntegrityError, KvxferError
from kvxfer.operations import Move, Moved, failed
from kvxfer.row_sums import MODULUS
from kvxfer.streams.ring import Ring, SumKind, SumOrder
from kvxfer.streams.spans import Order

Look = Callable[[], object]


@dataclass(slots=True, eq=False)
class Operation:
    """A move between submit and end."""

    move: Move
    orders: list[Order]  # that no entry has yet, the next one last
    added: tuple[int, int]  # to the spans of each: a column, and what is added there
    summed: SumOrder
    look_after: Look | None
    peer: int | None = None  # the index of the memory that it pulls from
    slot: int | None = None  # that its entries must be bound to
    look_at_end: Look | None = None  # what it raises when all entries are done makes their rows worthless
    num_running: int = 0  # orders that entries have
    began_s: float = 0.0
    is_cancelled: bool = False
    num_given: int = 0  # orders that entries have got so far
    total: int = 0  # of what its entries have moved
    wrong_total: int | None = None  # what one of them has found in a segment that was to be checked

    def take_sum(self, ring: Ring, number: int) -> None:
        """Entry `number`, one of its own, is done."""
        if self.summed.kind is SumKind.NONE:
            return
        found = ring.sum_of(number)
        # One that goes on in a slot moves what is there as well.
        self.total = (self.total * (self.slot is None) + found) % MODULUS
        if self.summed.kind is SumKind.CHECKED and found != self.summed.expected:
            self.wrong_total = found

    def done(self, busy_s: float) -> Moved:
        """Its end when all its entries are done, by the sum where one was asked for."""
        move, result = self.move, None
        if self.look_at_end is not None:
            try:
                self.look_at_end()
            except KvxferError as problem:
                return failed(move.operation, move.segment, problem)
        if move.row_sum is not None:
            total = self.total
            if self.summed.kind is SumKind.CHECKED:
                # Each of several orders has looked at the whole segment.
                total = self.summed.expected if self.wrong_total is None else self.wrong_total
            try:
                result = move.row_sum.judge(total)
            except IntegrityError as problem:
                return failed(move.operation, move.segment, problem)
        return Moved(move.operation, busy_s, None, was_begun=True, result=result)
