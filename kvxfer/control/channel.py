"""Channels between processes, for a loop on one thread. The only file that knows ZMQ.

`WorkerListener` and `WorkerConnection` join a worker and its agent over a unix socket, `PeerListener` and `Connection`
two agents over TCP. Nothing here ever waits for a peer: `receive()` and `send()` return at once, every queue is
bounded, and only `Selector.wait()` sleeps.

A channel belongs to one thread. Messages between one pair arrive in order; a lost connection may lose the newest ones.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

import zmq

from kvxfer.control.address import bind_error, check_endpoint, format_endpoint, is_wildcard, resolve
from kvxfer.control.codec import MAX_FRAME_BYTES
from kvxfer.control.socket_dir import CONTROL_SOCKET, SocketClaim, group_only_umask, socket_path
from kvxfer.errors import ConfigError, ControlError, ProtocolError

MAX_PEER_FRAME_BYTES = 8 << 20
"""Frames between agents are smaller than a worker's: no page list ever leaves its side."""
REMOTE = b""
"""Name of the one peer at the other end of a `Connection` or a `WorkerConnection`."""
_QUEUE_MESSAGES = 8192
_LINGER_MS = 250
_HANDSHAKE_MS = 5000
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000
_MAX_DROPS_PER_CALL = 64


class _SharedContext:
    """One ZMQ context a process, alive while any channel is open: its threads and descriptors go with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._num_users = 0

    def open_socket(self, kind: int) -> zmq.Socket[bytes]:
        """A new socket; `close_socket` it. Raises `ControlError` where the process has no descriptor left."""
        with self._lock:
            try:
                self._context = self._context or zmq.Context()
                opened = self._context.socket(kind)
            except zmq.ZMQError as error:
                raise ControlError(f"cannot open a channel: {error.strerror}") from error
            self._num_users += 1
            return opened

    def close_socket(self, opened: zmq.Socket[bytes]) -> None:
        with self._lock:
            opened.close()
            self._num_users -= 1
            if self._num_users == 0 and self._context is not None:
                # Waits for what still leaves closed sockets, at most their linger time.
                self._context.term()
                self._context = None

    def after_fork(self) -> None:
        """A forked child starts afresh: ZMQ's threads did not come along."""
        self._lock = threading.Lock()
        self._context = None
        self._num_users = 0


_shared = _SharedContext()
os.register_at_fork(after_in_child=_shared.after_fork)


class Channel:
    """One socket. `dropped` counts messages without exactly one frame, or from a sender without a proper name."""

    _sender_name: re.Pattern[bytes] | None = None

    def __init__(self, kind: int, max_frame_bytes: int) -> None:
        self.dropped = 0
        self._pid = os.getpid()
        self._max_frame_bytes = max_frame_bytes
        self._num_envelope_frames = 1 if kind == zmq.ROUTER else 0
        self._closed = False
        self._socket = _shared.open_socket(kind)
        self._set_options()

    def _set_options(self) -> None:
        """What every socket is given before it binds or connects; keys and authentication belong here too."""
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = _QUEUE_MESSAGES
        self._socket.maxmsgsize = self._max_frame_bytes
        self._socket.handshake_ivl = _HANDSHAKE_MS
        if self._num_envelope_frames:
            # Without this a message for a peer that is gone would vanish in silence.
            self._socket.router_mandatory = 1

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (sender, frame), or None where there is none now or the channel is closed. Never blocks."""
        if self._closed:
            return None
        for _ in range(_MAX_DROPS_PER_CALL):
            try:
                parts = [self._socket.recv(zmq.DONTWAIT)]
                num_parts = 1
                while self._socket.rcvmore:
                    part = self._socket.recv(zmq.DONTWAIT)
                    num_parts += 1
                    if len(parts) <= self._num_envelope_frames:  # a peer may send many thousand
                        parts.append(part)
            except zmq.Again:
                return None
            if num_parts == self._num_envelope_frames + 1 and self._is_sender(parts[0]):
                return (parts[0], parts[1]) if self._num_envelope_frames else (REMOTE, parts[0])
            self.dropped += 1
        return None

    def _is_sender(self, name: bytes) -> bool:
        return self._sender_name is None or self._sender_name.fullmatch(name) is not None

    def send(self, to: bytes, frame: bytes) -> bool:
        """Queue `frame` for `to`: a sender that `receive()` named, or `REMOTE`. Never blocks.

        False: its queue is full or it is gone; what was queued earlier may or may not arrive, so treat it as lost.
        Raises `ProtocolError` for a frame that the other end would refuse for its length.
        """
        if len(frame) > self._max_frame_bytes:
            raise ProtocolError(f"frame: got {len(frame)} bytes, expected at most {self._max_frame_bytes}")
        parts = [to, frame] if self._num_envelope_frames else [frame]
        try:
            self._socket.send_multipart(parts, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def readable(self) -> bool:
        """Whether `receive()` has something to look at."""
        return bool(self._socket.poll(0, zmq.POLLIN))

    def fileno(self) -> int:
        """A descriptor that turns readable at an *edge*: after it woke, and after every send, drain until
        `readable()` is false. `Selector` does not need it."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the socket; what was sent last leaves within the linger time. Calling it again does nothing."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            _shared.close_socket(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WorkerListener(Channel):
    """Agent side of the workers' channel, at `{socket_dir}/control.sock` (0660 in a directory of 0750)."""

    def __init__(self, socket_dir: str | os.PathLike[str]) -> None:
        """Claim the directory and listen. Raises `ConfigError` where another agent has it or it cannot be used."""
        super().__init__(zmq.ROUTER, MAX_FRAME_BYTES)
        try:
            self._claim = SocketClaim(socket_dir, CONTROL_SOCKET, "lock")
        except BaseException:
            super().close()
            raise
        try:
            with group_only_umask():
                self._socket.bind(f"ipc://{self._claim.path}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"socket_dir: cannot listen at {self._claim.path}: {error.strerror}") from error

    def close(self) -> None:
        super().close()
        if self._pid == os.getpid():
            self._claim.close()


class WorkerConnection(Channel):
    """Worker side of the workers' channel. It never reconnects: another agent at the same path is another agent."""

    def __init__(self, socket_dir: str | os.PathLike[str]) -> None:
        """Connect in the background. Raises `ConfigError` for a path that no unix socket can have."""
        path = socket_path(socket_dir, CONTROL_SOCKET)
        super().__init__(zmq.DEALER, MAX_FRAME_BYTES)
        self._socket.reconnect_ivl = -1
        self._socket.connect(f"ipc://{path}")


class PeerListener(Channel):
    """Prefill agent's side of the channel between agents. `endpoint` is what peers are told to connect to.

    Senders are named by their incarnations. Anything that does not introduce itself so is dropped: ZMQ takes plain
    text, such as an HTTP request, for the oldest version of its own protocol.
    """

    _sender_name = re.compile(rb"[0-9a-f]{32}")

    def __init__(
        self, host: str, port: int, *, allow_wildcard: bool = False, advertise_host: str | None = None
    ) -> None:
        """Listen on one named address. Port 0 takes a free one.

        A wildcard address needs `allow_wildcard` and an `advertise_host` that peers can reach. Raises `ConfigError`.
        """
        address = resolve(host, "host")
        if not 0 <= port <= 65535:
            raise ConfigError(f"port: got {port}, expected 0 to 65535")
        if is_wildcard(address) and not (allow_wildcard and advertise_host):
            raise ConfigError(
                f"host: got {host!r}, expected one named address: a wildcard listens on every network; "
                "where that is meant, set allow_wildcard and advertise_host"
            )
        advertised = resolve(advertise_host, "advertise_host") if advertise_host else address
        if is_wildcard(advertised):
            raise ConfigError(f"advertise_host: got {advertise_host!r}, expected an address that peers can reach")
        super().__init__(zmq.ROUTER, MAX_PEER_FRAME_BYTES)
        # A peer that lost its connection comes back under the same name; the old one may not have ended yet.
        self._socket.router_handover = 1
        self._socket.ipv6 = ":" in address
        try:
            self._socket.bind(format_endpoint(address, port))
        except zmq.ZMQError as error:
            self.close()
            raise bind_error(host, port, error.errno, error.strerror) from error
        bound_port = int(str(self._socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0").rpartition(":")[2])
        self.endpoint = format_endpoint(advertised, bound_port)


class Connection(Channel):
    """Decode agent's side of the channel between agents.

    The listener knows it by `incarnation.encode()`. It reconnects by itself, maybe to a later run of the peer at the
    same address, which then gets what was queued: the first message of a run is `Hello`, and a listener refuses
    everything else from a sender that has not said it.
    """

    def __init__(self, endpoint: str, incarnation: str) -> None:
        """Connect in the background. Raises `ProtocolError` for an endpoint that cannot be one."""
        address, _ = check_endpoint(endpoint)
        super().__init__(zmq.DEALER, MAX_PEER_FRAME_BYTES)
        self._socket.routing_id = incarnation.encode("ascii")
        self._socket.ipv6 = ":" in address
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.reconnect_ivl_max = _RECONNECT_MAX_MS
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"endpoint: cannot connect to {endpoint!r}: {error.strerror}") from error


class HasFileno(Protocol):
    """A plain descriptor that turns readable: an event, a unix socket, an epoll."""

    def fileno(self) -> int: ...


class Selector:
    """Waits for channels and for plain descriptors at once. Remove what you close before you close it."""

    def __init__(self, items: Iterable[Channel | HasFileno | int] = ()) -> None:
        self._poller = zmq.Poller()
        self._items: dict[int | zmq.Socket[bytes], Channel | HasFileno | int] = {}
        for item in items:
            self.add(item)

    def add(self, item: Channel | HasFileno | int) -> None:
        """Wait for `item` as well. Adding it again does nothing."""
        key = _poll_key(item)
        self._items[key] = item
        self._poller.register(key, zmq.POLLIN)

    def remove(self, item: Channel | HasFileno | int) -> None:
        """Wait for `item` no longer. `KeyError` where it was not added."""
        key = _poll_key(item)
        del self._items[key]
        self._poller.unregister(key)

    def wait(self, timeout_s: float | None) -> list[Channel | HasFileno | int]:
        """What is readable, as it was added; empty after `timeout_s` (None: no limit). A descriptor whose other end
        is gone counts as readable."""
        timeout_ms = None if timeout_s is None else max(0, -int(-timeout_s * 1000 // 1))
        return [self._items[key] for key, _ in self._poller.poll(timeout_ms)]


def _poll_key(item: Channel | HasFileno | int) -> int | zmq.Socket[bytes]:
    if isinstance(item, Channel):
        return item._socket
    return item if isinstance(item, int) else item.fileno()
