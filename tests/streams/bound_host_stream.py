"""A host stream that binds its entries to slots, as a GPU's does whose copy engine fills them: staging, then the slot,
whatever the order was."""

from __future__ import annotations

import numpy as np

from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool
from kvxfer.streams.host_stream import HostRowStream
from kvxfer.streams.ring import MemoryIndex, Ring
from kvxfer.streams.slot_binding import bind_entries


class BoundHostStream(HostRowStream):
    """Bound where the agent offers it and `may_bind`; otherwise as every host stream."""

    def __init__(self, ring: Ring, pool: HostMemory, slots: HostMemory | DevicePool, *, may_bind: bool = True) -> None:
        super().__init__(ring, pool, slots)
        self._bound = bind_entries(ring, slots.num_bytes) if may_bind else None
        if self._bound is not None:
            self._memories[MemoryIndex.STAGING] = np.full(self._bound.slot_bytes, 0xEE, dtype=np.uint8)

    def _execute(self, number: int) -> None:
        super()._execute(number)
        if self._bound is not None:
            slot_bytes = self._bound.slot_bytes
            slot = self._memories[MemoryIndex.SLOTS][self._bound.slot_of(number) * slot_bytes :][:slot_bytes]
            slot[:] = self._memories[MemoryIndex.STAGING]
