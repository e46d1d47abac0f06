"""What comes of hand-offs, as the agent hears it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from kvxfer.control.shared_memory import HeldMemory, describe
from kvxfer.errors import TransportError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.streams.device import MappedPool
from kvxfer.streams.ring import Ring


@dataclass(frozen=True, slots=True)
class ReceivedPool:
    """A worker has handed over its pool of `num_bytes`. `pid` is 0 for other PID namespaces.

    One of three moves its rows: threads of the agent, in the mapping `memory`; a stream of the agent, in `device`, the
    mapping of a pool on a GPU, by orders in `ring`, whose timeline is the worker's; or a stream of the worker, by the
    orders in `ring`. `shared` lets peers on this host map it, where the worker allows that. All are the receiver's, who
    calls `close()`.
    """

    pool: str
    num_bytes: int
    layout: PoolLayout
    pid: int
    memory: HostMemory | None = None
    ring: Ring | None = None
    shared: HeldMemory | None = None
    move: int = 0  # of the slots, the last one before its worker got them
    device: MappedPool | None = None

    @property
    def is_moved_by_worker(self) -> bool:
        """Whether a stream of the worker moves its rows."""
        return self.ring is not None and self.device is None

    def for_peers(self) -> HeldMemory | None:
        """What lets peers on this host map the pool, which stays this object's; None where they cannot."""
        if self.memory is not None:
            return HeldMemory(describe(self.memory), self.memory.fd)
        return self.shared

    def close(self) -> None:
        """Unmap the pool and the ring, let go of what is shared. Calling it again does nothing."""
        if self.memory is not None:
            self.memory.close()
        if self.device is not None:
            with contextlib.suppress(TransportError):  # a context that is broken maps nothing any more
                self.device.close()
        if self.ring is not None:
            self.ring.close()
        if self.shared is not None:
            self.shared.close()


@dataclass(frozen=True, slots=True)
class RefusedHandoff:
    """A hand-off failed; nothing of it is left. For the log."""

    detail: str


@dataclass(frozen=True, slots=True)
class LostPool:
    """The worker that handed over `pool` has gone or has hung up."""

    pool: str


HandoffEvent = ReceivedPool | RefusedHandoff | LostPool
