"""Agent side of the hand-off: takes pools from workers without ever waiting for one of them.

A descriptor that came in is owned by the connection's parser until it is mapped or closed; every way out of the
parser does one of the two.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable

import msgspec

from kvxfer.control.device_handoff import MAPPING_TIMEOUT_S, CallInThread, DeviceMapping
from kvxfer.control.handoff_events import HandoffEvent, LostPool, ReceivedPool, RefusedHandoff
from kvxfer.control.handoff_messages import (
    HANDOFF_VERSION,
    FrameReader,
    HandoffMessage,
    LastWord,
    MoreEntries,
    PeerWord,
    PoolAccepted,
    PoolOffer,
    PoolPreparing,
    PoolRefused,
    SharedStream,
    SlotsMoved,
    pack,
)
from kvxfer.control.ids import new_id
from kvxfer.control.shared_memory import HeldMemory, attach, share
from kvxfer.control.socket_dir import HANDOFF_SOCKET, Acceptor, SocketClaim, group_only_umask
from kvxfer.errors import ConfigError, HandoffError, LayoutError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory, check_memfd
from kvxfer.streams.device import MappedPool
from kvxfer.streams.ring import Ring

HANDOFF_TIMEOUT_S = 5.0
"""A worker that has connected must have said everything within this time."""
MAX_CONNECTIONS = 64
_PEER_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

__all__ = ["HandoffEvent", "HandoffListener", "LostPool", "ReceivedPool", "RefusedHandoff"]

_offer_decoder = msgspec.msgpack.Decoder(PoolOffer)


ShareStream = Callable[[PoolLayout, int], tuple[Ring, HostMemory | MappedPool, int]]
"""Makes a ring for a pool that lies so, and tells where the slots are now, which a worker that sees itself as that
process is to map (0: none is), and how often they have moved. The ring is the caller's, the slots are not. Raises
`OSError` where there is no memory."""


class HandoffListener:
    """Listens at `{socket_dir}/handoff.sock` (0660) for workers of the agent's own user, or root."""

    def __init__(
        self,
        socket_dir: str | os.PathLike[str],
        share_stream: ShareStream | None = None,
        *,
        has_gpu_slots: bool = False,
        call: CallInThread | None = None,
    ) -> None:
        """Claim the path and listen; make the `WorkerListener` first. Raises `ConfigError`.

        Without `share_stream` workers are refused that want to move the rows themselves, without `call`, which runs
        something in a thread, those that want the agent to move rows of a GPU, and with `has_gpu_slots` pools in host
        memory: nothing moves rows between the two.
        """
        self._share_stream = share_stream
        self.has_gpu_slots = has_gpu_slots
        self._claim = SocketClaim(socket_dir, HANDOFF_SOCKET, "handoff.lock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._epoll = select.epoll()
        self._call = call
        self._mapped_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # a pool of a GPU has been mapped, or has not
        self._connections: dict[int, _Connection] = {}
        try:
            with group_only_umask():
                self._socket.bind(str(self._claim.path))
            self._socket.listen(MAX_CONNECTIONS)
        except OSError as error:
            self.close()
            raise ConfigError(f"socket_dir: cannot listen at {self._claim.path}: {error.strerror}") from error
        self._acceptor = Acceptor(self._socket, self._epoll)
        self._epoll.register(self._mapped_fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable while `poll()` has something to do, but for what only time brings."""
        return self._epoll.fileno()

    def poll(self, now_s: float) -> list[HandoffEvent]:
        """What happened. Call it when `fileno()` is readable and at every tick; `now_s` is a monotonic clock."""
        events: list[HandoffEvent] = []
        self._acceptor.look(now_s)
        for fd, _ in self._epoll.poll(0):
            if fd == self._mapped_fd:
                os.eventfd_read(fd)
            else:
                events += self._accept(now_s) if fd == self._socket.fileno() else self._advance(self._connections[fd])
        for connection in list(self._connections.values()):
            if connection.mapping is not None and connection.mapping.is_done:
                events.append(self._take_mapped(connection))
        for connection in list(self._connections.values()):
            if connection.is_silent and now_s >= connection.expires_s:
                events.append(self._refuse(connection, f"no complete offer within {HANDOFF_TIMEOUT_S} s"))
        return events

    def release(self, pool: str) -> None:
        """Hang up on the worker of `pool`: it sees its agent as lost, so nothing may touch the pool any more.

        Does nothing for a pool whose worker is gone.
        """
        for connection in list(self._connections.values()):
            if connection.pool == pool:
                self._drop(connection)

    def move_slots(self, pool: str, move: int, slots: HostMemory | MappedPool) -> None:
        """Tell the worker of `pool` that the slots lie in other memory; `move` counts such moves.

        Does nothing where the worker is gone, or takes nothing any more: no `SlotsMapped` comes then.
        """
        for connection in self._connections.values():
            if connection.pool == pool:
                shared, fds = share(slots)
                connection.say(SlotsMoved(move=move, slots=shared), fds)

    def tell(self, pool: str, word: PeerWord | MoreEntries, fds: list[int]) -> bool:
        """Say `word` to the worker of `pool`; False where it takes nothing now. One that is gone needs no words."""
        return all(connection.say(word, fds) for connection in self._connections.values() if connection.pool == pool)

    def say_last(self, pool: str, num_events: int) -> None:
        """Tell the worker of `pool`, who is about to see the end, how many events it was sent, so that it hears them
        all before it takes its agent for lost."""
        for connection in self._connections.values():
            if connection.pool == pool:
                connection.say(LastWord(num_events=num_events))

    def close(self) -> None:
        """Hang up on every worker and stop listening. Mapped pools stay with whoever has them.

        A worker takes the end of its connection as proof that nothing of the agent touches its pool any more: let
        all actions on pools end first. Calling it again does nothing.
        """
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._epoll.close()
        self._socket.close()
        if self._mapped_fd >= 0:
            os.close(self._mapped_fd)
            self._mapped_fd = -1
        self._claim.close()

    def _accept(self, now_s: float) -> list[HandoffEvent]:
        try:
            accepted = self._acceptor.accept(now_s)
        except HandoffError as error:
            return [RefusedHandoff(str(error))]
        if accepted is None:
            return []
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
            received = connection.receive(self)
        except HandoffError as error:
            return [self._refuse(connection, str(error))]
        return [] if received is None else [received]

    def _take_mapped(self, connection: _Connection) -> HandoffEvent:
        try:
            return connection.take_mapped(self)
        except HandoffError as error:
            return self._refuse(connection, str(error))

    def map_in_thread(self, offer: PoolOffer, fds: list[int]) -> DeviceMapping:
        """Begin to map a pool of a GPU; `poll()` looks for its end. Takes over `fds`. Raises `HandoffError`."""
        if self._call is None or self._share_stream is None:
            for fd in fds:
                os.close(fd)
            raise HandoffError("pool: got memory of a GPU, expected host memory: this agent maps no other")
        return DeviceMapping(offer, fds, self._call, lambda: os.eventfd_write(self._mapped_fd, 1))

    def share_stream(self, layout: PoolLayout, pid: int) -> tuple[Ring, HostMemory | MappedPool, int]:
        """`ShareStream`. Raises `HandoffError`."""
        if self._share_stream is None:
            raise HandoffError("placement: got worker, expected agent: this agent orders no streams")
        try:
            return self._share_stream(layout, pid)
        except OSError as error:
            raise HandoffError(f"no memory for a ring ({error.strerror})") from error

    def _refuse(self, connection: _Connection, detail: str) -> RefusedHandoff:
        connection.say(PoolRefused(detail=detail[:2000]))
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
        self.mapping: DeviceMapping | None = None
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        self.pid, self.uid, _ = _PEER_CREDENTIALS.unpack(credentials)
        self._reader = FrameReader(accepted)

    @property
    def is_silent(self) -> bool:
        """Whether it has yet to make its offer."""
        return self.pool is None and self.mapping is None

    def receive(self, listener: HandoffListener) -> ReceivedPool | None:
        """Read what is there. Raises `HandoffError` for anything that cannot become a pool."""
        try:
            frame = self._reader.read()
        except OSError as error:
            raise HandoffError(f"the worker hung up ({error.strerror})") from error
        self._reader.check_fds()
        if len(self._reader.fds) > 1:
            raise HandoffError(f"descriptors: got {len(self._reader.fds)}, expected one at most")
        if self._reader.is_ended:
            raise HandoffError(f"the worker hung up after {self._reader.num_bytes} bytes")
        if frame is None:
            return None
        if self.mapping is not None:
            raise HandoffError("got more than the offer, expected a worker that waits for its answer")
        offer = _decode_offer(frame)
        if len(self._reader.fds) != (offer.pool is not None and offer.pool.has_fd):
            raise HandoffError(f"descriptors: got {len(self._reader.fds)}, expected one, of the pool that is offered")
        if listener.has_gpu_slots and offer.pool is not None and offer.pool.gpu is None:
            raise HandoffError(
                "pool: got one in host memory, expected one on a GPU, where the slots of this agent lie: set "
                'slots.kind = "pinned_host" in its configuration'
            )
        return self._map_pool(offer, listener) if offer.placement == "agent" else self._share(offer, listener)

    def say(self, message: HandoffMessage, fds: list[int] | None = None) -> bool:
        """Send at once or not at all, and whether it was: a worker that cannot take these few bytes will see the end of
        the connection."""
        try:
            socket.send_fds(self.socket, [pack(message)], fds or [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self.mapping is not None:
            self.mapping.close()
        self._reader.close()
        self.socket.close()

    def _map_pool(self, offer: PoolOffer, listener: HandoffListener) -> ReceivedPool | None:
        if offer.pool is None:
            raise HandoffError("pool: got none, expected one to map with placement agent")
        if offer.pool.gpu is not None:
            self.mapping = listener.map_in_thread(offer, self._reader.take_fds())
            self.say(PoolPreparing(timeout_s=MAPPING_TIMEOUT_S))
            return None
        memory = attach(offer.pool, self._reader.fds, "pool")
        assert isinstance(memory, HostMemory)
        self.pool = new_id()
        self.say(PoolAccepted(pool=self.pool))
        return ReceivedPool(self.pool, offer.num_bytes, offer.layout, self.pid, memory=memory)

    def take_mapped(self, listener: HandoffListener) -> ReceivedPool:
        """A pool of a GPU that is mapped now: the worker gets a ring for its timeline. Raises `HandoffError`."""
        assert self.mapping is not None
        ring, _, move = listener.share_stream(self.mapping.offer.layout, 0)
        try:
            mapped, shared = self.mapping.take()
        except HandoffError:
            ring.close()
            raise
        offer, self.mapping = self.mapping.offer, None
        self.pool = new_id()
        stream = SharedStream(ring_bytes=ring.memory.num_bytes, num_lanes=ring.num_lanes)
        self.say(PoolAccepted(pool=self.pool, stream=stream), [ring.memory.fd])
        return ReceivedPool(
            self.pool, offer.num_bytes, offer.layout, self.pid, ring=ring, shared=shared, move=move, device=mapped
        )

    def _share(self, offer: PoolOffer, listener: HandoffListener) -> ReceivedPool:
        """The pool stays the worker's; its stream gets the slots and a ring."""
        if offer.pool is not None and offer.pool.gpu is None:
            check_memfd(self._reader.fds[0], offer.num_bytes)
        ring, slots, move = listener.share_stream(offer.layout, offer.pid)
        shared_slots, fds = share(slots)
        stream = SharedStream(ring_bytes=ring.memory.num_bytes, num_lanes=ring.num_lanes, slots=shared_slots)
        self.pool = new_id()
        self.say(PoolAccepted(pool=self.pool, stream=stream), [ring.memory.fd, *fds])
        shared = None if offer.pool is None else HeldMemory(offer.pool, *self._reader.take_fds())
        return ReceivedPool(self.pool, offer.num_bytes, offer.layout, self.pid, ring=ring, shared=shared, move=move)


def _decode_offer(header: bytes) -> PoolOffer:
    try:
        offer = _offer_decoder.decode(header)
        offer.layout.check_fits(offer.num_bytes)
    except (msgspec.MsgspecError, LayoutError, RecursionError) as error:
        raise HandoffError(f"header: {error}") from error
    if offer.version != HANDOFF_VERSION:
        raise HandoffError(f"header: version: got {offer.version}, expected {HANDOFF_VERSION}")
    if offer.pool is not None and offer.pool.num_bytes != offer.num_bytes:
        raise HandoffError(f"header: pool: got {offer.pool.num_bytes} bytes, expected the announced {offer.num_bytes}")
    return offer
