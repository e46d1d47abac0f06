"""Agent side of the hand-off: takes pools from workers without ever waiting for one of them.

A descriptor that came in is owned by the connection's parser until it is mapped or closed; every way out of the
parser does one of the two.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from array import array
from dataclasses import dataclass

import msgspec

from kvxfer.control.handoff import (
    HANDOFF_VERSION,
    LENGTH,
    MAX_HEADER_BYTES,
    PoolAccepted,
    PoolOffer,
    PoolRefused,
    pack,
)
from kvxfer.control.ids import new_id
from kvxfer.control.socket_dir import HANDOFF_SOCKET, SocketClaim, group_only_umask
from kvxfer.errors import ConfigError, HandoffError, LayoutError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory

HANDOFF_TIMEOUT_S = 5.0
"""A worker that has connected must have said everything within this time."""
MAX_CONNECTIONS = 64
_PAUSE_S = 1.0
_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAX_FDS = 4

_offer_decoder = msgspec.msgpack.Decoder(PoolOffer)


@dataclass(frozen=True, slots=True)
class ReceivedPool:
    """A worker's pool has been mapped. `memory` is the receiver's to close. `pid` is 0 for other PID namespaces."""

    pool: str
    memory: HostMemory
    layout: PoolLayout
    pid: int


@dataclass(frozen=True, slots=True)
class RefusedHandoff:
    """A hand-off failed; nothing of it is left. For the log."""

    detail: str


@dataclass(frozen=True, slots=True)
class LostPool:
    """The worker that handed over `pool` has gone or has hung up."""

    pool: str


HandoffEvent = ReceivedPool | RefusedHandoff | LostPool


class HandoffListener:
    """Listens at `{socket_dir}/handoff.sock` (0660) for workers of the agent's own user, or root."""

    def __init__(self, socket_dir: str | os.PathLike[str]) -> None:
        """Claim the path and listen; make the `WorkerListener` first. Raises `ConfigError`."""
        self._claim = SocketClaim(socket_dir, HANDOFF_SOCKET, "handoff.lock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._paused_until_s = 0.0
        try:
            with group_only_umask():
                self._socket.bind(str(self._claim.path))
            self._socket.listen(MAX_CONNECTIONS)
        except OSError as error:
            self.close()
            raise ConfigError(f"socket_dir: cannot listen at {self._claim.path}: {error.strerror}") from error
        self._socket.setblocking(False)
        self._epoll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable while `poll()` has something to do, but for what only time brings."""
        return self._epoll.fileno()

    def poll(self, now_s: float) -> list[HandoffEvent]:
        """What happened. Call it when `fileno()` is readable and at every tick; `now_s` is a monotonic clock."""
        events: list[HandoffEvent] = []
        if self._paused_until_s and now_s >= self._paused_until_s:
            self._paused_until_s = 0.0
            self._epoll.modify(self._socket, select.EPOLLIN)
        for fd, _ in self._epoll.poll(0):
            events += self._accept(now_s) if fd == self._socket.fileno() else self._advance(self._connections[fd])
        for connection in list(self._connections.values()):
            if connection.pool is None and now_s >= connection.expires_s:
                events.append(self._refuse(connection, f"no complete offer within {HANDOFF_TIMEOUT_S} s"))
        return events

    def release(self, pool: str) -> None:
        """Hang up on the worker of `pool`: it sees its agent as lost, so nothing may touch the pool any more.

        Does nothing for a pool whose worker is gone.
        """
        for connection in list(self._connections.values()):
            if connection.pool == pool:
                self._drop(connection)

    def close(self) -> None:
        """Hang up on every worker and stop listening. Mapped pools stay with whoever has them.

        A worker takes the end of its connection as proof that nothing of the agent touches its pool any more: let
        all actions on pools end first. Calling it again does nothing.
        """
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._epoll.close()
        self._socket.close()
        self._claim.close()

    def _accept(self, now_s: float) -> list[HandoffEvent]:
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return []
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            # The waiting worker keeps the socket readable: look away for a while instead of spinning.
            self._paused_until_s = now_s + _PAUSE_S
            self._epoll.modify(self._socket, 0)
            return [RefusedHandoff(f"cannot accept a worker: {error.strerror}")]
        accepted.setblocking(False)
        connection = _Connection(accepted, now_s + HANDOFF_TIMEOUT_S)
        self._connections[accepted.fileno()] = connection
        self._epoll.register(accepted, select.EPOLLIN)
        if connection.uid not in (os.geteuid(), 0):
            return [self._refuse(connection, f"user: got uid {connection.uid}, expected {os.geteuid()} or root")]
        if len(self._connections) > MAX_CONNECTIONS:
            return [self._refuse(connection, f"got more than {MAX_CONNECTIONS} workers at once")]
        return []

    def _advance(self, connection: _Connection) -> list[HandoffEvent]:
        if connection.pool is not None:
            self._drop(connection)  # A mapped pool's connection is silent: whatever is there to read ends it.
            return [LostPool(connection.pool)]
        try:
            received = connection.receive()
        except HandoffError as error:
            return [self._refuse(connection, str(error))]
        return [] if received is None else [received]

    def _refuse(self, connection: _Connection, detail: str) -> RefusedHandoff:
        connection.reply(PoolRefused(detail=detail[:2000]))
        self._drop(connection)
        return RefusedHandoff(detail)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        del self._connections[fd]
        self._epoll.unregister(fd)
        connection.close()


class _Connection:
    """One worker: bytes and descriptors that came in until they make an offer, then its pool's id."""

    def __init__(self, accepted: socket.socket, expires_s: float) -> None:
        self.socket = accepted
        self.expires_s = expires_s
        self.pool: str | None = None
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        self.pid, self.uid, _ = _PEER_CREDENTIALS.unpack(credentials)
        self._data = bytearray()
        self._fds: list[int] = []

    def receive(self) -> ReceivedPool | None:
        """Read what is there. Raises `HandoffError` for anything that cannot become a pool."""
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(
                self._num_missing(), socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise HandoffError(f"the worker hung up ({error.strerror})") from error
        self._keep_fds(ancillary)
        self._data += data
        if flags & socket.MSG_CTRUNC or len(self._fds) > 1:
            raise HandoffError(
                "descriptors: got more than one, or more than this process may open; expected exactly one"
            )
        if not data:
            raise HandoffError(f"the worker hung up after {len(self._data)} bytes")
        return None if self._num_missing() else self._map_pool()

    def reply(self, message: PoolAccepted | PoolRefused) -> None:
        """Send at once or not at all: a worker that cannot take these few bytes will see the end of the connection."""
        try:
            self.socket.send(pack(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self.socket.close()

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds += fds

    def _num_missing(self) -> int:
        """Bytes that are still to come, as far as it is known: the length first, then the header."""
        if len(self._data) < LENGTH.size:
            return LENGTH.size - len(self._data)
        (header_bytes,) = LENGTH.unpack_from(self._data)
        if not 1 <= header_bytes <= MAX_HEADER_BYTES:
            raise HandoffError(f"header: got a length of {header_bytes}, expected 1 to {MAX_HEADER_BYTES} bytes")
        return LENGTH.size + int(header_bytes) - len(self._data)

    def _map_pool(self) -> ReceivedPool:
        offer = _decode_offer(self._data[LENGTH.size :])
        if not self._fds:
            raise HandoffError("descriptors: got none, expected exactly one")
        fd = self._fds.pop()  # From here on it is the memory's, also when attaching raises.
        try:
            memory = HostMemory.attach(fd, offer.num_bytes)
        except (OSError, OverflowError) as error:
            raise HandoffError(f"pool descriptor: cannot be mapped for reading and writing ({error})") from error
        self.pool = new_id()
        self._data.clear()
        self.reply(PoolAccepted(pool=self.pool))
        return ReceivedPool(self.pool, memory, offer.layout, self.pid)


def _decode_offer(header: bytearray) -> PoolOffer:
    try:
        offer = _offer_decoder.decode(header)
        offer.layout.check_fits(offer.num_bytes)
    except (msgspec.MsgspecError, LayoutError, RecursionError) as error:
        raise HandoffError(f"header: {error}") from error
    if offer.version != HANDOFF_VERSION:
        raise HandoffError(f"header: version: got {offer.version}, expected {HANDOFF_VERSION}")
    return offer
