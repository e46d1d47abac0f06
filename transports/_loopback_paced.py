"""Loopback writes that others copy, processes or a GPU, each reported at the pace of the emulated wire."""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import msgspec

from kvxfer.errors import TransportError
from kvxfer.transports._loopback_peer import LoopbackPeer
from kvxfer.transports._loopback_wire import Wire
from kvxfer.transports._regions import CheckedWrite
from kvxfer.transports.base import Outcome

_LOOK_EVERY_S = 1e-3
"""A death that nothing waits for is seen this late at most, by a loop that turns."""

Report = Callable[[int, CheckedWrite, Outcome, str], None]


class PacedWrite(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A write that has not ended, and when it will have passed the wire, on the monotonic clock."""

    write_id: int
    peer: LoopbackPeer
    entries: CheckedWrite
    due_s: float


class Copier(Protocol):
    """Who copies, and tells when. All but `close` raise `TransportError` or `OSError` where that goes wrong."""

    @property
    def news_fd(self) -> int:
        """A descriptor that is readable once `look` has something to tell; -1 where nothing is copied any more."""
        ...

    @property
    def end_fds(self) -> Collection[int]:
        """Descriptors that are readable once one of those that copy has ended."""
        ...

    def takes(self, entries: CheckedWrite, peer: LoopbackPeer, dst_region: int) -> bool:
        """Whether `begin` is for such a write."""
        ...

    def begin(self, write: PacedWrite) -> None:
        """Copy it. No write is due before those begun before it."""
        ...

    def look(self) -> tuple[list[int], float]:
        """The writes that were copied and are due, and for how many seconds others have copied since the last call."""
        ...

    def drop_peer(self, peer: LoopbackPeer) -> None:
        """When it returns, nothing is written to `peer`. `look` may tell of its writes still."""
        ...

    def drop_sources(self, region_ids: Collection[int]) -> None:
        """Forget local regions: other memory may lie behind them, or none. Writes under way are copied before."""
        ...

    def give_up(self) -> None:
        """When it returns, nothing is copied any more; what was begun is forgotten."""
        ...

    def close(self) -> None:
        """`give_up`, and free everything."""
        ...


class PacedWrites:
    """Writes that end when their bytes have moved, and not before they are due.

    Of one thread, which `fileno()` wakes when one has ended. Where its copier fails, all writes do. Owns the copier and
    an epoll; `close()` frees them.
    """

    def __init__(self, copier: Copier, wire: Wire, report: Report, other_fd: int) -> None:
        """`report` hears of writes that fail. `fileno()` is readable while `other_fd` is, too."""
        self._copier = copier
        self._wire = wire
        self._report = report
        self._writes: dict[int, PacedWrite] = {}  # one wire: whoever came first is due first
        self._look_at_s = 0.0  # before, `collect` has nothing to find
        self._living: dict[int, LoopbackPeer] = {}
        self._epoll = select.epoll()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._epoll.register(other_fd, select.EPOLLIN)
            self._watch_copier()
            on_error.pop_all()

    def _watch_copier(self) -> None:
        self._copier_fds = [fd for fd in (self._copier.news_fd, *self._copier.end_fds) if fd >= 0]
        for fd in self._copier_fds:
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add_peer(self, peer: LoopbackPeer) -> None:
        """Notice the end of its process."""
        self._living[peer.process_fd] = peer
        self._epoll.register(peer.process_fd, select.EPOLLIN)

    def submit(self, write_id: int, peer: LoopbackPeer, entries: CheckedWrite, dst_region: int) -> bool:
        """Take on a write to `dst_region`, where that is for others to copy; whether it is."""
        try:
            if not self._copier.takes(entries, peer, dst_region):
                return False
            due_s = self._wire.take(entries.num_entries, entries.num_bytes)
            write = PacedWrite(write_id, peer, entries, due_s)
            self._copier.begin(write)
        except (OSError, TransportError) as error:
            self._give_up(str(error))
            self._report(write_id, entries, Outcome.FAILED, str(error))
            return True
        self._writes[write_id] = write
        if due_s < self._look_at_s:
            self._look_at_s = due_s
        return True

    def collect(self) -> tuple[list[PacedWrite], float]:
        """The writes that are done, and for how many seconds others have copied since the last call."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return [], 0.0
        try:
            return self._look(now_s)
        except (OSError, TransportError) as error:
            self._give_up(str(error))
            return [], 0.0

    def _look(self, now_s: float) -> tuple[list[PacedWrite], float]:
        copier, living = self._copier, self._living
        done: list[PacedWrite] = []
        has_news, busy_s = False, 0.0
        for fd, _ in self._epoll.poll(0):
            if fd == copier.news_fd:
                has_news = True
            elif fd in living:
                self._epoll.unregister(fd)
                living.pop(fd).is_gone = True
            elif fd in copier.end_fds:
                raise TransportError("one of those that copy has ended, expected it to live as long as the transport")
        if has_news:
            ended, busy_s = copier.look()
            for write_id in ended:
                write = self._writes.pop(write_id, None)
                if write is None:
                    continue  # its peer was dropped
                if write.peer.is_gone:
                    # Nothing arrives at a process that has ended; nothing of the write moves any more either.
                    self._fail([write], write.peer.end_detail)
                else:
                    done.append(write)
        self._look_at_s = now_s + _LOOK_EVERY_S
        for first in self._writes.values():
            if first.due_s < self._look_at_s:
                self._look_at_s = first.due_s
            break
        return done, busy_s

    def drop_peer(self, peer: LoopbackPeer) -> None:
        """When it returns, nothing is written to `peer`, and its writes have failed."""
        if self._living.pop(peer.process_fd, None) is not None:
            self._epoll.unregister(peer.process_fd)
        try:
            self._copier.drop_peer(peer)
        except (OSError, TransportError) as error:
            self._give_up(str(error))
        dropped = [write for write in self._writes.values() if write.peer is peer]
        for write in dropped:
            del self._writes[write.write_id]
        self._fail(dropped, "the peer was dropped")

    def drop_sources(self, region_ids: Collection[int]) -> None:
        """`Copier.drop_sources`."""
        try:
            self._copier.drop_sources(region_ids)
        except (OSError, TransportError) as error:
            self._give_up(str(error))

    def _give_up(self, detail: str) -> None:
        for fd in self._copier_fds:
            self._epoll.unregister(fd)
        self._copier.give_up()
        self._watch_copier()
        self._fail_all(detail)

    def _fail_all(self, detail: str) -> None:
        lost, self._writes = self._writes, {}
        self._fail(lost.values(), detail)

    def _fail(self, writes: Iterable[PacedWrite], detail: str) -> None:
        for write in writes:
            self._report(write.write_id, write.entries, Outcome.FAILED, detail)

    def close(self) -> None:
        """When it returns, nothing is copied any more, and what had not ended has failed."""
        self._look_at_s = math.inf
        self._copier.close()
        self._epoll.close()
        self._fail_all("the transport was closed")
