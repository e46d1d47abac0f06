"""The place of an agent's one worker: its pool and whoever moves the pool's rows, until nothing touches it any more."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvxfer.control.handoff_listener import ReceivedPool
from kvxfer.errors import KvxferError
from kvxfer.layout import Placement, PoolLayout
from kvxfer.operations import Moved, RowExecutor
from kvxfer.row_sums import BLOCK_BYTES
from kvxfer.streams.own_mover import OwnStreamMover
from kvxfer.streams.ring import OFFSETS_WORD, Ring
from kvxfer.streams.slot_binding import offer_slots

MIN_LANES, MAX_LANES = 16, 64
"""Orders that a stream may have at once: one for each slot, within these bounds. A GPU on which processes take turns
does at a turn what it was given by then."""
_LANES_BYTES = 16 << 20


def make_ring(layout: PoolLayout, slot_bytes: int, num_slots: int, *, checks_segments: bool = False) -> Ring:
    """A ring for a pool that lies so. A lane has room for the rows of a whole slot, if all lanes together stay small;
    a segment with more rows takes several orders. Rows that are pulled have an offset on both sides, hence the factor
    of 2. With `checks_segments` the stream's owner has memory to check a segment as large as a slot, where slots begin
    at multiples of a block of sums. An owner that gathers may bind entries to the slots. Raises `OSError` where memory
    is short."""
    num_lanes = max(MIN_LANES, min(num_slots, MAX_LANES))
    row_bytes = [group.row_bytes for group in layout.groups if group.placement is not Placement.STATE]
    max_rows = slot_bytes // min(row_bytes, default=slot_bytes)
    max_offsets = max(1, min(2 * max_rows, _LANES_BYTES // num_lanes // 8 - OFFSETS_WORD))
    checked_bytes = slot_bytes if checks_segments and slot_bytes % BLOCK_BYTES == 0 else 0
    ring = Ring.create(num_lanes, max_offsets, checked_bytes)
    offer_slots(ring, num_slots, slot_bytes)
    return ring


class PoolSeat:
    """The pool that is attached, one that was lost and is still in use, and one that waits for that to end.

    Owns all three, and the executor of the first two.
    """

    def __init__(self, open_rows: Callable[[ReceivedPool], RowExecutor], log: logging.Logger) -> None:
        """`open_rows` makes the executor of a pool that takes the seat."""
        self.pool: ReceivedPool | None = None
        self.waiting: ReceivedPool | None = None
        self.unusable: tuple[str, str] | None = None
        """The last pool that was not taken because nothing can move its rows, and why."""
        self._lost: ReceivedPool | None = None
        self._rows: RowExecutor | None = None
        self._open_rows = open_rows
        self._log = log

    @property
    def is_empty(self) -> bool:
        """Whether no pool is attached, in use or waiting."""
        return self.pool is self.waiting is self._lost is None

    @property
    def is_leaving(self) -> bool:
        """Whether a lost pool is still in use."""
        return self._lost is not None

    @property
    def rows(self) -> RowExecutor:
        """What moves rows of the worker's pool, also of one that was lost and is still in use. There is one whenever
        a core asks for moves."""
        assert self._rows is not None
        return self._rows

    @property
    def own_rows(self) -> OwnStreamMover | None:
        """`rows`, where a stream of the agent's own moves them."""
        return self._rows if isinstance(self._rows, OwnStreamMover) else None

    @property
    def gpu_turn_s(self) -> float | None:
        """`OwnStream.turn_s`, where there is one. From any thread."""
        rows = self.own_rows
        return None if rows is None else rows.turn_s

    def look(self) -> list[Moved]:
        """`RowExecutor.look`, where there is one."""
        return [] if self._rows is None else self._rows.look()

    def take(self, received: ReceivedPool) -> None:
        """A worker has handed over its pool, which is the seat's from now on."""
        if self.pool is None and self._lost is None:
            self.pool = received
            try:
                self._rows = self._open_rows(received)
            except (KvxferError, OSError) as error:
                self.pool = None
                self.unusable = received.pool, str(error)
                self._log.warning("pool %s: nothing moves its rows: %s", received.pool, error)
                received.close()
                return
            self._log.info(
                "pool %s: %d bytes, %d groups, placement %s",
                received.pool,
                received.num_bytes,
                len(received.layout.groups),
                "worker" if received.is_moved_by_worker else "agent",
            )
        elif self.pool is None and self.waiting is None:
            self.waiting = received  # until the last operation on the lost one has ended
        else:
            # Its worker hears of it when it attaches.
            self._log.warning("refused a second pool: this agent serves one worker")
            received.close()

    def lose(self, pool: str) -> bool:
        """The worker of `pool` is gone; whether it was the one in the seat. Then `swap` once nothing touches it."""
        if self.waiting is not None and self.waiting.pool == pool:
            self.waiting.close()
            self.waiting = None
        if self.pool is None or self.pool.pool != pool:
            return False
        self._log.info("pool %s: its worker is gone", pool)
        self._lost, self.pool = self.pool, None
        return True

    def swap(self) -> None:
        """Nothing touches the lost pool any more: give it back, then take the one that waits."""
        assert self._lost is not None
        self.rows.close()
        self._rows = None
        self._lost.close()
        self._lost = None
        if self.waiting is not None:
            received, self.waiting = self.waiting, None
            self.take(received)

    def end_rows(self) -> None:
        """Order nothing any more, and leave no stream of a worker waiting. Calling it again does nothing."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    def close(self) -> None:
        """Give every pool back. Calling it again does nothing."""
        self.end_rows()
        for pool in (self.pool, self.waiting, self._lost):
            if pool is not None:
                pool.close()
