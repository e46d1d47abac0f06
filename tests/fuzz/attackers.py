"""Those who attack a live agent: each sends bytes over a way of its own, and never waits for an answer."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path
from typing import Protocol

import msgspec

from kvxfer.control.channel import REMOTE, Channel, Selector, WorkerConnection
from kvxfer.control.codec import encode, split, unpack
from kvxfer.control.handoff_messages import LENGTH
from kvxfer.control.messages import AbortTransfer, Hello, Message, Refused
from kvxfer.control.peer_channel import Connection, Credentials, new_keys

_WAIT_S = 60.0
_DRAIN_EVERY = 256
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_HANG_UP = struct.pack("ii", 1, 0)  # struct linger: at once, so that ports are not kept waiting


class Attacker(Protocol):
    def send(self, frame: bytes) -> None: ...

    def settle(self) -> None:
        """Return once everything that was sent has been looked at. Raises `AssertionError` where it is not."""
        ...

    def close(self) -> None: ...


class ChannelAttacker:
    """Sends frames over a real channel, as whoever it is let in as. `question` is what it is surely refused for."""

    def __init__(self, channel: Channel, question: Message) -> None:
        self._channel = channel
        self._question = question
        self._num_sent = 0

    def send(self, frame: bytes) -> None:
        self._num_sent += 1
        if self._num_sent % _DRAIN_EVERY == 0:
            self._drain()
        deadline_s = time.monotonic() + _WAIT_S
        while not self._channel.send(REMOTE, frame):
            assert time.monotonic() < deadline_s, "the agent reads no more"
            Selector([self._channel]).wait(0.01)
            self._drain()

    def settle(self) -> None:
        self.send(encode(self._question, request_id=99))
        deadline_s = time.monotonic() + _WAIT_S
        while not self._drain():
            assert time.monotonic() < deadline_s, "the agent does not answer"
            Selector([self._channel]).wait(0.1)

    def _drain(self) -> bool:
        """Read what is there; whether the answer to the question was among it."""
        is_answered = False
        while (received := self._channel.receive()) is not None:
            for message, request_id in map(unpack, split(received[1])):
                if isinstance(message, Refused):
                    is_answered |= request_id == 99 or message.field == "version"
        return is_answered

    def close(self) -> None:
        self._channel.close()


def peer_attacker(endpoint: str, key: str, hello: Hello) -> ChannelAttacker:
    """One whose key is admitted."""
    connection = Connection(endpoint, hello.incarnation, Credentials(new_keys()), key)
    question = msgspec.structs.replace(hello, version=0)
    return ChannelAttacker(connection, question)


def worker_attacker(socket_dir: str) -> ChannelAttacker:
    """A process of the agent's own user that has not attached."""
    return ChannelAttacker(WorkerConnection(socket_dir), AbortTransfer(transfer="0" * 32))


class TcpAttacker:
    """Nobody: a connection for each frame, which goes out as it is, as a CURVE command, or behind a plain greeting."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._num_sent = 0

    def send(self, frame: bytes) -> None:
        self._num_sent += 1
        data = frame[:8192]
        if self._num_sent % 3 == 1:
            data = _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + struct.pack("!Q", len(data)) + data
        elif self._num_sent % 3 == 2:
            data = _GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x26\x05READY" + data
        with socket.create_connection(self._address, timeout=_WAIT_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP)
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)

    def settle(self) -> None:
        """A connection that is accepted comes behind all earlier ones."""
        self.send(b"GET / HTTP/1.1\r\n\r\n")

    def close(self) -> None:
        return


class HandoffAttacker:
    """A process of the agent's own user that hands over no pool."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def send(self, frame: bytes) -> None:
        with self._connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(LENGTH.pack(len(frame)) + frame)

    def _connect(self) -> socket.socket:
        deadline_s = time.monotonic() + _WAIT_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(_WAIT_S)
            try:
                connection.connect(self._path)
            except BlockingIOError:  # its backlog is full
                connection.close()
                assert time.monotonic() < deadline_s, "the agent accepts no more"
                time.sleep(0.001)
            else:
                return connection

    def settle(self) -> None:
        """The agent refuses nonsense with a reason, in the order of its coming."""
        with self._connect() as connection:
            connection.sendall(LENGTH.pack(1) + b"\xc1")
            assert connection.recv(4096)

    def close(self) -> None:
        return
