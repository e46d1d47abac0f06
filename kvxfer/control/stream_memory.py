"""What an agent shares with a stream of its worker over the hand-off connection, as it comes out there."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.control.shared_memory import HeldMemory
from kvxfer.memory import HostMemory
from kvxfer.streams.device import MappedPool
from kvxfer.streams.ring import Ring


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """What the agent shares with a stream of the worker. Owned by whoever has it; `close()` unmaps both."""

    ring: Ring
    slots: HostMemory | MappedPool

    def close(self) -> None:
        self.ring.close()
        self.slots.close()


@dataclass(frozen=True, slots=True)
class MovedSlots:
    """The agent's slots lie in `memory` from now on, mapped here; it is the receiver's. `move` counts such moves."""

    move: int
    memory: HostMemory | MappedPool


@dataclass(frozen=True, slots=True)
class OfferedPeer:
    """The pool of a peer that the stream may pull rows from; `memory` is the receiver's."""

    index: int
    memory: HeldMemory
