"""A `RowExecutor` for a pool that its worker shares with the agent, which orders and feeds a stream of its own."""

from __future__ import annotations

import sys
from typing import Protocol

from kvxfer.memory import HostMemory
from kvxfer.operations import MoveReports
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import OrderCode, Ring
from kvxfer.streams.stream_mover import StreamMover


class OwnStream(Protocol):
    """Moves the rows of entries whose orders have been given. Unlike a stream of the worker it waits for nobody."""

    @property
    def error(self) -> str | None:
        """Why nothing is moved any more, and what was under way may not have been; None while all is well."""
        ...

    @property
    def turn_s(self) -> float | None:
        """How long an entry lasts that nothing is before, by the last few of them."""
        ...

    def enqueue(self, number: int, lane: int) -> None:
        """The order of entry `number` is in `lane`, which is the entry's until that has ended. Never blocks, but where
        an `error` begins."""
        ...

    def is_done(self, number: int) -> bool:
        """Whether an entry touches nothing any more, of those that were enqueued the oldest. From any thread."""
        ...

    def replace_slots(self, slots: HostMemory | DevicePool) -> None:
        """The slots lie in `slots` from now on; what was given before ends first. Where the GPU cannot use them, an
        `error` begins."""
        ...

    def set_peer(self, index: int, pool: DevicePool | None) -> None:
        """From now on orders that name memory `index` mean `pool`, which stays the caller's; None: nothing. None that
        was given before names it."""
        ...

    def drain(self) -> None:
        """Wait until all that was enqueued has ended, which takes milliseconds."""
        ...

    def close(self) -> None:
        """Drain, then give everything back. Calling it again does nothing."""
        ...


class _FedRing(Ring):
    """The agent's own view of a ring whose entries are enqueued as soon as they have their orders. Only the timeline is
    the worker's."""

    def __init__(self, ring: Ring, stream: OwnStream) -> None:
        super().__init__(ring.memory, ring.num_lanes)
        self._stream = stream

    @property
    def num_enqueued(self) -> int:
        """As many as there are orders for."""
        return sys.maxsize

    def order(self, number: int, code: OrderCode, lane: int = 0) -> None:
        """An order that was given is carried out, unless it is to be skipped from the beginning."""
        super().order(number, code, lane)
        if code is OrderCode.RUN:
            self._stream.enqueue(number, lane)

    def is_done(self, number: int) -> bool:
        """`Ring.is_done`."""
        return self._stream.is_done(number)

    @property
    def end(self) -> str | None:
        """`Ring.end`."""
        return self._stream.error


class OwnStreamMover(StreamMover):
    """`StreamMover` for a stream of the agent's own, which it owns. The pool stays mapped, and the `ring` open, until
    after `close()`."""

    def __init__(self, ring: Ring, stream: OwnStream, mover: MoveReports, *, pool_bytes: int, slot_bytes: int) -> None:
        super().__init__(
            _FedRing(ring, stream),
            mover,
            pool_bytes=pool_bytes,
            slot_bytes=slot_bytes,
            want_entries=lambda _total: None,
        )
        self._stream = stream

    @property
    def turn_s(self) -> float | None:
        """`OwnStream.turn_s`."""
        return self._stream.turn_s

    def slots_moved(self, slots: HostMemory | DevicePool) -> None:
        """`OwnStream.replace_slots`."""
        self._stream.replace_slots(slots)

    def set_peer(self, index: int, pool: DevicePool | None) -> None:
        """`OwnStream.set_peer`."""
        self._stream.set_peer(index, pool)

    def drain(self) -> None:
        """`OwnStream.drain`."""
        self._stream.drain()

    def stop(self, error: str) -> None:
        """`RowExecutor.stop`. What the stream was given comes to its end: nothing else proves that it is over."""
        self._stream.drain()
        super().stop(error)

    def close(self) -> None:
        """`RowExecutor.close`. Nothing touches the pool any more."""
        super().close()
        self._stream.close()
