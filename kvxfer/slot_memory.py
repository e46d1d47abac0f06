"""The memory of an agent's slots."""

from __future__ import annotations

import os
from pathlib import Path

from kvxfer.errors import ConfigError, EngineMissingError, HandoffError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.ops.config import SlotConfig
from kvxfer.row_sums import BLOCK_BYTES as SUM_BLOCK_BYTES
from kvxfer.rows_host import ByteArray
from kvxfer.streams.device import MappedPool, allocate_pool
from kvxfer.streams.driver import find_gpu, gpu
from kvxfer.streams.legacy import allocate_legacy
from kvxfer.transports.base import MemoryKind, Region

PROBE_BYTES = 1 << 20
_GROUP = Path("/sys/fs/cgroup")
MAX_MEMORY_SHARE = 0.9
"""Of what is available. All pages of the slots are taken at the start: past the end, Linux kills a process."""


class SlotMemory:
    """An agent's slots in one registered memory, of the host or of a GPU, and a probe area behind them.

    `move` counts how often the slots have got other memory.

    On a GPU it is plain memory: UCX reaches no other at the rate of a GPU from other processes. A worker maps it by a
    legacy handle, unless it has the agent's process id, each as it sees its own: then the memory must have a
    descriptor.
    """

    def __init__(self, config: SlotConfig, move: int = 0, *, has_fd: bool = False) -> None:
        """Allocate; with `has_fd` memory of a GPU that has a descriptor.

        Raises `OSError` where the host has no more memory to give, and for slots on a GPU `ConfigError` where there is
        no such GPU, `EngineMissingError` without CUDA, `TransportError` for what the GPU refuses.
        """
        self.move = move
        self.num_slots = config.num_slots
        self.slot_bytes = config.slot_bytes
        self.probe_offset_bytes = config.num_slots * config.slot_bytes
        num_bytes = self.probe_offset_bytes + PROBE_BYTES
        self.memory: HostMemory | MappedPool
        if config.kind == "device":
            self.memory = (allocate_pool if has_fd else allocate_legacy)(num_bytes, _gpu_index(config))
            pool = self.memory.pool
            self.region = Region(
                pool.address,
                num_bytes,
                self.memory.fd if has_fd else None,
                kind=MemoryKind.DEVICE,
                device_index=pool.device_index,
                handle=self.memory.handle,
            )
        else:
            self.memory = HostMemory.create(num_bytes, "kvxfer-slots")
            # Have all pages now: a first touch in a transfer costs more.
            self.memory.array[:: os.sysconf("SC_PAGESIZE")] = 0
            self.region = Region(self.memory.address, num_bytes, self.memory.fd)

    @classmethod
    def at_start(cls, config: SlotConfig) -> SlotMemory:
        """The slots of an agent that starts. Raises `ConfigError` where this host or GPU has not the memory for them,
        on a host before any of it is taken, and `EngineMissingError` without CUDA for slots on a GPU."""
        needed_bytes = config.num_slots * config.slot_bytes + PROBE_BYTES
        got = f"slots: got {config.num_slots} slots of {config.slot_bytes} bytes, {needed_bytes >> 20} MiB in all"
        remedy = "lower slots.num_slots or slots.slot_bytes, or give this agent more memory"
        if config.kind == "device":
            return cls._on_gpu_at_start(config, got)
        limit_bytes = int(available_bytes() * MAX_MEMORY_SHARE)
        if needed_bytes > limit_bytes:
            raise ConfigError(
                f"{got}, expected at most {limit_bytes >> 20} MiB, {MAX_MEMORY_SHARE:.0%} of the memory that is "
                f"available here: {remedy}"
            )
        try:
            return cls(config)
        except OSError as error:
            raise ConfigError(f"{got}, expected what this process may map ({error.strerror}): {remedy}") from error

    @classmethod
    def _on_gpu_at_start(cls, config: SlotConfig, got: str) -> SlotMemory:
        if config.slot_bytes % SUM_BLOCK_BYTES:
            raise ConfigError(
                f'slots.slot_bytes: got {config.slot_bytes} with slots.kind "device", expected a multiple of '
                f"{SUM_BLOCK_BYTES}"
            )
        on_host = 'or let them lie in host memory (slots.kind = "pinned_host")'
        try:
            return cls(config)
        except EngineMissingError as error:
            raise EngineMissingError(f'slots.kind: got "device", which needs CUDA: {error}; {on_host}') from error
        except (TransportError, HandoffError) as error:
            raise ConfigError(f"{got}, on GPU {config.gpu}, expected memory that it has: {error}; {on_host}") from error

    def __str__(self) -> str:
        place = "in host memory"
        if self.is_on_gpu:
            shared = "by a descriptor" if self.has_fd else "by a legacy handle"
            place = f"on GPU {self.region.device_index}, which others map {shared}"
        return f"{self.num_slots} of {self.slot_bytes} bytes {place}"

    @property
    def is_on_gpu(self) -> bool:
        """Whether the slots lie on a GPU: agents do not see their bytes then."""
        return isinstance(self.memory, MappedPool)

    @property
    def has_fd(self) -> bool:
        """Whether others map the slots by a descriptor: whatever their process ids are."""
        return self.region.fd is not None

    def can_be_mapped_by(self, pid: int) -> bool:
        """Whether a worker that sees itself as process `pid` can map the slots."""
        return self.region.handle is None or self.has_fd or self.region.handle.pid != pid

    def view(self, slot: int) -> ByteArray:
        """`[slot_bytes]` uint8 of one slot in host memory."""
        assert isinstance(self.memory, HostMemory), "the bytes of slots on a GPU are not seen here"
        return self.memory.array[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def address(self, slot: int) -> int:
        """Virtual address of a slot's first byte."""
        return self.region.address + slot * self.slot_bytes

    @property
    def probe_address(self) -> int:
        """Virtual address of the probe area."""
        return self.region.address + self.probe_offset_bytes

    def flush(self) -> None:
        """Let streams see what an engine has written, where network adapters write into memory of a GPU. Raises
        `TransportError`."""
        if self.is_on_gpu:
            gpu(self.region.device_index).flush_writes()

    def leave(self) -> bool:
        """The slots have moved elsewhere: give the memory back, where late writes cannot do harm.

        False where that has to wait for `close()`, once the engine was replaced: memory of a GPU, unmapped under a
        copy, breaks the process that copies.
        """
        if isinstance(self.memory, HostMemory):
            self.memory.abandon()
            return True
        return False

    def close(self) -> None:
        """Give the memory back; no engine and no stream of this process touches it any more. Calling it again does
        nothing."""
        self.memory.close()


def _gpu_index(config: SlotConfig) -> int:
    """Index of the GPU that `config` names. Raises `ConfigError`, and `EngineMissingError` without CUDA."""
    if isinstance(config.gpu, int):
        return config.gpu
    found = find_gpu(config.gpu.lower().removeprefix("gpu-").replace("-", ""))
    if found is None:
        raise ConfigError(
            f"slots.gpu: got {config.gpu}, expected a GPU that this process sees: look at CUDA_VISIBLE_DEVICES and the "
            "container's GPUs, or give its index"
        )
    return found


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
