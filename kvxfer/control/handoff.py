"""Hand-off of a worker's pool to its agent over a unix socket: one sealed memfd and the layout.

On the wire, each way: four bytes of length, big-endian, then that many bytes of msgpack. The worker sends `PoolOffer`
and, with its first byte, the descriptor; the agent answers `PoolAccepted` or `PoolRefused`. The connection then stays
open and silent: its end tells either side that the other is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import weakref
from typing import Annotated

import msgspec

from kvxfer.control.messages import Counter, Id
from kvxfer.control.socket_dir import HANDOFF_SOCKET, socket_path
from kvxfer.errors import AgentLostError, ControlTimeoutError, HandoffError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory

HANDOFF_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
LENGTH = struct.Struct("!I")
_CONNECT_RETRY_S = 0.05


class PoolOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Worker to agent: the pool behind the descriptor has `num_bytes` and lies as `layout` says."""

    version: Counter = HANDOFF_VERSION
    num_bytes: Counter
    layout: PoolLayout


class PoolAccepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="accepted"):
    """Agent to worker: mapped; `pool` is its name from now on."""

    pool: Id


class PoolRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="refused"):
    """Agent to worker: nothing was mapped."""

    detail: Annotated[str, msgspec.Meta(max_length=4000)]


_encoder = msgspec.msgpack.Encoder()
_reply_decoder = msgspec.msgpack.Decoder(PoolAccepted | PoolRefused)


def pack(message: PoolOffer | PoolAccepted | PoolRefused) -> bytes:
    """`message` as it goes over the socket, length first."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class HandoffConnection:
    """Worker side of a hand-over. Keep it open as long as the agent may use the pool.

    `pool` is the id that the agent gave. The descriptor of the memory stays the caller's.
    """

    def __init__(self, connection: socket.socket, pool: str) -> None:
        """Take over `connection`. Use `hand_over`."""
        self.pool = pool
        self._socket = connection
        self._socket.setblocking(False)
        _open_connections.add(self)

    def fileno(self) -> int:
        """Readable once the agent has gone; -1 after `close()`."""
        return self._socket.fileno()

    def lost(self) -> bool:
        """Whether the agent has gone. It says nothing on this connection; bytes that come all the same are ignored."""
        try:
            return not self._socket.recv(4096)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the hand-over: the agent aborts what it does with the pool and unmaps it."""
        self._socket.close()


_open_connections: weakref.WeakSet[HandoffConnection] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child must not keep the connection open: the agent would not see the worker's death."""
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def hand_over(
    socket_dir: str | os.PathLike[str], memory: HostMemory, layout: PoolLayout, timeout_s: float
) -> HandoffConnection:
    """Give the agent at `socket_dir` a mapping of `memory`, which lies as `layout` says.

    Waits up to `timeout_s` seconds in all, also for an agent that has yet to start. Raises `HandoffError` where the
    agent refuses, `LayoutError` where `layout` goes beyond `memory`, `AgentLostError` where there is no agent or it
    hangs up, `ControlTimeoutError` where it does not answer.
    """
    layout.check_fits(memory.num_bytes)
    offer = pack(PoolOffer(num_bytes=memory.num_bytes, layout=layout))
    deadline_s = time.monotonic() + timeout_s
    connection = _connect(str(socket_path(socket_dir, HANDOFF_SOCKET)), deadline_s)
    try:
        return HandoffConnection(connection, _exchange(connection, offer, memory.fd, deadline_s))
    except TimeoutError as error:
        connection.close()
        raise ControlTimeoutError(f"hand-off: the agent at {socket_dir} gave no answer in {timeout_s} s") from error
    except OSError as error:
        connection.close()
        raise AgentLostError(f"hand-off: the agent at {socket_dir} hung up ({error.strerror})") from error
    except BaseException:
        connection.close()
        raise


def _exchange(connection: socket.socket, offer: bytes, fd: int, deadline_s: float) -> str:
    """Send the offer, return the pool's id from the answer."""
    _set_remaining(connection, deadline_s)
    # An agent that refuses may hang up before it has read all; its answer is there to be read all the same.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        num_sent = socket.send_fds(connection, [offer], [fd])
        connection.sendall(offer[num_sent:])
    reply = _receive_reply(connection, deadline_s)
    if isinstance(reply, PoolRefused):
        raise HandoffError(reply.detail)
    return reply.pool


def _connect(path: str, deadline_s: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, TimeoutError) as error:
            connection.close()
            if time.monotonic() + _CONNECT_RETRY_S >= deadline_s:
                raise AgentLostError(
                    f"no agent listens at {path} ({error.strerror}): start it, or name its socket_dir"
                ) from error
        except OSError as error:
            connection.close()
            raise AgentLostError(f"cannot connect to the agent at {path}: {error.strerror}") from error
        else:
            return connection
        time.sleep(_CONNECT_RETRY_S)


def _set_remaining(connection: socket.socket, deadline_s: float) -> None:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    connection.settimeout(remaining_s)


def _receive_reply(connection: socket.socket, deadline_s: float) -> PoolAccepted | PoolRefused:
    (num_bytes,) = LENGTH.unpack(_receive_exactly(connection, LENGTH.size, deadline_s))
    if num_bytes > MAX_HEADER_BYTES:
        raise HandoffError(f"reply: got {num_bytes} bytes, expected at most {MAX_HEADER_BYTES}")
    try:
        return _reply_decoder.decode(_receive_exactly(connection, num_bytes, deadline_s))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HandoffError(f"reply: {error}") from error


def _receive_exactly(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        _set_remaining(connection, deadline_s)
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise AgentLostError("hand-off: the agent hung up without an answer")
        data += part
    return data
