"""The memory of an agent's slots."""

from __future__ import annotations

import os
from pathlib import Path

from kvxfer.errors import ConfigError
from kvxfer.memory import HostMemory
from kvxfer.ops.config import SlotConfig
from kvxfer.rows_host import ByteArray
from kvxfer.transports.base import Region

PROBE_BYTES = 1 << 20
_GROUP = Path("/sys/fs/cgroup")
MAX_MEMORY_SHARE = 0.9
"""Of what is available. All pages of the slots are taken at the start: past the end, Linux kills a process."""


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

    @classmethod
    def at_start(cls, config: SlotConfig) -> SlotMemory:
        """The slots of an agent that starts. Raises `ConfigError` where this host has not the memory for them, before
        any of it is taken."""
        needed_bytes = config.num_slots * config.slot_bytes + PROBE_BYTES
        limit_bytes = int(available_bytes() * MAX_MEMORY_SHARE)
        got = f"slots: got {config.num_slots} slots of {config.slot_bytes} bytes, {needed_bytes >> 20} MiB in all"
        remedy = "lower slots.num_slots or slots.slot_bytes, or give this agent more memory"
        if needed_bytes > limit_bytes:
            raise ConfigError(
                f"{got}, expected at most {limit_bytes >> 20} MiB, {MAX_MEMORY_SHARE:.0%} of the memory that is "
                f"available here: {remedy}"
            )
        try:
            return cls(config)
        except OSError as error:
            raise ConfigError(f"{got}, expected what this process may map ({error.strerror}): {remedy}") from error

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


def available_bytes() -> int:
    """Memory that this process can get without swapping: of the host, and within the limit of its control group."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    limit = _GROUP / "memory.max"
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    if text == "max":
        return available
    # What is used, without the cached files that Linux drops first.
    stat = (_GROUP / "memory.stat").read_text(encoding="ascii").split()
    used = int((_GROUP / "memory.current").read_text(encoding="ascii")) - int(stat[stat.index("inactive_file") + 1])
    return max(0, min(available, int(text) - used))
