"""The orders of chunks, worked out once and kept as long as somebody has the chunk."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from kvxfer.operations import PeerRows, SegmentSource
from kvxfer.ownership import Int64Array
from kvxfer.streams.chunk_orders import ChunkOrders
from kvxfer.streams.ring import DST_COLUMN, SPAN_WORDS, SRC_COLUMN, MemoryIndex, Ring
from kvxfer.streams.spans import Order, PoolSide, SlotSide, pull_orders


class OrderBook:
    """For one pool, its agent's slots, and lanes as those of `ring`, which stays the caller's."""

    def __init__(self, pool_bytes: int, slot_bytes: int, ring: Ring) -> None:
        self._pool_bytes = pool_bytes
        self._ring = ring
        slot = SlotSide(MemoryIndex.SLOTS, slot_bytes)
        self.gathers = SlotOrders(pool_bytes, slot, ring, is_gather=True)
        """From the pool into slots."""
        self.scatters = SlotOrders(pool_bytes, slot, ring, is_gather=False)
        """From slots into the pool."""
        self._pulls: WeakKeyDictionary[SegmentSource, list[Order]] = WeakKeyDictionary()
        self.from_staging = np.zeros(SPAN_WORDS, dtype=np.int64)
        """What is added to the spans of a scatter, `[SPAN_WORDS]` int64, that finds its segment in `STAGING`."""
        self.from_staging[SRC_COLUMN] = MemoryIndex.STAGING - MemoryIndex.SLOTS

    def pulls(self, source: SegmentSource, src: PeerRows) -> list[Order]:
        """From a peer's pool, the one that stands for `src.index` as long as `source` lives, into the pool, the whole
        chunk. Raises `LayoutError`."""
        orders = self._pulls.get(source)
        if orders is None:
            peer = PoolSide(src.index, src.num_bytes, src.addresses)
            pool = PoolSide(MemoryIndex.POOL, self._pool_bytes, source.addresses)
            orders = pull_orders(source.plan, peer, pool, self._ring.max_offsets)
            self._pulls[source] = orders
        return orders


class SlotOrders:
    """Orders between a pool and slots, one way."""

    def __init__(self, pool_bytes: int, slot: SlotSide, ring: Ring, *, is_gather: bool) -> None:
        self._pool_bytes = pool_bytes
        self._slot = slot
        self._ring = ring
        self._is_gather = is_gather
        self._chunks: WeakKeyDictionary[SegmentSource, ChunkOrders] = WeakKeyDictionary()
        self._added: dict[int, Int64Array] = {}

    def chunk(self, source: SegmentSource) -> ChunkOrders:
        """Those of all segments of a chunk."""
        orders = self._chunks.get(source)
        if orders is None:
            pool = PoolSide(MemoryIndex.POOL, self._pool_bytes, source.addresses)
            orders = ChunkOrders(source.plan, pool, self._slot, self._ring.max_offsets, is_gather=self._is_gather)
            self._chunks[source] = orders
        return orders

    def added(self, slot: int) -> Int64Array:
        """What is added to their spans, `[SPAN_WORDS]` int64, for the slot that is meant."""
        words = self._added.get(slot)
        if words is None:
            words = self._added[slot] = np.zeros(SPAN_WORDS, dtype=np.int64)
            words[(DST_COLUMN if self._is_gather else SRC_COLUMN) + 1] = slot * self._slot.num_bytes
        return words
