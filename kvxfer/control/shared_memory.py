"""Memory that one process of a host lets another map: what names it on a unix socket, and how it is mapped there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from kvxfer.control.message_base import Counter
from kvxfer.errors import HandoffError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool, MappedPool, PoolHandle, map_pool, share_legacy

PoolMemory = HostMemory | MappedPool | DevicePool
"""What a worker's pool may be."""


class SharedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`num_bytes` of host memory, whose sealed memfd goes along, or, with `gpu`, of a GPU's memory; its descriptor goes
    along unless the handle is a legacy one."""

    num_bytes: Counter
    gpu: PoolHandle | None = None

    @property
    def has_fd(self) -> bool:
        """Whether a descriptor goes along."""
        return self.gpu is None or not self.gpu.ipc


def describe(memory: HostMemory | MappedPool) -> SharedMemory:
    """What names `memory` to other processes; `memory.fd` goes along, unless that is -1.
    Only the process that made it can share it."""
    if isinstance(memory, HostMemory):
        return SharedMemory(num_bytes=memory.num_bytes)
    assert memory.is_shareable, "memory that was mapped from another process cannot be shared on"
    return SharedMemory(num_bytes=memory.handle.num_bytes, gpu=memory.handle)


def share(memory: PoolMemory) -> tuple[SharedMemory, list[int]]:
    """What names `memory` to other processes, and the descriptors that go along, which stay its own.

    Raises `HandoffError` for a `DevicePool` that has no legacy handle, with the remedy.
    """
    if isinstance(memory, DevicePool):
        return SharedMemory(num_bytes=memory.num_bytes, gpu=share_legacy(memory)), []
    return describe(memory), [memory.fd] if memory.fd >= 0 else []


def attach(
    shared: SharedMemory, fds: list[int], what: str, *, is_read_only: bool = False, device_index: int | None = None
) -> HostMemory | MappedPool:
    """Map what another process shares. Takes its descriptor, where it has one, from the front of `fds`; the mapping is
    the caller's. `what` names it in errors. `is_read_only`: rows are only pulled from it; what that means for GPUs, and
    `device_index`, is as in `map_pool`.

    Raises `HandoffError`; the descriptor is closed then.
    """
    if shared.has_fd and not fds:
        raise HandoffError(
            f"{what} descriptor: got none, expected one: none was sent, or this process may open no more (ulimit -n)"
        )
    if shared.gpu is None:
        return HostMemory.attach(fds.pop(0), shared.num_bytes, what, is_read_only=is_read_only)
    if shared.gpu.num_bytes != shared.num_bytes:
        raise HandoffError(f"{what}: got a handle of {shared.gpu.num_bytes} bytes, expected {shared.num_bytes}")
    fd = fds.pop(0) if shared.has_fd else None
    try:
        return map_pool(shared.gpu, fd, is_read_only=is_read_only, device_index=device_index)
    except TransportError as error:
        raise HandoffError(f"{what}: got memory of a GPU, which this process cannot reach: {error}") from error
    finally:
        if fd is not None:
            os.close(fd)


@dataclass(slots=True)
class HeldMemory:
    """Memory of another process that is passed on as it came, and is not mapped here. Owns `fd`, -1 where none goes
    along; `close()` closes it."""

    shared: SharedMemory
    fd: int = -1

    def fds(self) -> list[int]:
        """What goes along on a socket."""
        return [self.fd] if self.fd >= 0 else []

    def attach(self, device_index: int | None) -> HostMemory | MappedPool:
        """Map it to pull rows out of it, and let go of it; the mapping is the caller's. `device_index`: the GPU of the
        pool that rows go into, None for one in host memory.

        Raises `HandoffError`, also where the two pools are of different kinds: nothing moves rows between those.
        """
        fds, self.fd = self.fds(), -1
        is_on_gpu = device_index is not None
        if is_on_gpu != (self.shared.gpu is not None):
            for fd in fds:
                os.close(fd)
            kinds = ("in host memory", "on a GPU")
            raise HandoffError(f"pool: got one {kinds[not is_on_gpu]}, expected one {kinds[is_on_gpu]}, like its own")
        return attach(self.shared, fds, "pool", is_read_only=True, device_index=device_index)

    def close(self) -> None:
        """Let go of it. Calling it again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def as_device_pool(memory: PoolMemory) -> HostMemory | DevicePool:
    """What row streams take for `memory`, which must outlive them."""
    return memory.pool if isinstance(memory, MappedPool) else memory
