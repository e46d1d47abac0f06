"""The lanes of a ring as an agent uses them: which are free, and what was written into them last."""

from __future__ import annotations

from collections import deque

from kvxfer.ownership import Int64Array
from kvxfer.streams.ring import Ring, SumOrder
from kvxfer.streams.spans import Order


class Lanes:
    """Its length is the number of free ones. `ring` stays the caller's.

    A table of row offsets is most of what it takes to write an order, and segments of a chunk often have the same one:
    a lane that has it already is taken first.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._free = deque(range(ring.num_lanes))  # the one that was free for longest first
        self._tables: list[Int64Array | None] = [None] * ring.num_lanes  # that were written into them last

    def __len__(self) -> int:
        return len(self._free)

    def take(self, order: Order, summed: SumOrder, added: tuple[int, int]) -> int:
        """A free lane, with the order in it as `Ring.write_lane` writes it."""
        offsets, tables = order.offsets, self._tables
        for lane in self._free:
            if tables[lane] is offsets:
                self._free.remove(lane)
                break
        else:
            lane = self._free.popleft()
        has_offsets = tables[lane] is offsets
        self._ring.write_lane(lane, order.span_words, offsets, summed, added, has_offsets=has_offsets)
        if len(offsets):  # else the table is still there
            tables[lane] = offsets
        return lane

    def give_back(self, lane: int) -> None:
        """The entry that had it is done."""
        self._free.append(lane)
