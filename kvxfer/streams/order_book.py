"""From moves to what a stream is ordered to do. The orders of a chunk are worked out once and kept as long as somebody
has the chunk."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from kvxfer.operations import Move, PeerRows, SegmentSource
from kvxfer.streams.chunk_orders import ChunkOrders
from kvxfer.streams.ring import DST_COLUMN, NO_SUM, SRC_COLUMN, MemoryIndex, Ring, SumKind, SumOrder
from kvxfer.streams.slot_binding import TO_STAGING
from kvxfer.streams.spans import AS_THEY_ARE, Order, PoolSide, SlotSide, pull_orders
from kvxfer.streams.stream_operation import Look, Operation

_FROM_STAGING: Final = (SRC_COLUMN, MemoryIndex.STAGING - MemoryIndex.SLOTS)  # added to spans of what is checked there


class OrderBook:
    """For one pool, its agent's slots, and lanes as those of `ring`, which stays the caller's."""

    def __init__(self, pool_bytes: int, slot_bytes: int, ring: Ring) -> None:
        self._pool_bytes = pool_bytes
        self._slot_bytes = slot_bytes
        self._ring = ring
        slot = SlotSide(MemoryIndex.SLOTS, slot_bytes)
        self._gathers = _SlotOrders(pool_bytes, slot, ring, is_gather=True)
        self._scatters = _SlotOrders(pool_bytes, slot, ring, is_gather=False)
        self._pulls: WeakKeyDictionary[SegmentSource, list[Order]] = WeakKeyDictionary()

    def gather(self, move: Move, slot: int, look_after: Look | None, *, is_bound: bool = False) -> Operation:
        """From the pool into `slot`; into `STAGING` where the entries that get there are bound to slots. Raises
        `LayoutError`, as all of these."""
        orders, first_byte = self._gathers.orders(move), 0 if is_bound else slot * self._slot_bytes
        summed = NO_SUM if move.row_sum is None else SumOrder(SumKind.MOVED, first_byte)
        if is_bound:
            return Operation(move, orders, TO_STAGING, summed, look_after, slot=slot)
        return Operation(move, orders, self._gathers.added(slot), summed, look_after)

    def scatter(self, move: Move, slot: int) -> Operation:
        """From `slot` into the pool."""
        row_sum, orders = move.row_sum, self._scatters.orders(move)
        if row_sum is None:
            return Operation(move, orders, self._scatters.added(slot), NO_SUM, None)
        # Each order stages and sums the whole segment, also one of several: what another found may not hold any more.
        summed = SumOrder(SumKind.CHECKED, slot * self._slot_bytes, row_sum.num_bytes, row_sum.expected)
        return Operation(move, orders, _FROM_STAGING, summed, None)

    def pull(self, move: Move, src: PeerRows, look_at_end: Look) -> Operation:
        """From a peer's pool into the pool, the whole chunk."""
        orders = self.pull_orders(move.source, src)
        return Operation(move, orders[::-1], AS_THEY_ARE, NO_SUM, None, peer=src.index, look_at_end=look_at_end)

    def pull_orders(self, source: SegmentSource, src: PeerRows) -> list[Order]:
        """Those of a pull of `source`; one peer's pool stands for `src.index` as long as that lives."""
        orders = self._pulls.get(source)
        if orders is None:
            peer = PoolSide(src.index, src.num_bytes, src.addresses)
            pool = PoolSide(MemoryIndex.POOL, self._pool_bytes, source.addresses)
            orders = pull_orders(source.plan, peer, pool, self._ring.max_offsets)
            self._pulls[source] = orders
        return orders


class _SlotOrders:
    """Orders between a pool and slots, one way."""

    def __init__(self, pool_bytes: int, slot: SlotSide, ring: Ring, *, is_gather: bool) -> None:
        self._pool_bytes = pool_bytes
        self._slot = slot
        self._ring = ring
        self._is_gather = is_gather
        self._first_byte_column = (DST_COLUMN if is_gather else SRC_COLUMN) + 1
        self._chunks: WeakKeyDictionary[SegmentSource, ChunkOrders] = WeakKeyDictionary()

    def orders(self, move: Move) -> list[Order]:
        """Of a move's segment, the first one last. Raises `LayoutError`."""
        source = move.source
        chunk = self._chunks.get(source)
        if chunk is None:
            pool = PoolSide(MemoryIndex.POOL, self._pool_bytes, source.addresses)
            chunk = ChunkOrders(source.plan, pool, self._slot, self._ring.max_offsets, is_gather=self._is_gather)
            self._chunks[source] = chunk
        return chunk.segment(move.segment)[::-1]

    def added(self, slot: int) -> tuple[int, int]:
        """What is added to their spans for the slot that is meant: to their first bytes there."""
        return self._first_byte_column, slot * self._slot.num_bytes
