"""The memory of an agent's slots."""

from __future__ import annotations

import os

from kvxfer.memory import HostMemory
from kvxfer.ops.config import SlotConfig
from kvxfer.rows_host import ByteArray
from kvxfer.transports.base import Region

PROBE_BYTES = 1 << 20


class SlotMemory:
    """An agent's slots in one registered memory, and a probe area behind them.

    `move` counts how often the slots have got other pages.
    """

    def __init__(self, config: SlotConfig, move: int = 0) -> None:
        self.move = move
        self.num_slots = config.num_slots
        self.slot_bytes = config.slot_bytes
        self.probe_offset_bytes = config.num_slots * config.slot_bytes
        self.memory = HostMemory.create(self.probe_offset_bytes + PROBE_BYTES, "kvxfer-slots")
        self._back()
        self.region = Region(self.memory.address, self.memory.num_bytes, self.memory.fd)

    def replace(self) -> None:
        """Take other pages at the same addresses: what somebody still does to the old ones does not show here. An
        engine must be made anew. Raises `OSError`; nothing has changed then."""
        self.memory.replace("kvxfer-slots")
        self.move += 1
        self._back()

    def _back(self) -> None:
        """Have all pages now: a first touch in a transfer costs more."""
        self.memory.array[:: os.sysconf("SC_PAGESIZE")] = 0

    def view(self, slot: int) -> ByteArray:
        """`[slot_bytes]` uint8 of one slot."""
        return self.memory.array[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def address(self, slot: int) -> int:
        """Virtual address of a slot's first byte."""
        return self.memory.address + slot * self.slot_bytes
