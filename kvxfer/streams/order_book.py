"""The orders of chunks, worked out once and kept as long as somebody has the chunk."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvxfer.operations import PeerRows, SegmentSource
from kvxfer.streams.chunk_orders import ChunkOrders
from kvxfer.streams.ring import MemoryIndex, Ring
from kvxfer.streams.spans import Order, PoolSide, SlotSide, pull_orders


class OrderBook:
    """For one pool, its agent's slots, and lanes as those of `ring`, which stays the caller's."""

    def __init__(self, pool_bytes: int, slot_bytes: int, ring: Ring) -> None:
        self._pool_bytes = pool_bytes
        self._slots = SlotSide(MemoryIndex.SLOTS, slot_bytes, 0)
        self._ring = ring
        self._gathers: WeakKeyDictionary[SegmentSource, ChunkOrders] = WeakKeyDictionary()
        self._scatters: WeakKeyDictionary[SegmentSource, ChunkOrders] = WeakKeyDictionary()
        self._pulls: WeakKeyDictionary[SegmentSource, list[Order]] = WeakKeyDictionary()

    def gathers(self, source: SegmentSource) -> ChunkOrders:
        """From the pool into slots."""
        orders = self._gathers.get(source)
        if orders is None:
            orders = ChunkOrders(source.plan, self._pool(source), self._slots, self._ring.max_offsets)
            self._gathers[source] = orders
        return orders

    def scatters(self, source: SegmentSource) -> ChunkOrders:
        """From slots into the pool."""
        orders = self._scatters.get(source)
        if orders is None:
            orders = ChunkOrders(source.plan, self._slots, self._pool(source), self._ring.max_offsets)
            self._scatters[source] = orders
        return orders

    def pulls(self, source: SegmentSource, src: PeerRows) -> list[Order]:
        """From a peer's pool, the one that stands for `src.index` as long as `source` lives, into the pool, the whole
        chunk. Raises `LayoutError`."""
        orders = self._pulls.get(source)
        if orders is None:
            peer = PoolSide(src.index, src.num_bytes, src.addresses)
            orders = pull_orders(source.plan, peer, self._pool(source), self._ring.max_offsets)
            self._pulls[source] = orders
        return orders

    def _pool(self, source: SegmentSource) -> PoolSide:
        return PoolSide(MemoryIndex.POOL, self._pool_bytes, source.addresses)
