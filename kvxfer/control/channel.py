"""Channels between processes, for a loop on one thread.

`WorkerListener` and `WorkerConnection` join a worker and its agent over a unix socket; `kvxfer.control.peer_channel`
has those that join two agents over TCP. Only these two files and `kvxfer.control.doorkeeper` know ZMQ.

Nothing here ever waits for a peer: `receive()` and `send()` return at once, every queue is bounded, and only
`Selector.wait()` sleeps.

A channel belongs to one thread. Messages between one pair arrive in order; a lost connection may lose the newest ones.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Container, Iterable
from types import TracebackType
from typing import Protocol, Self

import zmq

from kvxfer.control.codec import MAX_FRAME_BYTES
from kvxfer.control.doorkeeper import ConnectionWatch, is_readable
from kvxfer.control.socket_dir import CONTROL_SOCKET, SocketClaim, group_only_umask, socket_path
from kvxfer.errors import ConfigError, ControlError, ProtocolError

REMOTE = b""
"""Name of the one peer at the other end of a `Connection` or a `WorkerConnection`."""
_QUEUE_MESSAGES = 8192
_LINGER_MS = 250
_DONTWAIT, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_NEVER_MS = (1 << 31) - 1
HANDSHAKE_MS = 5000
_MAX_SOCKETS = 8192
_MAX_DROPS_PER_CALL = 64


class Context:
    """One ZMQ context, alive while any of its sockets is open: its threads and descriptors go with the last."""

    def __init__(self) -> None:
        _contexts.add(self)
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._num_users = 0

    def open_socket(self, kind: int) -> zmq.Socket[bytes]:
        """A new socket; `close_socket` it. Raises `ControlError` where the process has no descriptor left."""
        with self._lock:
            try:
                if self._context is None:
                    self._context = zmq.Context()
                    self._context.max_sockets = _MAX_SOCKETS
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


_contexts: weakref.WeakSet[Context] = weakref.WeakSet()
_shared = Context()


def _after_fork() -> None:
    for context in list(_contexts):
        context.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Channel:
    """One socket. `dropped` counts messages without exactly one frame, or from a sender that may not speak."""

    def __init__(self, kind: int, max_frame_bytes: int, context: Context | None = None) -> None:
        """Open a socket in `context`, or in the one that all channels without their own share."""
        self.dropped = 0
        self._pid = os.getpid()
        self._max_frame_bytes = max_frame_bytes
        self._has_envelope = kind == zmq.ROUTER  # the name of the other end comes before each message
        self._closed = False
        self._context = context or _shared
        self._watch: ConnectionWatch | None = None
        self._helpers: list[zmq.Socket[bytes]] = []
        # What a selector has found just now, True or False; None where nobody has looked since.
        self._is_readable: bool | None = None
        self._has_helper_news: bool | None = None
        self._part: zmq.Frame | None = None  # that was read last
        self._socket = self._context.open_socket(kind)
        self._set_options()

    def _set_options(self) -> None:
        """What every socket is given before it binds or connects."""
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = _QUEUE_MESSAGES
        self._socket.maxmsgsize = self._max_frame_bytes
        self._socket.handshake_ivl = HANDSHAKE_MS
        if self._has_envelope:
            # Without this a message for a peer that is gone would vanish in silence.
            self._socket.router_mandatory = 1

    def _open_helper(self, kind: int) -> zmq.Socket[bytes]:
        """Another socket for `receive()` to look at; it is closed with the channel."""
        self._helpers.append(self._context.open_socket(kind))
        return self._helpers[-1]

    def _watch_connections(self) -> ConnectionWatch:
        self._watch = ConnectionWatch(self._socket, self._open_helper(zmq.PAIR))
        return self._watch

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next (sender, frame), or None where there is none now or the channel is closed. Never blocks."""
        self.look()
        return self.next_frame()

    def look(self) -> None:
        """What `receive()` does besides: once is enough where many frames are read in a row by `next_frame()`."""
        has_news, self._has_helper_news = self._has_helper_news, None
        if has_news is not False and not self._closed:
            self._look_at_helpers()

    def _look_at_helpers(self) -> None:
        """Read what has come from sockets beside the one for messages."""

    def found(self, ready: Container[int | zmq.Socket[bytes]]) -> None:
        """A selector has looked at all sockets and found these ready: the next `look()` and the next `next_frame()`
        need not ask again. To ask costs as much as to read."""
        self._is_readable = self._socket in ready
        self._has_helper_news = bool(self._helpers) and any(helper in ready for helper in self._helpers)

    def next_frame(self) -> tuple[bytes, bytes] | None:
        """As `receive()`."""
        if self._closed:
            return None
        socket = self._socket
        for _ in range(_MAX_DROPS_PER_CALL):
            can_read, self._is_readable = self._is_readable, None
            if can_read is False or not (can_read or is_readable(socket)):
                return None
            sender = socket.recv(_DONTWAIT) if self._has_envelope else REMOTE
            self._part = part = socket.recv(_DONTWAIT, copy=False)
            if part.more:
                while part.more:  # a peer may send many thousand
                    part = socket.recv(_DONTWAIT, copy=False)
            elif self._is_sender(sender):
                return sender, part.bytes
            self.dropped += 1
        return None

    def _is_sender(self, _name: bytes) -> bool:
        """Whether the message just read may come from the one who is called so."""
        return True

    def send(self, to: bytes, frame: bytes) -> bool:
        """Queue `frame` for `to`: a sender that `receive()` named, or `REMOTE`. Never blocks.

        False: its queue is full or it is gone; what was queued earlier may or may not arrive, so treat it as lost.
        Raises `ProtocolError` for a frame that the other end would refuse for its length.
        """
        if len(frame) > self._max_frame_bytes:
            raise ProtocolError(f"frame: got {len(frame)} bytes, expected at most {self._max_frame_bytes}")
        try:
            if self._has_envelope:
                self._socket.send(to, _MORE)
            self._socket.send(frame, _DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """All that `receive()` looks at, for `Selector`."""
        return (self._socket, *self._helpers)

    def readable(self) -> bool:
        """Whether `receive()` has something to look at."""
        return any(each.poll(0, zmq.POLLIN) for each in self.sockets())

    def fileno(self) -> int:
        """A descriptor that turns readable at an *edge*: after it woke, and after every send, drain until
        `readable()` is false. `Selector` does not need it."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the socket; what was sent last leaves within the linger time. Calling it again does nothing."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            if self._watch is not None:
                self._watch.stop()
            for each in (*self._helpers, self._socket):
                self._context.close_socket(each)

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
        # Workers hand their pool over as the agent's own user, or root: nobody else has anything to say here.
        for uid in {os.geteuid(), 0}:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, uid)
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
    """Worker side of the workers' channel. It does not reconnect: another agent at the same path is another agent."""

    def __init__(self, socket_dir: str | os.PathLike[str]) -> None:
        """Connect in the background. Raises `ConfigError` for a path that no unix socket can have."""
        path = socket_path(socket_dir, CONTROL_SOCKET)
        super().__init__(zmq.DEALER, MAX_FRAME_BYTES)
        # Weeks. Told never to reconnect, ZMQ would throw away what has arrived and was not read when the agent ends.
        self._socket.reconnect_ivl = _NEVER_MS
        self._socket.connect(f"ipc://{path}")


class HasFileno(Protocol):
    """A plain descriptor that turns readable: an event, a unix socket, an epoll."""

    def fileno(self) -> int: ...


class Selector:
    """Waits for channels and for plain descriptors at once. Remove what you close before you close it."""

    def __init__(self, items: Iterable[Channel | HasFileno | int] = ()) -> None:
        self._poller = zmq.Poller()
        self._items: dict[int | zmq.Socket[bytes], Channel | HasFileno | int] = {}
        self._channels: list[Channel] = []
        for item in items:
            self.add(item)

    def add(self, item: Channel | HasFileno | int) -> None:
        """Wait for `item` as well. Adding it again does nothing."""
        if isinstance(item, Channel) and item not in self._channels:
            self._channels.append(item)
        for key in _poll_keys(item):
            self._items[key] = item
            self._poller.register(key, zmq.POLLIN)

    def remove(self, item: Channel | HasFileno | int) -> None:
        """Wait for `item` no longer. `KeyError` where it was not added."""
        for key in _poll_keys(item):
            del self._items[key]
            self._poller.unregister(key)
        if isinstance(item, Channel):
            self._channels.remove(item)

    def wait(self, timeout_s: float | None) -> list[Channel | HasFileno | int]:
        """What is readable, in the order in which it was added: agents read requests before they see who is gone.
        Empty after `timeout_s` (None: no limit). A descriptor whose other end is gone counts as readable."""
        timeout_ms = None if timeout_s is None else max(0, -int(-timeout_s * 1000 // 1))
        ready = dict(self._poller.poll(timeout_ms))  # in the order of `add`
        for channel in self._channels:
            channel.found(ready)
        # One item may have several sockets.
        return list({id(item): item for item in map(self._items.__getitem__, ready)}.values())


def _poll_keys(item: Channel | HasFileno | int) -> tuple[int | zmq.Socket[bytes], ...]:
    if isinstance(item, Channel):
        return item.sockets()
    return (item if isinstance(item, int) else item.fileno(),)
