"""Large loopback writes that processes copy, each reported at the pace of the emulated wire."""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Mapping

from kvxfer.errors import TransportError
from kvxfer.transports._loopback_peer import LoopbackPeer
from kvxfer.transports._loopback_processes import CopyProcesses, Piece
from kvxfer.transports._loopback_timer import WireTimer
from kvxfer.transports._regions import Entries
from kvxfer.transports.base import Region

_LEAST_PIECE_BYTES = 256 << 10
"""What a thread of the agent copies while a job finds its process."""
_MAX_PIECES = 64
_LOST = "a copying process of the wire has ended, expected it to live as long as the transport"


class PacedWrites:
    """Writes that end when their bytes have moved, and not before they are due.

    Of one thread, which `fileno()` wakes: when the first write is due and, where its bytes have not moved by then, when
    they have. Where one of the processes has ended, methods raise `TransportError` or `OSError`; after `give_up()`,
    `pieces` alone still does. Owns the processes, an epoll and a timer.
    """

    def __init__(self, num_processes: int, other_fd: int) -> None:
        """`fileno()` is readable while `other_fd` is, too."""
        self._copies = CopyProcesses(num_processes)
        self._is_copied: dict[int, bool] = {}  # of each write that has not ended
        self._due: deque[tuple[float, int]] = deque()  # one wire: whoever came first is due first
        self._late: set[int] = set()  # due, and still being copied
        self._watches_copies = False
        self._has_given_up = False
        self._src_keys: dict[int, int] = {}
        self._dst_keys: dict[tuple[str, int], int] = {}
        self._timer: WireTimer | None = None
        self._epoll = select.epoll()
        self._control_fds = {control.fileno() for control in self._copies.controls}
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._timer = WireTimer()
            for fd in (self._timer.fd, other_fd, *self._control_fds):
                self._epoll.register(fd, select.EPOLLIN)
            self._epoll.register(self._copies.done_fd, 0)
            on_error.pop_all()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def pieces(
        self, entries: Entries, peer: LoopbackPeer, dst_region: int, local: Mapping[int, Region]
    ) -> list[Piece] | None:
        """`entries` as the processes take them; None where a thread is to copy them: many, small, or out of memory that
        no other process can map."""
        if self._has_given_up:
            raise TransportError(_LOST)
        lengths = entries.lengths.tolist()
        if not 0 < len(lengths) <= _MAX_PIECES or min(lengths) < _LEAST_PIECE_BYTES:
            return None
        dst_key = self._dst_keys.get((peer.name, dst_region))
        if dst_key is None:
            remote = peer.regions[dst_region]
            dst_key = self._copies.map(peer.fds[dst_region], remote.num_bytes)
            self._dst_keys[peer.name, dst_region] = dst_key
        dst_address = peer.regions[dst_region].address
        pieces = []
        for src, dst, num_bytes in zip(entries.src.tolist(), entries.dst.tolist(), lengths, strict=True):
            source = self._source(src, local)
            if source is None:
                return None
            src_key, src_offset = source
            pieces.append(Piece(src_key, src_offset, dst_key, dst - dst_address, num_bytes))
        return pieces

    def _source(self, address: int, local: Mapping[int, Region]) -> tuple[int, int] | None:
        """The mapping that holds what lies at `address`, which is in a region, and the byte in it."""
        for region_id, region in local.items():
            offset = address - region.address
            if 0 <= offset < region.num_bytes:
                if region.fd is None:
                    return None
                if region_id not in self._src_keys:
                    self._src_keys[region_id] = self._copies.map(region.fd, region.num_bytes)
                return self._src_keys[region_id], offset
        raise AssertionError(f"{address:#x} lies in no region, though the write was checked")

    def submit(self, write_id: int, pieces: list[Piece], due_s: float) -> None:
        """Copy `pieces`. `due_s` is on the monotonic clock, and no earlier than that of the write before."""
        self._copies.submit(write_id, pieces)
        self._is_copied[write_id] = False
        self._due.append((due_s, write_id))
        if len(self._due) == 1:
            self._set_timer(due_s)

    def collect(self) -> tuple[list[int], float]:
        """The writes that have ended, and for how many seconds processes have copied since the last call."""
        if self._has_given_up:
            return [], 0.0
        self._check_alive()
        busy_s = self._note_copied()
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            write_id = self._due.popleft()[1]
            if write_id in self._is_copied:
                self._late.add(write_id)
        ended = [write_id for write_id in self._late if self._is_copied[write_id]]
        self._forget_writes(ended)
        self._set_timer(self._due[0][0] if self._due else 0.0)
        if self._watches_copies != bool(self._late):
            self._watches_copies = not self._watches_copies
            self._epoll.modify(self._copies.done_fd, select.EPOLLIN if self._watches_copies else 0)
        return ended, busy_s

    def drop_peer(self, peer: LoopbackPeer, write_ids: list[int]) -> None:
        """When it returns, nothing is written to `peer`. Its `write_ids` are not collected any more."""
        self._forget_writes(write_ids)
        known = [names for names in self._dst_keys if names[0] == peer.name]
        self._unmap({self._dst_keys.pop(names) for names in known})

    def drop_sources(self, region_ids: list[int]) -> None:
        """Forget local regions: other memory may lie behind them, or none. Writes under way are copied before."""
        keys = {self._src_keys.pop(region_id) for region_id in region_ids if region_id in self._src_keys}
        while self._copies.has_backlog:
            select.select([self._copies.done_fd, *self._control_fds], [], [])
            self._check_alive()
            self._note_copied()
        self._unmap(keys)

    def give_up(self) -> list[int]:
        """End the processes; the writes that have not ended, which move nothing any more. Nothing follows but `close`
        and what finds nothing to do."""
        lost = list(self._is_copied)
        self._forget_writes(lost)
        self._due.clear()
        self._dst_keys.clear()
        self._src_keys.clear()
        if not self._has_given_up:
            self._has_given_up = True
            self._copies.end()
            for fd in (*self._control_fds, self._copies.done_fd):
                self._epoll.unregister(fd)
            self._control_fds.clear()
            self._set_timer(0.0)
        return lost

    def close(self) -> None:
        """When it returns, nothing is copied any more."""
        self._epoll.close()
        if self._timer is not None:
            self._timer.close()
        self._copies.close()

    def _check_alive(self) -> None:
        for fd, _ in self._epoll.poll(0):
            if fd in self._control_fds:
                raise TransportError(_LOST)

    def _note_copied(self) -> float:
        """What `collect` tells of the processes' time."""
        copied, busy_s = self._copies.ended()
        for write_id in copied:
            if write_id in self._is_copied:
                self._is_copied[write_id] = True
        return busy_s

    def _unmap(self, keys: set[int]) -> None:
        if keys:
            self._copies.unmap(keys)

    def _forget_writes(self, write_ids: list[int]) -> None:
        for write_id in write_ids:
            self._is_copied.pop(write_id, None)
            self._late.discard(write_id)

    def _set_timer(self, due_s: float) -> None:
        assert self._timer is not None
        self._timer.set(due_s)
